//! Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: fused projections, LongRoPE; Phi-4-mini rotates three
//! quarters of a head.

use dflash_formats::fields::Fields;
use dflash_tensor::Result;
use dflash_tensor::attention_span::AttentionSpan;
use dflash_tensor::rope::{Rope, RopeKeys};

use super::{Family, Known};
use crate::Outer;
use crate::blocks::attention::Heads;
use crate::blocks::feed_forward::{FeedForwardSpec, activation};
use crate::blocks::pre_norm::PreNormFamily;
use crate::facts::HeadFacts;

pub(super) const KNOWN: &[Known] = &[Known {
    architectures: &["Phi3ForCausalLM"],
    model_types: &["phi3"],
    head: HeadFacts::rms(1e-5),
    read,
}];

fn read(text: &Fields) -> Result<(Family, Outer)> {
    let layers = text.required("num_hidden_layers", Fields::size)? as usize;
    let heads = Heads::read(text, None)?;
    let mut keys = RopeKeys::of(text, heads.dim)?;
    if let Some(parameters) = &mut keys.parameters {
        // The first Phi-3 releases' name for it.
        parameters.rename("yarn", "longrope");
    }
    let rope = Rope::read(keys)?;
    let inner = text.required("intermediate_size", Fields::size)?;
    let mlp = FeedForwardSpec::mlp(inner, activation(text, "hidden_act", "silu")?);
    let feed_forward = FeedForwardSpec { fused: true, ..mlp };
    let attention_span: AttentionSpan = text.size("sliding_window")?.into();
    let family =
        PreNormFamily { fused: true, ..PreNormFamily::new(layers, heads, rope, feed_forward) };
    Ok((family.with_attention_spans(vec![attention_span; layers]).into(), Outer::PLAIN))
}
