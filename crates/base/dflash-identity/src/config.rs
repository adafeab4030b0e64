//! The part of config.json that determines a model's numbers, in normalised form.
//!
//! The file contains more than that, and the same information in several ways: releases of
//! Transformers rename keys and write out defaults. A model that was only loaded and saved again
//! must keep its digest. Unknown keys count, so that no option of a new family is overlooked.

use serde_json::{Map, Value};

use crate::digest::Digest;

/// Keys that do not affect hidden states and logits: origin, storage, training, special tokens,
/// limits, return values. Keys that begin with `_` do not either.
const IRRELEVANT: [&str; 38] = [
    "attention_dropout",
    "attn_pdrop",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "decoder_start_token_id",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "hidden_dropout",
    "id2label",
    "initializer_factor",
    "initializer_range",
    "is_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "residual_dropout",
    "resid_pdrop",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sep_token_id",
    "task_specific_params",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "unsloth_version",
    "use_cache",
];

/// Where RoPE is described, in files of before Transformers 5 and after.
const ROPE: [&str; 2] = ["rope_scaling", "rope_parameters"];

/// Digest of the normalised configuration.
pub(crate) fn digest(config: &Value) -> String {
    let mut text = String::new();
    write(&normalised(config), &mut text);
    let mut digest = Digest::default();
    digest.add(text.as_bytes());
    digest.hex()
}

/// Whether the lm_head is the embedding; multimodal models have the key in their text model's
/// configuration.
pub(crate) fn is_tied(config: &Value) -> bool {
    let key = "tie_word_embeddings";
    config[key].as_bool().or_else(|| config["text_config"][key].as_bool()).unwrap_or_default()
}

fn normalised(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let slides = map.get("use_sliding_window") != Some(&Value::Bool(false));
            let mut map: Map<String, Value> = map
                .iter()
                .filter(|(key, value)| counts(key, value))
                .map(|(key, value)| match ROPE.contains(&key.as_str()) {
                    // Handled below.
                    true => (key.clone(), value.clone()),
                    false => (key.clone(), normalised(value)),
                })
                .collect();
            unify_rope(&mut map);
            drop_defaults(&mut map, slides);
            map.sort_keys();
            Value::Object(map)
        }
        Value::Array(items) => items.iter().map(normalised).collect(),
        // 10000 and 10000.0
        Value::Number(number) => number.as_f64().map_or(Value::Null, Value::from),
        other => other.clone(),
    }
}

/// Absent, null and false mean the same to the models.
fn counts(key: &str, value: &Value) -> bool {
    let says_something = !matches!(value, Value::Null | Value::Bool(false));
    says_something && !key.starts_with('_') && !IRRELEVANT.contains(&key)
}

/// Collects what older files say about RoPE in several places into the form of newer ones.
fn unify_rope(map: &mut Map<String, Value>) {
    let mut rope = Map::new();
    for key in ROPE {
        if let Some(Value::Object(inner)) = map.remove(key) {
            let inner = inner.into_iter().filter(|(key, value)| counts(key, value));
            rope.extend(inner.map(|(key, value)| (key, normalised(&value))));
        }
    }
    if let Some(kind) = rope.remove("type") {
        rope.entry("rope_type").or_insert(kind);
    }
    for key in ["rope_theta", "partial_rotary_factor"] {
        if let Some(value) = map.remove(key) {
            rope.entry(key).or_insert(value);
        }
    }
    let defaults = [
        ("rope_type", "default".into()),
        ("rope_theta", 1e4.into()),
        ("partial_rotary_factor", 1.0.into()),
    ];
    drop_equal(&mut rope, defaults);
    if !rope.contains_key("rope_type") {
        // Other kinds of scaling depend on it; for plain ones it is only a limit.
        map.remove("max_position_embeddings");
    }
    if !rope.is_empty() {
        rope.sort_keys();
        map.insert("rope_parameters".to_owned(), Value::Object(rope));
    }
}

/// Drops defaults, which some releases write and others leave out.
fn drop_defaults(map: &mut Map<String, Value>, slides: bool) {
    if !slides || !map.contains_key("sliding_window") {
        for key in ["sliding_window", "use_sliding_window", "max_window_layers"] {
            map.remove(key);
        }
    }
    let all_full = |types: &Vec<Value>| types.iter().all(|kind| kind == "full_attention");
    if map.get("layer_types").and_then(Value::as_array).is_some_and(all_full) {
        map.remove("layer_types");
    }
    let number = |key: &str| map.get(key).and_then(Value::as_f64);
    if let (Some(hidden), Some(heads)) = (number("hidden_size"), number("num_attention_heads")) {
        let defaults =
            [("head_dim", (hidden / heads).into()), ("num_key_value_heads", heads.into())];
        drop_equal(map, defaults);
    }
}

fn drop_equal<const N: usize>(map: &mut Map<String, Value>, defaults: [(&str, Value); N]) {
    for (key, default) in defaults {
        if map.get(key) == Some(&default) {
            map.remove(key);
        }
    }
}

/// Compact JSON with sorted keys. A `Map` keeps the file's order if some crate enables that
/// feature.
pub(crate) fn write(value: &Value, out: &mut String) {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_by_key(|(key, _)| *key);
            out.push('{');
            for (key, value) in entries {
                out.push_str(&format!("{key:?}:"));
                write(value, out);
                out.push(',');
            }
            out.push('}');
        }
        Value::Array(items) => {
            out.push('[');
            for item in items {
                write(item, out);
                out.push(',');
            }
            out.push(']');
        }
        other => out.push_str(&other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// As Transformers 5 writes a tiny Qwen3.
    fn config() -> Value {
        json!({
            "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "dtype": "bfloat16",
            "attention_dropout": 0.0, "bos_token_id": null, "eos_token_id": 4094, "head_dim": 64,
            "hidden_act": "silu", "hidden_size": 256, "initializer_range": 0.02,
            "intermediate_size": 768, "layer_types": ["full_attention", "full_attention"],
            "max_position_embeddings": 2048, "max_window_layers": 28, "model_type": "qwen3",
            "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
            "pad_token_id": 4092, "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
            "sliding_window": null, "tie_word_embeddings": true, "use_cache": true,
            "transformers_version": "5.17.0", "use_sliding_window": false, "vocab_size": 4096,
        })
    }

    #[test]
    fn a_file_that_says_the_same_in_another_way_is_the_same() {
        let older = json!({
            "vocab_size": 4096, "_name_or_path": "/somewhere", "transformers_version": "4.51.0",
            "architectures": ["Qwen3ForCausalLM"], "torch_dtype": "float32", "eos_token_id": [1, 2],
            "hidden_act": "silu", "hidden_size": 256, "intermediate_size": 768,
            "max_position_embeddings": 1024, "model_type": "qwen3", "num_attention_heads": 4,
            "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 0.000001,
            "rope_theta": 1000000, "rope_scaling": null, "tie_word_embeddings": true,
        });
        assert_eq!(digest(&older), digest(&config()));
    }

    #[test]
    fn every_key_that_decides_numbers_counts() {
        let check = |key: &str, value: Value| {
            let mut other = config();
            other[key] = value;
            assert_ne!(digest(&other), digest(&config()), "{key}");
        };
        check("architectures", json!(["LlamaForCausalLM"]));
        check("attention_bias", json!(true));
        check("head_dim", json!(32));
        check("hidden_act", json!("gelu"));
        check("hidden_size", json!(128));
        check("intermediate_size", json!(512));
        check("layer_types", json!(["full_attention", "sliding_attention"]));
        check("num_attention_heads", json!(8));
        check("num_hidden_layers", json!(3));
        check("num_key_value_heads", json!(1));
        check("rms_norm_eps", json!(1e-5));
        check("rope_parameters", json!({"rope_theta": 10000.0}));
        check("rope_parameters", json!({"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}));
        check("rope_scaling", json!({"type": "yarn", "factor": 4.0}));
        check("rope_scaling", json!({"rope_type": "llama3", "factor": 8.0}));
        check("tie_word_embeddings", json!(false));
        check("vocab_size", json!(4095));
        check("an_option_of_a_new_family", json!(0.5));
        check("text_config", json!({"hidden_size": 64}));
    }

    #[test]
    fn a_window_counts_where_it_is_used() {
        let with = |used: Value, window: Value| {
            let mut other = config();
            other["use_sliding_window"] = used;
            other["sliding_window"] = window;
            digest(&other)
        };
        assert_eq!(with(json!(false), json!(128)), digest(&config()));
        assert_ne!(with(json!(true), json!(128)), digest(&config()));
        // Mistral's, which has no such key.
        assert_ne!(with(json!(null), json!(128)), with(json!(null), json!(null)));
    }

    #[test]
    fn keys_inside_of_others_are_normalised_too() {
        let nested = |inner: Value| digest(&json!({ "text_config": inner }));
        assert_eq!(nested(json!({"dtype": "float32", "a": 1})), nested(json!({"a": 1.0, "_b": 2})));
        assert_ne!(nested(json!({"a": 1})), nested(json!({"a": 2})));
    }
}
