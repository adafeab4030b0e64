//! Identities of small models on disk.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;

use super::*;

/// Elements of a matrix that counts whole.
const ELEMENTS: usize = 40_000;

fn tensors() -> Vec<(String, Vec<f32>)> {
    let names = [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ];
    let values = |seed: usize| (0..ELEMENTS).map(|at| (at * 7 + seed) as f32 / 11.0).collect();
    names.iter().enumerate().map(|(seed, name)| ((*name).to_owned(), values(seed))).collect()
}

fn write_file(path: &Path, tensors: &[(String, Vec<f32>)]) {
    let bytes =
        |values: &Vec<f32>| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let buffers: Vec<Vec<u8>> = tensors.iter().map(|(_, values)| bytes(values)).collect();
    let views = tensors.iter().zip(&buffers).map(|((name, values), bytes)| {
        (name, TensorView::new(Dtype::F32, vec![values.len() / 100, 100], bytes).unwrap())
    });
    let notes = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    fs::write(path, safetensors::serialize(views, Some(notes)).unwrap()).unwrap();
}

/// A model in one file, tied or not.
fn model(tensors: &[(String, Vec<f32>)], tied: bool) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({"hidden_size": 100, "tie_word_embeddings": tied});
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    write_file(&dir.path().join("model.safetensors"), tensors);
    dir
}

fn identity(dir: &tempfile::TempDir) -> TargetIdentity {
    TargetIdentity::read(dir.path(), "Owner/Name").unwrap()
}

#[test]
fn a_copy_is_the_same_and_any_other_tensor_another_model() {
    let own = identity(&model(&tensors(), false));
    assert!(own.is_same_as(&identity(&model(&tensors(), false))));
    assert_eq!(own.to_string(), format!("Owner/Name ({})", own.digests()));
    for number in 0..tensors().len() {
        let mut changed = tensors();
        changed[number].1.iter_mut().for_each(|value| *value += 0.01);
        let other = identity(&model(&changed, false));
        assert!(!own.is_same_as(&other) && own.config == other.config, "{}", changed[number].0);
    }
    let mut renamed = tensors();
    renamed[2].0 = "model.layers.0.self_attn.k_proj.weight".into();
    assert!(!own.is_same_as(&identity(&model(&renamed, false))));
}

#[test]
fn every_element_of_a_small_tensor_counts() {
    let own = identity(&model(&tensors(), false));
    for at in [0, 1023, 1024, 1500, 20_001, ELEMENTS - 1] {
        let mut changed = tensors();
        changed[1].1[at] = -1.0;
        assert!(!own.is_same_as(&identity(&model(&changed, false))), "element {at}");
    }
}

#[test]
fn a_large_tensor_is_sampled_from_its_first_byte_to_its_last() {
    let elements = 600_000;
    let with = |change: fn(usize, f32) -> f32| {
        let values = (0..elements).map(|at| change(at, at as f32 / 7.0)).collect();
        identity(&model(&[("model.layers.0.mlp.up_proj.weight".to_owned(), values)], false))
    };
    let own = with(|_, value| value);
    assert_ne!(with(|_, value| value * 1.001), own);
    assert_ne!(with(|at, value| if at == 0 { 1.0 } else { value }), own);
    assert_ne!(with(|at, value| if at == 599_999 { 1.0 } else { value }), own);
    assert_eq!(with(|at, value| if at == 1500 { 1.0 } else { value }), own, "between two stripes");
}

#[test]
fn shards_are_as_good_as_one_file() {
    let own = identity(&model(&tensors(), false));
    let dir = model(&tensors(), false);
    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    let mut weight_map = serde_json::Map::new();
    for (number, part) in tensors().chunks(4).enumerate() {
        let name = format!("model-{number}.safetensors");
        write_file(&dir.path().join(&name), part);
        weight_map.extend(part.iter().map(|(tensor, _)| (tensor.clone(), name.clone().into())));
    }
    let index = json!({ "weight_map": weight_map }).to_string();
    fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    assert_eq!(identity(&dir), own);
    // As in the Hub's cache before all shards have arrived.
    fs::remove_file(dir.path().join("model-1.safetensors")).unwrap();
    assert_eq!(identity(&dir).weights, None);
}

#[test]
fn without_weights_the_configuration_decides() {
    let dir = model(&tensors(), false);
    let whole = identity(&dir);
    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    let bare = identity(&dir);
    assert!(bare.is_same_as(&whole) && whole.is_same_as(&bare));
    assert!(!bare.is_same_as(&identity(&model(&tensors(), true))), "another configuration");
    fs::remove_file(dir.path().join("config.json")).unwrap();
    assert_eq!(TargetIdentity::read_if_any(dir.path(), "name").unwrap(), None);
}

#[test]
fn a_tied_head_may_be_stored_or_not() {
    let without: Vec<_> =
        tensors().into_iter().filter(|(name, _)| name != "lm_head.weight").collect();
    assert_eq!(identity(&model(&tensors(), true)), identity(&model(&without, true)));
    assert_ne!(identity(&model(&tensors(), false)), identity(&model(&without, false)));
}

#[test]
fn damaged_weights_are_named() {
    let dir = model(&tensors(), false);
    let path = dir.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let message = || TargetIdentity::read(dir.path(), "name").unwrap_err().to_string();
    fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    assert!(message().contains("and its header says"), "{}", message());
    fs::write(&path, "version https://git-lfs.github.com/spec/v1").unwrap();
    assert!(message().contains("its header is longer"), "{}", message());
    fs::write(&path, "").unwrap();
    assert!(message().contains("shorter than any header"), "{}", message());
}

#[test]
fn a_draft_says_which_target_it_is_for() {
    let own = identity(&model(&tensors(), false));
    let draft = tempfile::tempdir().unwrap();
    let config = draft.path().join("config.json");
    fs::write(&config, r#"{"model_type": "qwen3", "block_size": 8}"#).unwrap();
    assert_eq!(TargetIdentity::of_draft(draft.path()).unwrap(), None);
    own.write_into_draft(draft.path()).unwrap();
    assert_eq!(TargetIdentity::of_draft(draft.path()).unwrap(), Some(own));
    assert_eq!(read_json(&config).unwrap()["block_size"], 8);
    fs::write(&config, r#"{"dflash_target": 7}"#).unwrap();
    let error = TargetIdentity::of_draft(draft.path()).unwrap_err().to_string();
    assert!(error.contains("dflash_target"), "{error}");
}

#[test]
fn a_tokenizer_is_its_file_and_its_template() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
    let digest = || tokenizer_digest(dir.path()).unwrap();
    assert_eq!(digest(), None);
    write("tokenizer.json", r#"{"model": {"a": 1, "b": 2}, "truncation": null}"#);
    let bare = digest();
    write("tokenizer.json", r#"{"truncation": {"max": 3}, "model": {"b": 2, "a": 1}}"#);
    assert_eq!(digest(), bare, "the same, saved by another program");
    write("tokenizer_config.json", r#"{"chat_template": "{{ a }}"}"#);
    let with_template = digest();
    assert_ne!(with_template, bare);
    write("chat_template.jinja", "{{ a }}");
    assert_eq!(digest(), with_template, "the same template in a file of its own");
    write("chat_template.jinja", "{{ b }}");
    let other = digest();
    assert_ne!(other, with_template);
    fs::create_dir(dir.path().join("additional_chat_templates")).unwrap();
    write("additional_chat_templates/tool_use.jinja", "{{ tools }}");
    assert_ne!(digest(), other, "what conversations with tools are rendered with");
    fs::remove_file(dir.path().join("chat_template.jinja")).unwrap();
    let in_config = digest();
    assert_ne!(in_config, with_template, "with the other template in tokenizer_config.json too");
    write("additional_chat_templates/tool_use.jinja", "{{ other }}");
    assert_ne!(digest(), in_config);
    write("chat_template.json", r#"{"chat_template": "{{ c }}"}"#);
    let in_json = digest();
    write("additional_chat_templates/tool_use.jinja", "{{ tools }}");
    assert_ne!(digest(), in_json);
}
