//! The families whose heads are known, by what of them changes numbers.
//!
//! Each entry was read in Transformers 5.17 (`models/*/modeling_*.py` and `configuration_*.py`) and
//! held against vLLM 0.32 (`model_executor/models`): the class of the final norm, what is done to the
//! embedding and to the logits, and the defaults of keys that a config.json may leave out.

use dflash_formats::fields::Fields;
use dflash_tensor::Result;

use super::NormKind;

/// What the embedding is multiplied by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum EmbeddingScale {
    One,
    /// sqrt(H), rounded to the type of the weights.
    RootOfWidth,
    /// The number under a key, 1 where it is missing.
    Key(&'static str),
}

/// What the logits are multiplied by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum LogitScale {
    One,
    /// Divided by the number under a key, 1 where it is missing.
    Over(&'static str),
    /// Multiplied by the number under a key, or by this where it is missing.
    Times(&'static str, f64),
}

/// A family's head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Architecture {
    /// Names under `architectures`.
    names: &'static [&'static str],
    /// Names under `model_type`, of the whole or of the text model.
    model_types: &'static [&'static str],
    pub(super) norm: NormKind,
    /// Keys of the norm's epsilon, the family's own first.
    pub(super) eps_keys: &'static [&'static str],
    /// The epsilon where config.json has none of the keys.
    pub(super) eps: f64,
    pub(super) embedding: EmbeddingScale,
    pub(super) logits: LogitScale,
    /// The soft-cap where config.json does not mention it.
    pub(super) softcap: Option<f64>,
    /// Whether the head is tied where config.json does not say.
    pub(super) tied: bool,
    pub(super) no_last_state: Option<&'static str>,
}

/// Several streams run through DeepSeek V4's layers, and its final norm reads a learned mixture of them.
const STREAMS: &str = "its layers carry several streams whose mean is what servers deliver, and its \
                       final norm reads another mixture of them";

impl Architecture {
    /// An RMS norm and nothing else, as most families have it.
    pub(super) const PLAIN: Self = Self {
        names: &[],
        model_types: &[],
        norm: NormKind::Rms,
        eps_keys: &[
            "rms_norm_eps",
            "layer_norm_eps",
            "norm_eps",
            "layer_norm_epsilon",
            "norm_epsilon",
        ],
        eps: 1e-6,
        embedding: EmbeddingScale::One,
        logits: LogitScale::One,
        softcap: None,
        tied: false,
        no_last_state: None,
    };

    /// The family that config.json names; an architecture that is named decides, not the model type.
    pub(super) fn find(config: &Fields, text: &Fields) -> Result<Option<Self>> {
        for fields in [config, text] {
            let names = fields.texts("architectures")?.unwrap_or_default();
            if let Some(name) = names.first() {
                let found = KNOWN.iter().find(|family| family.names.contains(&name.as_str()));
                if found.is_some() || !is_wrapper(name) {
                    return Ok(found.copied());
                }
            }
        }
        for fields in [text, config] {
            let Some(kind) = fields.text("model_type")? else { continue };
            let of_kind = |family: &&Self| family.model_types.contains(&kind.as_str());
            if let Some(found) = KNOWN.iter().find(of_kind) {
                return Ok(Some(*found));
            }
        }
        Ok(None)
    }
}

/// A multimodal model, whose text model's type says what its head is.
fn is_wrapper(name: &str) -> bool {
    name.ends_with("ForConditionalGeneration")
}

const fn rms(
    names: &'static [&'static str],
    model_types: &'static [&'static str],
    eps: f64,
) -> Architecture {
    Architecture { names, model_types, eps, ..Architecture::PLAIN }
}

const fn gemma(
    names: &'static [&'static str],
    model_types: &'static [&'static str],
    norm: NormKind,
    softcap: Option<f64>,
) -> Architecture {
    let embedding = EmbeddingScale::RootOfWidth;
    let plain = Architecture::PLAIN;
    Architecture { names, model_types, norm, embedding, softcap, tied: true, ..plain }
}

const fn plus_one(
    names: &'static [&'static str],
    model_types: &'static [&'static str],
) -> Architecture {
    Architecture { names, model_types, norm: NormKind::RmsPlusOne, ..Architecture::PLAIN }
}

const KNOWN: [Architecture; 33] = [
    rms(&["LlamaForCausalLM", "LLaMAForCausalLM"], &["llama"], 1e-6),
    rms(&["Llama4ForCausalLM", "Llama4ForConditionalGeneration"], &["llama4_text", "llama4"], 1e-5),
    rms(&["MistralForCausalLM"], &["mistral"], 1e-6),
    rms(&["Ministral3ForCausalLM", "MinistralForCausalLM"], &["ministral3", "ministral"], 1e-5),
    // Which text model it wraps, changes nothing here.
    rms(&["Mistral3ForConditionalGeneration"], &["mistral3"], 1e-5),
    rms(&["MixtralForCausalLM"], &["mixtral"], 1e-5),
    rms(
        &[
            "Qwen2ForCausalLM",
            "Qwen2VLForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
        ],
        &["qwen2", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_vl", "qwen2_5_vl"],
        1e-6,
    ),
    rms(&["Qwen2MoeForCausalLM"], &["qwen2_moe"], 1e-6),
    rms(
        &["Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration"],
        &["qwen3", "qwen3_vl_text", "qwen3_vl"],
        1e-6,
    ),
    rms(
        &["Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration"],
        &["qwen3_moe", "qwen3_vl_moe_text", "qwen3_vl_moe"],
        1e-6,
    ),
    plus_one(&["Qwen3NextForCausalLM"], &["qwen3_next"]),
    plus_one(
        &["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"],
        &["qwen3_5_text", "qwen3_5"],
    ),
    plus_one(
        &["Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"],
        &["qwen3_5_moe_text", "qwen3_5_moe"],
    ),
    gemma(&["Gemma2ForCausalLM"], &["gemma2"], NormKind::RmsPlusOne, Some(30.0)),
    gemma(
        &["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
        &["gemma3_text", "gemma3"],
        NormKind::RmsPlusOne,
        None,
    ),
    gemma(
        &["Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"],
        &["gemma3n_text", "gemma3n"],
        NormKind::Rms,
        Some(30.0),
    ),
    gemma(
        &[
            "Gemma4ForCausalLM",
            "Gemma4ForConditionalGeneration",
            "Gemma4UnifiedForCausalLM",
            "Gemma4UnifiedForConditionalGeneration",
        ],
        &["gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"],
        NormKind::Rms,
        None,
    ),
    rms(&["Phi3ForCausalLM", "Phi4MMForCausalLM"], &["phi3", "phi4mm"], 1e-5),
    Architecture {
        norm: NormKind::Layer,
        ..rms(&["PhiMoEForCausalLM", "PhimoeForCausalLM"], &["phimoe"], 1e-5)
    },
    rms(&["GptOssForCausalLM"], &["gpt_oss"], 1e-5),
    // Kimi K2 names DeepSeek V3's architecture.
    rms(
        &[
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "DeepseekV32ForCausalLM",
            "KimiK25ForConditionalGeneration",
            "KimiVLForConditionalGeneration",
        ],
        &["deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "kimi_vl"],
        1e-6,
    ),
    Architecture {
        no_last_state: Some(STREAMS),
        ..rms(&["DeepseekV4ForCausalLM"], &["deepseek_v4"], 1e-6)
    },
    rms(
        &[
            "GlmForCausalLM",
            "Glm4ForCausalLM",
            "Glm4MoeForCausalLM",
            "Glm4MoeLiteForCausalLM",
            "GlmMoeDsaForCausalLM",
            "Glm4vForConditionalGeneration",
            "Glm4vMoeForConditionalGeneration",
        ],
        &[
            "glm",
            "glm4",
            "glm4_moe",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "glm4v_text",
            "glm4v_moe_text",
        ],
        1e-5,
    ),
    rms(&["MiniMaxM2ForCausalLM"], &["minimax_m2"], 1e-6),
    Architecture {
        embedding: EmbeddingScale::Key("embedding_multiplier"),
        logits: LogitScale::Over("logits_scaling"),
        ..rms(
            &[
                "GraniteForCausalLM",
                "GraniteMoeForCausalLM",
                "GraniteMoeSharedForCausalLM",
                "GraniteMoeHybridForCausalLM",
            ],
            &["granite", "granitemoe", "granitemoeshared", "granitemoehybrid"],
            1e-6,
        )
    },
    rms(
        &["Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoeForCausalLM"],
        &["olmo2", "olmo3", "olmoe"],
        1e-5,
    ),
    rms(&["SeedOssForCausalLM"], &["seed_oss"], 1e-6),
    Architecture {
        tied: true,
        ..rms(
            &["Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM", "Ernie4_5_MoeForCausalLM"],
            &["ernie4_5", "ernie4_5_moe"],
            1e-5,
        )
    },
    rms(
        &["HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM"],
        &["hunyuan_v1_dense", "hunyuan_v1_moe"],
        1e-5,
    ),
    Architecture {
        norm: NormKind::LayerPlusOne,
        eps_keys: &["norm_eps"],
        ..rms(&["NemotronForCausalLM"], &["nemotron"], 1e-5)
    },
    Architecture {
        eps_keys: &["layer_norm_epsilon", "rms_norm_eps", "norm_eps"],
        ..rms(&["NemotronHForCausalLM"], &["nemotron_h"], 1e-5)
    },
    rms(&["DeciLMForCausalLM"], &["nemotron-nas", "deci"], 1e-5),
    Architecture {
        norm: NormKind::Layer,
        eps_keys: &["layer_norm_eps"],
        logits: LogitScale::Times("logit_scale", 0.0625),
        tied: true,
        ..rms(&["CohereForCausalLM", "Cohere2ForCausalLM"], &["cohere", "cohere2"], 1e-5)
    },
];
