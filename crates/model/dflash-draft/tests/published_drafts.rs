//! Configurations of published drafts, without keys that are never read.

use std::path::Path;

use dflash_draft::{Draft, DraftConfig, DraftLayout, Fresh, LayerKind, RopeScaling};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

fn parse(config: &Value) -> Result<DraftConfig, dflash_formats::Error> {
    DraftConfig::parse(Path::new("config.json"), &config.to_string())
}

/// z-lab/gemma-4-31B-it-DFlash.
fn gemma_4_31b() -> Value {
    json!({
        "architectures": ["DFlashDraftModel"], "attention_bias": false, "block_size": 16,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 12, 23, 35, 46, 57]},
        "dtype": "bfloat16", "final_logit_softcapping": 30.0, "head_dim": 128,
        "hidden_size": 5376, "intermediate_size": 10752,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention",
                        "sliding_attention", "full_attention"],
        "max_position_embeddings": 262_144, "model_type": "qwen3", "num_attention_heads": 64,
        "num_hidden_layers": 5, "num_key_value_heads": 8, "num_target_layers": 60,
        "rms_norm_eps": 1e-6, "sliding_window": 2048, "tie_word_embeddings": true,
        "use_sliding_window": true, "vocab_size": 262_144, "rope_theta": 1_000_000,
        "rope_scaling": null,
    })
}

/// z-lab/Kimi-K2.5-DFlash; SpecForge's configs/kimi-k2.7-code-dflash.json is the same.
fn kimi() -> Value {
    json!({
        "architectures": ["DFlashDraftModel"], "attention_bias": false,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 8,
        "dflash_config": {"mask_token_id": 163_838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
        "dtype": "bfloat16", "head_dim": 128, "hidden_act": "silu", "hidden_size": 7168,
        "initializer_range": 0.02, "intermediate_size": 18432,
        "layer_types": ["full_attention", "full_attention", "full_attention", "full_attention",
                        "full_attention", "full_attention"],
        "mask_token_id": 163_838, "max_position_embeddings": 262_144, "max_window_layers": 6,
        "model_type": "qwen3", "num_attention_heads": 64, "num_hidden_layers": 6,
        "num_key_value_heads": 8, "num_target_layers": 61, "rms_norm_eps": 1e-5,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
            "type": "yarn"},
        "rope_theta": 50000.0, "sliding_window": null, "use_sliding_window": false,
        "vocab_size": 163_840,
    })
}

/// z-lab/gpt-oss-20b-DFlash.
fn gpt_oss() -> Value {
    json!({
        "architectures": ["DFlashDraftModel"], "attention_bias": true, "block_size": 8,
        "dflash_config": {"mask_token_id": 200_000, "target_layer_ids": [1, 6, 11, 16, 21]},
        "eos_token_id": 200_002, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "intermediate_size": 7680, "max_position_embeddings": 131_072, "model_type": "gpt_oss",
        "num_attention_heads": 64, "num_hidden_layers": 8, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 150_000, "vocab_size": 201_088,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0,
            "original_max_position_embeddings": 4096},
    })
}

fn changed(mut config: Value, change: impl FnOnce(&mut Value)) -> Value {
    change(&mut config);
    config
}

#[test]
fn sliding_and_full_layers_and_their_window_are_read() {
    let gemma = parse(&gemma_4_31b()).unwrap();
    let mut layers = vec![LayerKind::Sliding; 4];
    layers.push(LayerKind::Full);
    assert_eq!((gemma.layers, gemma.sliding_window), (layers, Some(2048)));
    assert_eq!(gemma.target_layer_ids, [2, 13, 24, 36, 47, 58]);
    assert_eq!((gemma.mask_token_id, gemma.rope_scaling), (4, None));
}

#[test]
fn scaled_rotary_embedding_is_read_with_the_amplitude_it_was_trained_with() {
    let draft = parse(&kimi()).unwrap();
    let Some(RopeScaling::Yarn { factor, attention_factor, truncate, .. }) = draft.rope_scaling
    else {
        panic!("{draft:?}");
    };
    assert_eq!((factor, attention_factor, truncate), (64.0, None, true));
    let elsewhere =
        changed(kimi(), |config| config["dflash_config"]["mask_token_id"] = Value::Null);
    assert_eq!(
        parse(&elsewhere).unwrap().mask_token_id,
        163_838,
        "at the top where it is not inside"
    );
}

#[test]
fn biases_of_the_attention_are_laid_out_under_their_names() {
    let config = parse(&gpt_oss()).unwrap();
    assert!(config.attention_bias);
    let layout = DraftLayout::new(&config);
    let width = |name: &str| {
        let name = format!("layers.7.self_attn.{name}.bias");
        let found = layout.parameters().iter().find(|parameter| parameter.name == name);
        found.map(|parameter| parameter.shape.clone()).unwrap()
    };
    let (query, key) = (64 * 64, 8 * 64);
    let widths = ["q_proj", "k_proj", "v_proj", "o_proj"].map(width);
    assert_eq!(widths, [[query], [key], [key], [2880]].map(Vec::from));
    let plain = DraftLayout::new(&parse(&kimi()).unwrap());
    assert!(plain.parameters().iter().all(|parameter| parameter.fresh != Fresh::Zeros));
}

#[test]
fn layers_of_other_kinds_are_refused_by_name() {
    let check = |config: Value, key: &str| {
        let message = parse(&config).unwrap_err().to_string();
        assert!(message.contains(key), "{message}");
    };
    let inner = |key: &'static str, value: Value| {
        changed(gemma_4_31b(), |config| config["dflash_config"][key] = value)
    };
    check(inner("attention_sink_bias", json!(true)), "dflash_config.attention_sink_bias");
    check(inner("attention_value_scale", json!(0.5)), "dflash_config.attention_value_scale");
    check(inner("use_swa", json!(true)), "dflash_config.use_swa");
    let outer =
        |key: &'static str, value: Value| changed(gemma_4_31b(), |config| config[key] = value);
    check(outer("is_causal", json!(true)), "`is_causal` is true");
    check(outer("is_neox_style", json!(false)), "`is_neox_style` is false");
    assert!(parse(&outer("is_neox_style", json!(true))).is_ok());
}

/// A draft with YaRN is read alike by every engine, and read back identically.
#[test]
fn a_scaled_draft_is_saved_and_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let small = changed(kimi(), |config| {
        for (key, value) in [
            ("hidden_size", 32),
            ("intermediate_size", 48),
            ("head_dim", 8),
            ("num_attention_heads", 4),
            ("num_key_value_heads", 2),
            ("vocab_size", 64),
            ("num_hidden_layers", 1),
        ] {
            config[key] = json!(value);
        }
        config["layer_types"] = json!(["full_attention"]);
        config["dflash_config"]["mask_token_id"] = json!(63);
    });
    let config = parse(&small).unwrap();
    tch::manual_seed(1);
    let normal = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
    let draft = Draft::init(config.clone(), Device::Cpu, normal);
    draft.save(dir.path()).unwrap();
    assert_eq!(DraftConfig::load(dir.path()).unwrap(), config);
    let text = std::fs::read_to_string(dir.path().join("config.json")).unwrap();
    let written: Value = serde_json::from_str(&text).unwrap();
    for place in ["rope_parameters", "rope_scaling"] {
        let rope = &written[place];
        assert_eq!(
            (&rope["rope_type"], &rope["factor"]),
            (&json!("yarn"), &json!(64.0)),
            "{place}"
        );
        assert!(rope.get("mscale").is_none(), "{place}: {rope}");
    }
    assert_eq!(written["rope_parameters"]["rope_theta"], json!(50000.0));
}
