//! Released configurations describe the same target as those written by Transformers, and
//! unsupported keys are rejected.

use dflash_tensor::Result;
use serde_json::{Value, json};

use crate::TargetConfig;
use crate::parallel::Shard;

fn load(config: &Value) -> Result<TargetConfig> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    TargetConfig::load(dir.path())
}

fn with(base: &Value, changes: Value) -> Value {
    let mut config = base.clone();
    let Value::Object(changes) = changes else { panic!("an object") };
    config.as_object_mut().unwrap().extend(changes);
    config
}

fn assert_same(base: &Value, changes: Value) {
    let changed = with(base, changes);
    assert_eq!(load(&changed).unwrap(), load(base).unwrap(), "{changed}");
}

fn assert_other(base: &Value, changes: Value) {
    let changed = with(base, changes);
    assert_ne!(load(&changed).unwrap(), load(base).unwrap(), "{changed}");
}

fn assert_refused(base: &Value, changes: Value, key: &str) {
    let message = load(&with(base, changes)).unwrap_err().to_string();
    assert!(message.contains(&format!("`{key}`")), "{message}");
}

/// Keys that every family has.
fn base(architecture: &str, own: Value) -> Value {
    let common = json!({
        "architectures": [architecture], "hidden_size": 64, "intermediate_size": 32,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 100, "tie_word_embeddings": false,
    });
    with(&common, own)
}

#[test]
fn gemma3_of_images_leaves_out_what_its_class_fills_in() {
    // As in gemma-3-4b-it.
    let released = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "rope_scaling": { "factor": 8.0, "rope_type": "linear" },
            "sliding_window": 1024,
        },
    });
    let kinds: Vec<&str> = (0..34)
        .map(|layer| if layer % 6 == 5 { "full_attention" } else { "sliding_attention" })
        .collect();
    let written = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106],
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
        "query_pre_attn_scalar": 256, "sliding_window": 1024, "layer_types": kinds,
        "tie_word_embeddings": true, "max_position_embeddings": 32_768, "rope_parameters": {
            "full_attention": { "rope_type": "linear", "factor": 8.0, "rope_theta": 1e6 },
            "sliding_attention": { "rope_type": "default", "rope_theta": 1e4 },
        },
    });
    assert_eq!(load(&released).unwrap(), load(&written).unwrap());
    assert_other(&written, json!({ "rope_parameters": null }));
    assert_other(&written, json!({ "final_logit_softcapping": 30.0 }));
    assert_refused(
        &written,
        json!({ "use_bidirectional_attention": true }),
        "use_bidirectional_attention",
    );
    assert_refused(&written, json!({ "hidden_activation": "relu" }), "hidden_activation");
    assert_refused(&written, json!({ "layer_types": ["full_attention"] }), "layer_types");
}

#[test]
fn gemma4_says_its_full_layers_heads_in_two_ways() {
    let global = base(
        "Gemma4ForCausalLM",
        json!({
            "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": true,
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 100,
        }),
    );
    let full = json!({ "head_dim": 32, "num_key_value_heads": 1 });
    assert_same(
        &global,
        json!({
            "global_head_dim": null, "num_global_key_value_heads": null,
            "per_layer_config": { "5": full },
        }),
    );
    // Without keys as values the second number is ignored.
    let plain = with(&global, json!({ "attention_k_eq_v": false }));
    assert_same(&plain, json!({ "num_global_key_value_heads": null }));
    // The last layer is always a full one.
    let sliding = vec!["sliding_attention"; 6];
    assert_same(&global, json!({ "layer_types": sliding }));
    assert_refused(&global, json!({ "num_kv_shared_layers": 6 }), "num_kv_shared_layers");
    assert_refused(&global, json!({ "num_kv_shared_layers": 1 }), "num_kv_shared_layers");
    let small = json!({ "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 50 });
    assert_refused(&global, small, "vocab_size_per_layer_input");
}

#[test]
fn phi3_says_longrope_by_three_names_and_its_share_at_two_places() {
    let factors = vec![1.5; 6];
    let long =
        |name: &str| json!({ "type": name, "short_factor": factors, "long_factor": factors });
    let old = base(
        "Phi3ForCausalLM",
        json!({
            "rope_scaling": long("longrope"), "rope_theta": 1e4, "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64, "max_position_embeddings": 512,
        }),
    );
    assert_same(&old, json!({ "rope_scaling": long("su") }));
    assert_same(&old, json!({ "rope_scaling": long("yarn") }));
    let mut new = long("longrope");
    new["partial_rotary_factor"] = json!(0.75);
    new["rope_theta"] = json!(1e4);
    assert_same(
        &old,
        json!({
            "rope_scaling": null, "rope_theta": null, "partial_rotary_factor": null,
            "rope_parameters": new,
        }),
    );
    assert_refused(&old, json!({ "partial_rotary_factor": 1.0 }), "rope_scaling.short_factor");
}

#[test]
fn mixtures_say_their_numbers_under_several_names() {
    let qwen = base(
        "Qwen3MoeForCausalLM",
        json!({
            "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "norm_topk_prob": true, "rope_theta": 1e7,
        }),
    );
    assert_same(&qwen, json!({ "num_experts": null, "num_local_experts": 8 }));
    assert_same(&qwen, json!({ "rope_theta": null, "rope_parameters": { "rope_theta": 1e7 } }));
    assert_same(&qwen, json!({ "sliding_window": 4, "use_sliding_window": false }));
    assert_other(&qwen, json!({ "mlp_only_layers": [0] }));
    assert_refused(&qwen, json!({ "num_experts": null }), "num_experts");
    assert_refused(&qwen, json!({ "num_experts_per_tok": 9 }), "num_experts_per_tok");
    let glm = base(
        "Glm4MoeForCausalLM",
        json!({
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        }),
    );
    assert_same(&glm, json!({ "partial_rotary_factor": 0.5, "first_k_dense_replace": 1 }));
    assert_same(&glm, json!({ "rope_parameters": { "partial_rotary_factor": 0.5 } }));
    assert_same(&glm, json!({ "num_nextn_predict_layers": 1, "n_group": 1, "topk_group": 1 }));
    assert_refused(&glm, json!({ "n_group": 3 }), "n_group");
    let minimax = base(
        "MiniMaxM2ForCausalLM",
        json!({
            "num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 8,
        }),
    );
    assert_same(
        &minimax,
        json!({
            "rotary_dim": null, "rope_parameters": { "partial_rotary_factor": 0.5, "rope_theta": 5e6 },
        }),
    );
    assert_refused(&minimax, json!({ "attn_type_list": [1, 0] }), "attn_type_list");
    let oss = base("GptOssForCausalLM", json!({ "num_local_experts": 8, "experts_per_token": 2 }));
    assert_same(
        &oss,
        json!({ "num_experts_per_tok": 2, "attention_bias": true, "sliding_window": 128 }),
    );
    let yarn = json!({ "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": false, "original_max_position_embeddings": 4096 });
    assert_same(&oss, json!({ "rope_scaling": yarn, "rope_theta": 150_000 }));
}

#[test]
fn llama4_says_its_layers_by_lists_or_by_steps() {
    let llama = base(
        "Llama4ForCausalLM",
        json!({
            "num_local_experts": 4, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2,
        }),
    );
    assert_same(&llama, json!({ "no_rope_layers": [1, 1, 1, 0, 1, 1], "moe_layers": [1, 3, 5] }));
    assert_same(&llama, json!({ "no_rope_layers": [], "attn_temperature_tuning": 4 }));
    assert_other(&llama, json!({ "attn_temperature_tuning": 0 }));
    assert_other(&llama, json!({ "attention_chunk_size": 4 }));
    assert_refused(&llama, json!({ "no_rope_layers": [1] }), "no_rope_layers");
}

#[test]
fn a_token_meets_its_experts_and_a_layer_keeps_all() {
    let config = load(&base(
        "Qwen3MoeForCausalLM",
        json!({
            "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        }),
    ))
    .unwrap();
    let architecture = config.family.architecture();
    let attention = 64 * (64 + 32 + 32) + 64 * 64;
    let active_params = attention + 64 * 8 + 2 * 3 * 64 * 16;
    assert_eq!(architecture.layer_elements(&config, 0), f64::from(active_params));
    let stored = attention + 64 * 8 + 8 * 3 * 64 * 16;
    assert_eq!(architecture.stored_elements(&config, 0, &Shard::WHOLE), f64::from(stored));
}
