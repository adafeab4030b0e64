//! Reading config.json of each family, and overrides by a spec.

use std::path::Path;

use serde_json::{Value, json};

use super::*;

fn load(config: &Value, spec: Option<&TargetSpec>) -> Result<TargetFacts> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    TargetFacts::load(dir.path(), spec)
}

fn facts(config: &Value) -> TargetFacts {
    load(config, None).unwrap()
}

/// Sizes that every model has.
fn sized(more: Value) -> Value {
    let mut config = json!({
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 96,
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

fn heads(config: &Value) -> [i64; 4] {
    let heads = facts(config).draft.heads;
    [heads.num_attention_heads, heads.num_key_value_heads, heads.head_dim, heads.intermediate_size]
}

/// As in Qwen/Qwen3.5-27B.
fn qwen3_5() -> Value {
    json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
        "text_config": {
            "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 24,
            "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 17408,
            "vocab_size": 248_320, "rms_norm_eps": 1e-6, "max_position_embeddings": 262_144,
            "model_type": "qwen3_5_text", "eos_token_id": 248_044, "tie_word_embeddings": false,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7,
                "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
        },
        "vision_config": {"hidden_size": 1152}, "tie_word_embeddings": false,
    })
}

/// As in moonshotai/Kimi-K2.5.
fn kimi() -> Value {
    json!({
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
        "pad_token_id": 163_839,
        "text_config": {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2",
            "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64,
            "num_key_value_heads": 64, "intermediate_size": 18432, "moe_intermediate_size": 2048,
            "n_routed_experts": 384, "first_k_dense_replace": 1, "kv_lora_rank": 512,
            "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "vocab_size": 163_840, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
            "max_position_embeddings": 262_144, "eos_token_id": 163_586,
            "rope_scaling": {"type": "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
            "tie_word_embeddings": false,
        },
    })
}

#[test]
fn nested_models_are_read_through() {
    let qwen = facts(&qwen3_5());
    assert_eq!(qwen.architecture, "Qwen3_5ForConditionalGeneration");
    assert_eq!((qwen.hidden_size, qwen.num_hidden_layers, qwen.vocab_size), (5120, 64, 248_320));
    assert_eq!((qwen.head.norm, qwen.is_tied()), (NormKind::RmsPlusOne, false));
    assert_eq!(qwen.eos_token_ids, [248_044]);
    let kimi = facts(&kimi());
    assert_eq!((kimi.pad_token_id, kimi.head.norm_eps), (Some(163_839), 1e-5));
    assert_eq!(kimi.head.norm, NormKind::Rms);
}

/// Against z-lab's drafts and SpecForge's configurations for these targets, where those follow the
/// target; docs/targets.md lists exceptions.
#[test]
fn a_drafts_defaults_are_those_of_peers() {
    assert_eq!(heads(&qwen3_5()), [24, 4, 256, 17_408], "SpecForge's qwen3.5-27b-dflash");
    assert_eq!(heads(&kimi()), [64, 8, 128, 18_432], "z-lab's Kimi-K2.5-DFlash");
    let coder = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 5472, "moe_intermediate_size": 768, "num_experts": 128,
        "vocab_size": 151_936, "rope_theta": 1e7,
    });
    assert_eq!(heads(&coder), [32, 4, 128, 6144], "z-lab's Qwen3-Coder-30B-A3B-DFlash");
    let gpt_oss = json!({
        "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 2880, "num_local_experts": 128, "vocab_size": 201_088,
        "rope_theta": 150_000, "rope_scaling": {"rope_type": "yarn", "factor": 32.0,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            "original_max_position_embeddings": 4096},
    });
    assert_eq!(heads(&gpt_oss), [64, 8, 64, 8640]);
    let dense = sized(json!({ "architectures": ["Qwen2ForCausalLM"], "intermediate_size": 100 }));
    assert_eq!(heads(&dense), [8, 8, 8, 100]);
    let latent_v4 = sized(json!({ "architectures": ["DeepseekV4ForCausalLM"], "head_dim": 512,
        "num_key_value_heads": 1, "o_lora_rank": 1024, "n_routed_experts": 256 }));
    assert_eq!(heads(&latent_v4), [8, 8, 128, 192]);
}

#[test]
fn rotary_scaling_is_copied_where_engines_serve_it_alike() {
    let kimi = facts(&kimi()).draft;
    let scaling = serde_json::to_value(kimi.rope_scaling.unwrap()).unwrap();
    assert_eq!((&scaling["rope_type"], &scaling["factor"]), (&json!("yarn"), &json!(64.0)));
    assert!(scaling["attention_factor"].is_null() && kimi.notes.is_empty(), "{kimi:?}");
    assert_eq!(kimi.rope_theta, 50_000.0);
    let qwen = facts(&qwen3_5()).draft;
    assert_eq!((qwen.rope_theta, qwen.rope_scaling), (1e7, None));
    assert!(qwen.notes[0].contains("rotates 0.25 of each head"), "{:?}", qwen.notes);
    let long = sized(json!({ "architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 1.0,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]} }));
    let long = facts(&long).draft;
    assert_eq!(long.rope_scaling, None);
    assert!(long.notes[0].contains("longrope"), "{:?}", long.notes);
    let by_layer = sized(json!({ "architectures": ["Gemma3ForCausalLM"], "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4} } }));
    assert_eq!(facts(&by_layer).draft.rope_theta, 1e6);
}

#[test]
fn families_differ_in_what_changes_numbers() {
    let head = |more: Value| facts(&sized(more)).head;
    let gemma = head(json!({ "architectures": ["Gemma2ForCausalLM"] }));
    assert_eq!((gemma.norm, gemma.softcap), (NormKind::RmsPlusOne, Some(30.0)));
    assert_eq!((gemma.embedding_scale, gemma.rounds_embedding_scale), (8.0, true));
    let uncapped =
        json!({ "architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": null });
    assert_eq!(head(uncapped).softcap, None);
    assert_eq!(head(json!({ "architectures": ["Gemma4ForCausalLM"] })).norm, NormKind::Rms);
    let granite = head(json!({ "architectures": ["GraniteForCausalLM"],
        "embedding_multiplier": 12.0, "logits_scaling": 8.0 }));
    assert_eq!((granite.embedding_scale, granite.logit_scale), (12.0, 0.125));
    let nemotron = head(json!({ "architectures": ["NemotronForCausalLM"], "norm_eps": 1e-3 }));
    assert_eq!((nemotron.norm, nemotron.norm_eps), (NormKind::LayerPlusOne, 1e-3));
    let hybrid = facts(&sized(json!({ "architectures": ["NemotronHForCausalLM"],
        "num_hidden_layers": null, "hybrid_override_pattern": "M-M*-M-" })));
    assert_eq!((hybrid.num_hidden_layers, hybrid.head.norm_eps), (7, 1e-5));
    assert!(facts(&sized(json!({ "model_type": "gemma3_text" }))).is_tied());
    assert!(!facts(&sized(json!({ "model_type": "llama" }))).is_tied());
}

#[test]
fn states_of_several_streams_give_no_logits() {
    let v4 = json!({ "architectures": ["DeepseekV4ForCausalLM"], "hc_mult": 4 });
    assert!(facts(&sized(v4)).no_last_state.is_some());
    let v3 = json!({ "architectures": ["DeepseekV3ForCausalLM"] });
    assert!(facts(&sized(v3)).no_last_state.is_none());
}

#[test]
fn a_description_comes_before_config_json() {
    let unknown = sized(json!({ "architectures": ["MysteryForCausalLM"], "rms_norm_eps": 1e-3 }));
    let message = load(&unknown, None).unwrap_err().to_string();
    for part in ["MysteryForCausalLM", "--target-spec", "norm_kind = \"rms\"", "embedding = "] {
        assert!(message.contains(part), "{message}");
    }
    let spec = TargetSpec {
        norm_kind: Some(NormKind::Layer),
        logit_scale: Some(0.5),
        head_dim: Some(16),
        ..TargetSpec::default()
    };
    let described = load(&unknown, Some(&spec)).unwrap();
    assert_eq!((described.head.norm, described.head.logit_scale), (NormKind::Layer, 0.5));
    assert_eq!((described.head.norm_eps, described.draft.heads.head_dim), (1e-3, 16));
    let known = sized(json!({ "architectures": ["Gemma2ForCausalLM"] }));
    assert_eq!(load(&known, Some(&spec)).unwrap().head.softcap, Some(30.0));
}

#[test]
fn what_cannot_be_is_named() {
    let check = |more: Value, expected: &str| {
        let message = load(&sized(more), None).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    };
    let llama =
        |key: &str, value: Value| json!({ "architectures": ["LlamaForCausalLM"], key: value });
    check(llama("hidden_size", json!(null)), "`hidden_size` is null");
    check(llama("num_key_value_heads", json!(3)), "`num_key_value_heads` is 3");
    check(llama("vocab_size", json!("many")), "`vocab_size` is \"many\"");
    check(
        json!({ "architectures": ["GraniteForCausalLM"], "logits_scaling": 0.0 }),
        "`logits_scaling` is 0.0",
    );
    check(
        json!({ "architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": -1.0 }),
        "`final_logit_softcapping` is -1.0",
    );
    let error = TargetFacts::load(Path::new("/nowhere"), None).unwrap_err().to_string();
    assert!(error.contains("config.json"), "{error}");
}

#[test]
fn a_name_is_that_of_one_family() {
    let (mut names, mut kinds) = (Vec::<&str>::new(), Vec::<&str>::new());
    for family in architectures::known() {
        names.extend(family.architectures);
        kinds.extend(family.model_types);
    }
    assert!(names.len() > 60, "{names:?}");
    for names in [&mut names, &mut kinds] {
        names.sort_unstable();
        let twice = names.windows(2).find(|pair| pair[0] == pair[1]);
        assert_eq!(twice, None);
    }
}
