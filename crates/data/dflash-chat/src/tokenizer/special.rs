//! Special tokens as a model's tokenizer configuration names them.

use std::collections::{BTreeMap, HashSet};

use serde_json::{Map, Value};
use tokenizers::{AddedToken, Tokenizer};

/// The tokens with a role of their own in Transformers, and in chat templates.
const NAMED: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The mask token in models whose configuration does not name one.
const MASK_TOKENS: [&str; 4] = ["<|mask|>", "<|MASK|>", "<mask>", "[MASK]"];

/// Ids of the special tokens that the tokenizer's configuration names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpecialIds {
    /// Ends the model's answer.
    pub eos: Option<i64>,
    /// Padding.
    pub pad: Option<i64>,
    /// Stands for unknown text.
    pub unk: Option<i64>,
    /// The mask token: `mask_token` of the configuration, else a special token that is called
    /// `<|mask|>`, `<mask>` or `[MASK]`.
    pub mask: Option<i64>,
}

impl SpecialIds {
    pub(super) fn find(tokenizer: &Tokenizer, config: &Map<String, Value>) -> Self {
        let added = tokenizer.get_added_tokens_decoder();
        let is_special = |id: &u32| added.get(id).is_some_and(|token| token.special);
        let named = |name: &str| {
            let text = config.get(name).and_then(token_text)?;
            tokenizer.token_to_id(text)
        };
        let called_mask =
            || MASK_TOKENS.iter().find_map(|t| tokenizer.token_to_id(t).filter(is_special));
        Self {
            eos: named("eos_token").map(i64::from),
            pad: named("pad_token").map(i64::from),
            unk: named("unk_token").map(i64::from),
            mask: named("mask_token").or_else(called_mask).map(i64::from),
        }
    }
}

impl SpecialIds {
    /// The same, from the names and ids in the configuration alone.
    pub(super) fn of_config(config: &Map<String, Value>, tokens: &BTreeMap<i64, String>) -> Self {
        let id = |text: &str| tokens.iter().find(|(_, name)| *name == text).map(|(id, _)| *id);
        let named = |name: &str| config.get(name).and_then(token_text).and_then(id);
        let called_mask = || MASK_TOKENS.iter().find_map(|text| id(text));
        Self {
            eos: named("eos_token"),
            pad: named("pad_token"),
            unk: named("unk_token"),
            mask: named("mask_token").or_else(called_mask),
        }
    }
}

/// Ids of the tokens that are marked special.
pub(super) fn special_tokens(tokenizer: &Tokenizer) -> HashSet<i64> {
    let added = tokenizer.get_added_tokens_decoder();
    added.iter().filter(|(_, token)| token.special).map(|(&id, _)| id.into()).collect()
}

/// The tokens under `added_tokens_decoder`, by their ids.
pub(super) fn decoder_tokens(config: &Map<String, Value>) -> BTreeMap<i64, String> {
    let Some(Value::Object(decoder)) = config.get("added_tokens_decoder") else {
        return BTreeMap::new();
    };
    let token =
        |(id, token): (&String, &Value)| Some((id.parse().ok()?, token_text(token)?.to_owned()));
    decoder.iter().filter_map(token).collect()
}

/// A token is a string or an object with its matching rules.
fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// The special tokens under their names in chat templates.
pub(super) fn template_variables(config: &Map<String, Value>) -> BTreeMap<String, Value> {
    let mut variables: BTreeMap<String, Value> = NAMED
        .iter()
        .filter_map(|&name| {
            let text = config.get(name).and_then(token_text)?;
            Some((name.to_owned(), Value::from(text)))
        })
        .collect();
    if let Some(Value::Array(tokens)) = config.get("additional_special_tokens") {
        let texts = tokens.iter().filter_map(token_text).collect();
        variables.insert("additional_special_tokens".to_owned(), texts);
    }
    variables
}

/// Transformers adds tokens that only the configuration has; so do we, in its order.
pub(super) fn add_missing_tokens(tokenizer: &mut Tokenizer, config: &Map<String, Value>) {
    let known = tokenizer.get_added_tokens_decoder();
    let mut missing: Vec<AddedToken> = Vec::new();
    for value in configured_tokens(config) {
        let Some(text) = token_text(value) else { continue };
        let is_known = known.values().any(|token| token.content == text);
        if !is_known && missing.iter().all(|token| token.content != text) {
            missing.push(added_token(text, value));
        }
    }
    if !missing.is_empty() {
        tokenizer.add_special_tokens(&missing);
    }
}

fn configured_tokens(config: &Map<String, Value>) -> Vec<&Value> {
    let mut tokens: Vec<&Value> = Vec::new();
    if let Some(Value::Object(decoder)) = config.get("added_tokens_decoder") {
        let mut entries: Vec<_> = decoder
            .iter()
            .filter_map(|(id, token)| Some((id.parse::<u32>().ok()?, token)))
            .collect();
        entries.sort_by_key(|(id, _)| *id);
        tokens.extend(entries.into_iter().map(|(_, token)| token));
    }
    tokens.extend(NAMED.iter().filter_map(|name| config.get(*name)));
    for name in ["additional_special_tokens", "extra_special_tokens"] {
        match config.get(name) {
            Some(Value::Array(list)) => tokens.extend(list),
            Some(Value::Object(named)) => tokens.extend(named.values()),
            _ => {}
        }
    }
    tokens
}

fn added_token(text: &str, value: &Value) -> AddedToken {
    let flag = |name: &str| value.get(name).and_then(Value::as_bool).unwrap_or(false);
    AddedToken::from(text, true)
        .lstrip(flag("lstrip"))
        .rstrip(flag("rstrip"))
        .single_word(flag("single_word"))
        .normalized(flag("normalized"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn templates_see_the_named_tokens_as_text() {
        let variables = template_variables(&config(json!({
            "bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>",
            "unk_token": null, "model_max_length": 5,
            "additional_special_tokens": ["<a>", {"content": "<b>"}]})));
        let expect = [
            ("additional_special_tokens", json!(["<a>", "<b>"])),
            ("bos_token", json!("<s>")),
            ("eos_token", json!("</s>")),
        ];
        assert_eq!(variables, expect.map(|(name, value)| (name.to_owned(), value)).into());
    }

    /// A vocabulary of `words`, none of them special.
    fn tokenizer(words: &[&str]) -> Tokenizer {
        let vocabulary: Map<String, Value> =
            words.iter().enumerate().map(|(id, word)| ((*word).to_owned(), json!(id))).collect();
        let json = json!({"version": "1.0", "added_tokens": [],
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": words[0]}});
        Tokenizer::from_bytes(json.to_string()).unwrap()
    }

    fn find(tokenizer: &mut Tokenizer, value: Value) -> SpecialIds {
        let config = config(value);
        add_missing_tokens(tokenizer, &config);
        SpecialIds::find(tokenizer, &config)
    }

    #[test]
    fn missing_tokens_are_added_in_the_order_of_their_ids() {
        let mut words = tokenizer(&["u", "w"]);
        let ids = find(
            &mut words,
            json!({"added_tokens_decoder": {
                    "10": {"content": "<late>", "special": true},
                    "9": {"content": "<early>", "special": true}},
                "eos_token": "<late>", "pad_token": "<early>", "unk_token": "u"}),
        );
        // The ids are the vocabulary's next ones, as Transformers assigns them.
        assert_eq!((ids.pad, ids.eos, ids.unk), (Some(2), Some(3), Some(0)));
        assert_eq!(words.get_vocab_size(true), 4);
    }

    #[test]
    fn the_mask_token_is_the_named_one_or_one_that_is_called_so() {
        let mask = |value: Value| find(&mut tokenizer(&["u", "[MASK]"]), value).mask;
        assert_eq!(mask(json!({"mask_token": "u"})), Some(0));
        assert_eq!(mask(json!({"extra_special_tokens": ["<x>", "<|mask|>"]})), Some(3));
        assert_eq!(mask(json!({"extra_special_tokens": {"mine": "[MASK]"}})), Some(1));
        // A plain word of that name is not a mask token.
        assert_eq!(mask(json!({})), None);
    }
}
