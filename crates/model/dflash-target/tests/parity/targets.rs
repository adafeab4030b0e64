//! Targets: every hidden state, logits, and cached decoding, compared with Hugging Face's.
//!
//! The code itself lists the families that it runs. A family that it refuses must be named here, so
//! that one that stops loading is a failure, and so is one that starts loading while still named.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use dflash_golden::{Entry, entries};
use dflash_target::{Family, SequencePart, Target, TargetConfig, TargetOptions};
use dflash_tensor::checkpoint::{TensorFile, write_safetensors};
use dflash_tensor::{Error, Kernels};
use dflash_test_place::{assert_close, place};
use libtest_mimic::Trial;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor, no_grad};

use super::on_all_paths;

/// Architectures that contain, under `text_config`, the text model of one with vectors.
const NESTED: [&str; 5] = [
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
];

const TOLERANCE: f64 = 1e-4;

pub(crate) fn trials() -> Vec<Trial> {
    let found: Vec<Entry> =
        ["targets", "targets2"].into_iter().flat_map(|kind| entries(kind, None)).collect();
    let of_entry = |entry: &Entry| match refused(&entry.path) {
        Some(architecture) => vec![refusal(entry, architecture)],
        None => on_all_paths("targets", entry, check),
    };
    let mut trials: Vec<Trial> = found.iter().flat_map(of_entry).collect();
    trials.extend(SPELLINGS.iter().map(|one| spelling(&found, one)));
    trials.push(Trial::test("targets::every_family_has_vectors_or_is_named", move || {
        every_family_has_vectors_or_is_named(&found);
        Ok(())
    }));
    trials
}

type Named = Vec<(String, Tensor)>;

/// Another form of the vectors' checkpoints.
struct Spelling {
    name: &'static str,
    of: &'static str,
    config: fn(&mut Value),
    /// Maps tensors from Transformers' names and layout.
    tensors: fn(Named) -> Named,
}

/// Forms of released checkpoints, of earlier Transformers, and of image-text models.
const SPELLINGS: [Spelling; 7] = [
    Spelling {
        name: "Gemma 3 for images, before 2026",
        of: "gemma3",
        config: |config| {
            let mut text = config.take();
            let keys = ["architectures", "tie_word_embeddings", "rope_parameters", "layer_types"];
            keys.iter().for_each(|key| drop(text.as_object_mut().unwrap().remove(*key)));
            text["rope_local_base_freq"] = json!(1e4);
            text["rope_theta"] = json!(1e6);
            text["sliding_window_pattern"] = json!(3);
            *config =
                json!({ "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text });
        },
        tensors: |tensors| prefixed(tensors, "language_model."),
    },
    Spelling {
        name: "Gemma 4 as released",
        of: "gemma4",
        config: |config| {
            let mut text = config.take();
            text.as_object_mut().unwrap().remove("per_layer_config");
            text["global_head_dim"] = json!(32);
            // Only in the large models, whose values equal their keys.
            text["num_global_key_value_heads"] = json!(4);
            *config =
                json!({ "architectures": ["Gemma4ForConditionalGeneration"], "text_config": text });
        },
        tensors: |tensors| {
            let renamed = tensors.into_iter();
            renamed
                .map(|(name, x)| (name.replacen("model.", "model.language_model.", 1), x))
                .collect()
        },
    },
    Spelling {
        name: "Gemma 4 with experts as released",
        of: "gemma4_moe",
        config: |config| {
            config.as_object_mut().unwrap().remove("per_layer_config");
            config["global_head_dim"] = json!(32);
            config["num_global_key_value_heads"] = json!(1);
        },
        tensors: |tensors| tensors,
    },
    Spelling {
        name: "Llama 4 for images",
        of: "llama4",
        config: |config| {
            let mut text = config.take();
            let keys = ["architectures", "no_rope_layers", "moe_layers", "layer_types"];
            keys.iter().for_each(|key| drop(text.as_object_mut().unwrap().remove(*key)));
            text["attn_temperature_tuning"] = json!(4);
            *config =
                json!({ "architectures": ["Llama4ForConditionalGeneration"], "text_config": text });
        },
        tensors: |tensors| prefixed(tensors, "language_model."),
    },
    Spelling {
        name: "Qwen3-MoE with fused experts and Qwen3-Coder's keys",
        of: "qwen3_moe",
        config: |config| {
            config["num_experts"] = config["num_local_experts"].take();
            config["rope_theta"] = json!(1e4);
            config["rope_parameters"] = Value::Null;
            config["rope_scaling"] = Value::Null;
            config["shared_expert_intermediate_size"] = json!(0);
            config["qkv_bias"] = json!(false);
        },
        tensors: fused,
    },
    Spelling {
        name: "MiniMax M2 as released",
        of: "minimax_m2",
        config: |config| {
            config["rope_parameters"] = Value::Null;
            config["rope_theta"] = json!(5_000_000);
            config["rotary_dim"] = json!(8);
            config["scoring_func"] = json!("sigmoid");
            config["attn_type_list"] = json!([1, 1, 1, 1]);
        },
        tensors: |tensors| tensors,
    },
    Spelling {
        name: "gpt-oss with the keys of its release",
        of: "gpt_oss",
        config: |config| {
            let mut rope = config["rope_parameters"].take();
            config["rope_theta"] = rope.as_object_mut().unwrap().remove("rope_theta").unwrap();
            config["rope_scaling"] = rope;
            config["experts_per_token"] = config["num_experts_per_tok"].take();
            config["swiglu_limit"] = json!(7.0);
            config["layer_types"] = Value::Null;
        },
        tensors: |tensors| tensors,
    },
];

fn prefixed(tensors: Vec<(String, Tensor)>, prefix: &str) -> Vec<(String, Tensor)> {
    tensors.into_iter().map(|(name, x)| (format!("{prefix}{name}"), x)).collect()
}

/// Merges experts stored one by one into one tensor per layer.
fn fused(tensors: Vec<(String, Tensor)>) -> Vec<(String, Tensor)> {
    let mut fused: BTreeMap<String, Vec<(usize, bool, Tensor)>> = BTreeMap::new();
    let mut others = Vec::new();
    for (name, x) in tensors {
        let Some((module, rest)) = name.split_once(".experts.") else {
            others.push((name, x));
            continue;
        };
        let (number, part) = rest.split_once('.').unwrap();
        let into = if part == "down_proj.weight" { "down_proj" } else { "gate_up_proj" };
        let parts = fused.entry(format!("{module}.experts.{into}")).or_default();
        parts.push((number.parse().unwrap(), part == "up_proj.weight", x));
    }
    for (name, mut parts) in fused {
        parts.sort_by_key(|(number, is_up, _)| (*number, *is_up));
        let rows: Vec<Tensor> = parts.iter().map(|(.., x)| x.shallow_clone()).collect();
        let experts = parts.last().unwrap().0 as i64 + 1;
        let all = Tensor::cat(&rows, 0);
        let size = [experts, all.size()[0] / experts, all.size()[1]];
        others.push((name, all.view(size)));
    }
    others
}

fn spelling(found: &[Entry], spelling: &'static Spelling) -> Trial {
    let dir = found.iter().find(|entry| entry.name == spelling.of).unwrap().path.clone();
    Trial::test(format!("targets::{}", spelling.name), move || {
        let own = tempfile::tempdir().unwrap();
        let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        (spelling.config)(&mut config);
        std::fs::write(own.path().join("config.json"), config.to_string()).unwrap();
        let file = TensorFile::open(&dir.join("model.safetensors")).unwrap();
        let stored = file.names().into_iter().map(|name| {
            let x = file.any_tensor(&name).unwrap();
            (name, x)
        });
        let tensors = (spelling.tensors)(stored.collect());
        write_safetensors(&own.path().join("model.safetensors"), &tensors).unwrap();
        std::fs::copy(dir.join("golden.safetensors"), own.path().join("golden.safetensors"))
            .unwrap();
        check(own.path(), Kernels::Fast);
        Ok(())
    })
}

/// The value of `architectures` in config.json.
fn architecture(dir: &Path) -> Option<String> {
    let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&text).unwrap();
    config["architectures"][0].as_str().map(str::to_owned)
}

/// The architecture, if the code does not run it.
fn refused(dir: &Path) -> Option<String> {
    match TargetConfig::load(dir) {
        Err(Error::Architecture { found, .. }) => Some(found),
        _ => None,
    }
}

fn refusal(entry: &Entry, architecture: String) -> Trial {
    let dir = entry.path.clone();
    let name = format!("targets::{} left out: {architecture} is refused by name", entry.name);
    Trial::test(name, move || {
        let options = TargetOptions { device: Device::Cpu, dtype: Kind::Float };
        let message = Target::load(&dir, &options).unwrap_err().to_string();
        assert!(message.contains(&architecture), "{message}");
        Ok(())
    })
}

fn every_family_has_vectors_or_is_named(found: &[Entry]) {
    let (mut run, mut left_out) = (BTreeSet::new(), BTreeSet::new());
    for entry in found.iter().filter(|entry| entry.own) {
        match TargetConfig::load(&entry.path) {
            Ok(_) => run.extend(architecture(&entry.path)),
            Err(Error::Architecture { found, .. }) => drop(left_out.insert(found)),
            Err(error) => panic!("{error}"),
        }
    }
    let claimed = Family::architectures().map(str::to_owned);
    let claimed = claimed.filter(|name| !NESTED.contains(&name.as_str())).collect();
    assert_eq!(run, claimed, "families that run, and those the code claims");
    assert_eq!(left_out, BTreeSet::new(), "families with vectors that no code here runs");
}

fn check(dir: &Path, kernels: Kernels) {
    let options = TargetOptions { device: place().device, dtype: place().kind };
    let target = Target::load(dir, &options).unwrap().with_kernels(kernels);
    let golden = TensorFile::open(&dir.join("golden.safetensors")).unwrap();
    let [ids, states, logits] = ["input_ids", "hidden_states", "logits"]
        .map(|name| golden.any_tensor(name).unwrap().to_device(place().device));
    let (ids, tokens) = (ids.flatten(0, -1), ids.numel() as i64);
    let all: Vec<u32> = (0..=target.num_layers() as u32).collect();
    assert_eq!(states.size()[0], all.len() as i64, "a state for each layer id");
    no_grad(|| {
        let aux_states = target.forward_packed(&ids, &[0, tokens], &all);
        for (id, aux_state) in aux_states.iter().enumerate() {
            assert_close(&format!("state {id}"), aux_state, &states.get(id as i64), TOLERANCE);
        }
        let found = target.logits(aux_states.last().unwrap());
        assert_close("logits", &found, &logits, TOLERANCE);
        let prefill = tokens * 4 / 5;
        let expected = match golden.names().iter().any(|name| name == "decode_logits") {
            true => golden.any_tensor("decode_logits").unwrap().to_device(place().device),
            false => logits.narrow(0, prefill, tokens - prefill),
        };
        let decoded = decode(&target, &ids, prefill);
        assert_close("decoded logits", &decoded, &expected, TOLERANCE);
        let last = states.get(states.size()[0] - 1);
        side_by_side(&target, &ids, (prefill, &last));
    });
}

/// Runs the tokens as the second of two packed documents and, for a block after their prefill, as
/// the second of two sequences in a pass; `last_th` is their last state.
fn side_by_side(target: &Target, ids: &Tensor, (prefill, last_th): (i64, &Tensor)) {
    let tokens = ids.size()[0];
    let packed = Tensor::cat(&[&ids.narrow(0, 4, 13), ids], 0);
    let layers = target.num_layers() as u32;
    let states = target.forward_packed(&packed, &[0, 13, 13 + tokens], &[layers]);
    assert_close("second document", &states[0].narrow(0, 13, tokens), last_th, TOLERANCE);
    let [mut first, mut second] = [0, 1].map(|_| target.new_cache(tokens as usize));
    target.forward_cached(&ids.narrow(0, 0, prefill), &mut second, &[]);
    // First a rejected block, then the tokens themselves.
    target.forward_cached(&ids.narrow(0, prefill, 4).full_like(3), &mut second, &[]);
    second.truncate(prefill as usize);
    let block = tokens - prefill;
    let both = Tensor::cat(&[ids.narrow(0, 0, 9), ids.narrow(0, prefill, block)], 0);
    let mut parts = [
        SequencePart { cache: &mut first, tokens: 9 },
        SequencePart { cache: &mut second, tokens: block as usize },
    ];
    let out = target.forward_sequences(&both, &mut parts, &[]).hidden_td;
    let (begin, end) = (out.narrow(0, 0, 9), out.narrow(0, 9, block));
    let first_th = match target.longest_in_pieces() {
        // All tokens together use other frequencies than their beginning.
        Some(longest) if longest < tokens as usize => {
            target.forward_packed(&ids.narrow(0, 0, 9), &[0, 9], &[layers]).remove(0)
        }
        _ => last_th.narrow(0, 0, 9),
    };
    assert_close("first sequence", &begin, &first_th, TOLERANCE);
    assert_close("second sequence", &end, &last_th.narrow(0, prefill, block), TOLERANCE);
}

/// Logits of the tokens from `prefill` on, decoded one by one with a cache.
fn decode(target: &Target, ids: &Tensor, prefill: i64) -> Tensor {
    let tokens = ids.size()[0];
    let mut cache = target.new_cache(tokens as usize);
    target.forward_cached(&ids.narrow(0, 0, prefill), &mut cache, &[]);
    let step = |at: i64, cache: &mut _| {
        let output = target.forward_cached(&ids.narrow(0, at, 1), cache, &[]);
        target.logits(&output.hidden_td)
    };
    let rows: Vec<Tensor> = (prefill..tokens).map(|at| step(at, &mut cache)).collect();
    Tensor::cat(&rows, 0)
}
