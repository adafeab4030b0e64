//! Templates in the style of widely used models, rendered as Transformers renders them.
//!
//! `templates/make_expected.py` generated the expectations.

use std::path::PathBuf;

use dflash_chat::{ChatTokenizer, Conversation, Row, parse_row};
use dflash_test_support::byte_tokenizer;
use serde_json::Value;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/templates")
}

fn document() -> Value {
    serde_json::from_slice(&std::fs::read(folder().join("expected.json")).unwrap()).unwrap()
}

fn conversation(row: &Value) -> Conversation {
    match parse_row(row).unwrap() {
        Row::Conversation(conversation) => conversation,
        Row::Tokenized { .. } => panic!("{row} is not a conversation"),
    }
}

/// Compares every render of one template; `null` means that the template refuses.
fn check(name: &str) {
    let document = document();
    let model = tempfile::tempdir().unwrap();
    let tokenizer = byte_tokenizer(&[]).to_string();
    std::fs::write(model.path().join("tokenizer.json"), tokenizer).unwrap();
    std::fs::copy(folder().join(name), model.path().join("chat_template.jinja")).unwrap();
    let mut tokenizer = ChatTokenizer::load(model.path()).unwrap();
    let variables = document["variables"].as_object().unwrap().clone();
    tokenizer.extend_template_variables(variables).unwrap();
    let rows = document["conversations"].as_array().unwrap();
    let expected = document["expected"][name].as_array().unwrap();
    assert_eq!(rows.len(), expected.len());
    let mut renders = 0;
    for (row, expected) in rows.iter().zip(expected) {
        let conversation = conversation(row);
        for (prompt, expected) in [false, true].into_iter().zip(expected.as_array().unwrap()) {
            let tools = conversation.tools.as_ref();
            let found = tokenizer.render(&conversation.messages, tools, prompt);
            match expected.as_str() {
                Some(text) => assert_eq!(found.unwrap(), text, "{name}, prompt {prompt}: {row}"),
                None => assert!(found.is_err(), "{name} accepts {row}"),
            }
            renders += usize::from(expected.is_string());
        }
    }
    assert!(renders > rows.len() / 2, "{name} refuses nearly everything");
}

#[test]
fn chatml_with_thinking_and_tools() {
    check("chatml_thinking.jinja");
}

#[test]
fn headers_and_a_date() {
    check("headers_and_date.jinja");
}

#[test]
fn turns_with_parts() {
    check("turns_with_parts.jinja");
}

#[test]
fn inst_blocks() {
    check("inst.jinja");
}

#[test]
fn macros() {
    check("macros.jinja");
}
