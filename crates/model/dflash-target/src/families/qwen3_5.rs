//! Qwen3.5 and 3.6, dense and with experts: the layers of Qwen3-Next ([`super::qwen3_next`]) with
//! separate input projections of the delta networks. Either every layer has an MLP or every layer
//! has experts, whose shares always sum to one. M-RoPE equals plain RoPE for text.
//!
//! Released checkpoints also contain a vision tower (the text model is under
//! `model.language_model.`, its keys under `text_config`) and multi-token prediction layers
//! (`mtp.`); neither is read.

use dflash_formats::fields::Fields;
use dflash_tensor::Result;

use super::qwen3_next::{DeltaInputs, HybridConfig};
use super::{Family, Known};
use crate::Outer;
use crate::facts::HeadFacts;

pub(super) const KNOWN: &[Known] = &[
    Known {
        architectures: &["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"],
        model_types: &["qwen3_5_text", "qwen3_5"],
        head: HeadFacts::plus_one(),
        read: |text| read(text, false),
    },
    Known {
        architectures: &["Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"],
        model_types: &["qwen3_5_moe_text", "qwen3_5_moe"],
        head: HeadFacts::plus_one(),
        read: |text| read(text, true),
    },
];

/// Reads config.json of a dense Qwen3.5, or of one with experts.
fn read(text: &Fields, is_sparse: bool) -> Result<(Family, Outer)> {
    let layers = text.required("num_hidden_layers", Fields::size)? as usize;
    HybridConfig::read_with(text, vec![is_sparse; layers], true, DeltaInputs::Apart)
}
