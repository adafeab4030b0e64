//! Model directories as found in practice: special tokens, templates, older and broken files.

use dflash_chat::{ChatTokenizer, Error, Message, Role, SegmentCache};
use dflash_test_support::byte_tokenizer;
use serde_json::{Value, json};

/// A model directory with a byte tokenizer and the given special tokens.
fn model_dir(special: &[&str], config: &Value) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = byte_tokenizer(special).to_string();
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer).unwrap();
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    dir
}

#[test]
fn special_tokens_of_the_configuration_are_found_and_added() {
    let config = json!({
        "chat_template": "{{ eos_token }}{{ messages[0].content }}",
        "eos_token": "<|end|>", "pad_token": {"content": "<|pad|>"},
        "extra_special_tokens": ["<|mask|>"]});
    let dir = model_dir(&["<|end|>"], &config);
    let tokenizer = ChatTokenizer::load(dir.path()).unwrap();
    assert_eq!(tokenizer.len(), 259);
    let ids = tokenizer.special_ids();
    let expect = (Some(256), Some(257), Some(258), None);
    assert_eq!((ids.eos, ids.pad, ids.mask, ids.unk), expect);
    let rendered =
        tokenizer.render_ids(&[Message::text(Role::User, "<|pad|>a")], None, false).unwrap();
    assert_eq!(rendered[..2], [256, 257]);
    let mut cache = SegmentCache::default();
    assert_eq!(tokenizer.encode_cached("<|end|><|pad|>a", &mut cache).unwrap(), rendered);
    assert_eq!(tokenizer.decode(&rendered, true).unwrap(), "a");
    assert_eq!(tokenizer.decode(&rendered, false).unwrap(), "<|end|><|pad|>a");
}

#[test]
fn a_missing_template_matters_only_to_rendering() {
    let dir = model_dir(&[], &json!({}));
    let tokenizer = ChatTokenizer::load(dir.path()).unwrap();
    assert_eq!(tokenizer.encode("ab").unwrap().len(), 2);
    let error = tokenizer.render(&[], None, false).unwrap_err().to_string();
    assert!(error.contains("has no chat template"), "{error}");
}

#[test]
fn a_directory_without_a_tokenizer_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = ChatTokenizer::load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("has no tokenizer.json"), "{error}");
    std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    let error = ChatTokenizer::load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json is not a tokenizer"), "{error}");
}

#[test]
fn further_variables_reach_the_template() {
    let config = json!({"chat_template": "{% if thinking is defined %}{{ thinking }}{% endif %}"});
    let dir = model_dir(&[], &config);
    let mut tokenizer = ChatTokenizer::load(dir.path()).unwrap();
    assert_eq!(tokenizer.render(&[], None, false).unwrap(), "");
    tokenizer.extend_template_variables([("thinking".to_owned(), json!(false))]).unwrap();
    assert_eq!(tokenizer.render(&[], None, false).unwrap(), "False");
    let mut bare = ChatTokenizer::load(model_dir(&[], &json!({})).path()).unwrap();
    assert!(matches!(bare.extend_template_variables([]), Err(Error::NoTemplate { .. })));
}

#[test]
fn older_configurations_fill_gaps() {
    let dir = model_dir(&["<e>", "<p>"], &json!({"eos_token": "<e>"}));
    let map = json!({"eos_token": "<p>", "pad_token": "<p>"});
    std::fs::write(dir.path().join("special_tokens_map.json"), map.to_string()).unwrap();
    let ids = ChatTokenizer::load(dir.path()).unwrap().special_ids();
    assert_eq!((ids.eos, ids.pad), (Some(256), Some(257)));
    std::fs::write(dir.path().join("special_tokens_map.json"), "[").unwrap();
    let error = ChatTokenizer::load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("special_tokens_map.json is not valid JSON"), "{error}");
}
