//! Numerical properties of heads by family. Native families define theirs in their own files
//! ([`families`]); families that are only trained for are in the table here.
//!
//! Sources: Transformers 5.17 (`models/*/modeling_*.py` and `configuration_*.py`), checked against
//! vLLM 0.32 (`model_executor/models`): the class of the final norm, scaling of embedding and
//! logits, and defaults of keys that a config.json may omit.

use dflash_formats::fields::Fields;
use dflash_tensor::Result;

use super::NormKind;
use crate::families;

/// Factor on the embedding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum EmbeddingScale {
    One,
    /// sqrt(H), rounded to the weights' type.
    RootOfWidth,
    /// The number under a key, or 1 if absent.
    Key(&'static str),
}

/// Factor on the logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum LogitScale {
    One,
    /// Divides by the number under a key, or 1 if absent.
    Over(&'static str),
    /// Multiplies by the number under a key, or by this default.
    Times(&'static str, f64),
}

/// A family's head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct HeadFacts {
    pub(crate) norm: NormKind,
    /// Keys of the norm's epsilon in order of precedence.
    pub(crate) eps_keys: &'static [&'static str],
    /// Default epsilon.
    pub(crate) eps: f64,
    pub(crate) embedding: EmbeddingScale,
    pub(crate) logits: LogitScale,
    /// Default soft cap.
    pub(crate) softcap: Option<f64>,
    /// Whether embeddings are tied by default.
    pub(crate) tied: bool,
    pub(crate) no_last_state: Option<&'static str>,
}

/// DeepSeek V4's layers carry several streams; its final norm reads a learned mixture.
const STREAMS: &str = "its layers carry several streams whose mean is what servers deliver, and its \
                       final norm reads another mixture of them";

impl HeadFacts {
    /// A plain RMS norm with this epsilon, as in most families.
    pub(crate) const fn rms(eps: f64) -> Self {
        Self {
            norm: NormKind::Rms,
            eps_keys: &[
                "rms_norm_eps",
                "layer_norm_eps",
                "norm_eps",
                "layer_norm_epsilon",
                "norm_epsilon",
            ],
            eps,
            embedding: EmbeddingScale::One,
            logits: LogitScale::One,
            softcap: None,
            tied: false,
            no_last_state: None,
        }
    }

    /// An RMS norm whose weight is stored minus one.
    pub(crate) const fn plus_one() -> Self {
        Self { norm: NormKind::RmsPlusOne, ..Self::rms(1e-6) }
    }

    /// Scaled and tied embeddings.
    pub(crate) const fn gemma(norm: NormKind, softcap: Option<f64>) -> Self {
        let embedding = EmbeddingScale::RootOfWidth;
        Self { norm, embedding, softcap, tied: true, ..Self::rms(1e-6) }
    }

    /// The head of the family in config.json, by `architectures` first, then the model type.
    pub(super) fn find(config: &Fields, text: &Fields) -> Result<Option<Self>> {
        for fields in [config, text] {
            let names = fields.texts("architectures")?.unwrap_or_default();
            if let Some(name) = names.first() {
                let found = known().find(|family| family.architectures.contains(&name.as_str()));
                if found.is_some() || !is_wrapper(name) {
                    return Ok(found.map(|family| family.head));
                }
            }
        }
        for fields in [text, config] {
            let Some(kind) = fields.text("model_type")? else { continue };
            if let Some(found) = known().find(|family| family.model_types.contains(&kind.as_str()))
            {
                return Ok(Some(found.head));
            }
        }
        Ok(None)
    }
}

/// A multimodal model, whose head depends on its text model's type.
fn is_wrapper(name: &str) -> bool {
    name.ends_with("ForConditionalGeneration")
}

/// A head with its family's names.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NamedHead {
    /// Names under `architectures`.
    pub(crate) architectures: &'static [&'static str],
    /// Names under `model_type`, of the whole model or the text model.
    pub(crate) model_types: &'static [&'static str],
    pub(crate) head: HeadFacts,
}

pub(super) fn known() -> impl Iterator<Item = NamedHead> {
    families::heads().chain(TRAINED_FOR.iter().copied())
}

const fn named(
    architectures: &'static [&'static str],
    model_types: &'static [&'static str],
    head: HeadFacts,
) -> NamedHead {
    NamedHead { architectures, model_types, head }
}

const fn rms(
    architectures: &'static [&'static str],
    model_types: &'static [&'static str],
    eps: f64,
) -> NamedHead {
    named(architectures, model_types, HeadFacts::rms(eps))
}

/// Families that do not run natively.
const TRAINED_FOR: &[NamedHead] = &[
    rms(&["LLaMAForCausalLM"], &[], 1e-6),
    rms(&["Ministral3ForCausalLM", "MinistralForCausalLM"], &["ministral3", "ministral"], 1e-5),
    // The wrapped text model does not matter here.
    rms(&["Mistral3ForConditionalGeneration"], &["mistral3"], 1e-5),
    rms(&["MixtralForCausalLM"], &["mixtral"], 1e-5),
    rms(
        &["Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"],
        &["qwen2_vl_text", "qwen2_5_vl_text", "qwen2_vl", "qwen2_5_vl"],
        1e-6,
    ),
    rms(&["Qwen2MoeForCausalLM"], &["qwen2_moe"], 1e-6),
    rms(&["Qwen3VLForConditionalGeneration"], &["qwen3_vl_text", "qwen3_vl"], 1e-6),
    rms(&["Qwen3VLMoeForConditionalGeneration"], &["qwen3_vl_moe_text", "qwen3_vl_moe"], 1e-6),
    named(
        &["Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"],
        &["gemma3n_text", "gemma3n"],
        HeadFacts::gemma(NormKind::Rms, Some(30.0)),
    ),
    named(
        &["Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"],
        &["gemma4_unified_text", "gemma4_unified"],
        HeadFacts::gemma(NormKind::Rms, None),
    ),
    rms(&["Phi4MMForCausalLM"], &["phi4mm"], 1e-5),
    named(
        &["PhiMoEForCausalLM", "PhimoeForCausalLM"],
        &["phimoe"],
        HeadFacts { norm: NormKind::Layer, ..HeadFacts::rms(1e-5) },
    ),
    rms(
        &["DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "KimiVLForConditionalGeneration"],
        &["deepseek_v2", "deepseek_v32", "kimi_vl"],
        1e-6,
    ),
    named(
        &["DeepseekV4ForCausalLM"],
        &["deepseek_v4"],
        HeadFacts { no_last_state: Some(STREAMS), ..HeadFacts::rms(1e-6) },
    ),
    rms(
        &[
            "GlmForCausalLM",
            "Glm4ForCausalLM",
            "Glm4MoeLiteForCausalLM",
            "GlmMoeDsaForCausalLM",
            "Glm4vForConditionalGeneration",
            "Glm4vMoeForConditionalGeneration",
        ],
        &["glm", "glm4", "glm4_moe_lite", "glm_moe_dsa", "glm4v_text", "glm4v_moe_text"],
        1e-5,
    ),
    named(
        &[
            "GraniteForCausalLM",
            "GraniteMoeForCausalLM",
            "GraniteMoeSharedForCausalLM",
            "GraniteMoeHybridForCausalLM",
        ],
        &["granite", "granitemoe", "granitemoeshared", "granitemoehybrid"],
        HeadFacts {
            embedding: EmbeddingScale::Key("embedding_multiplier"),
            logits: LogitScale::Over("logits_scaling"),
            ..HeadFacts::rms(1e-6)
        },
    ),
    rms(
        &["Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoeForCausalLM"],
        &["olmo2", "olmo3", "olmoe"],
        1e-5,
    ),
    rms(&["SeedOssForCausalLM"], &["seed_oss"], 1e-6),
    named(
        &["Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM", "Ernie4_5_MoeForCausalLM"],
        &["ernie4_5", "ernie4_5_moe"],
        HeadFacts { tied: true, ..HeadFacts::rms(1e-5) },
    ),
    rms(
        &["HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM"],
        &["hunyuan_v1_dense", "hunyuan_v1_moe"],
        1e-5,
    ),
    named(
        &["NemotronForCausalLM"],
        &["nemotron"],
        HeadFacts { norm: NormKind::LayerPlusOne, eps_keys: &["norm_eps"], ..HeadFacts::rms(1e-5) },
    ),
    named(
        &["NemotronHForCausalLM"],
        &["nemotron_h"],
        HeadFacts {
            eps_keys: &["layer_norm_epsilon", "rms_norm_eps", "norm_eps"],
            ..HeadFacts::rms(1e-5)
        },
    ),
    rms(&["DeciLMForCausalLM"], &["nemotron-nas", "deci"], 1e-5),
    named(
        &["CohereForCausalLM", "Cohere2ForCausalLM"],
        &["cohere", "cohere2"],
        HeadFacts {
            norm: NormKind::Layer,
            eps_keys: &["layer_norm_eps"],
            logits: LogitScale::Times("logit_scale", 0.0625),
            tied: true,
            ..HeadFacts::rms(1e-5)
        },
    ),
];
