//! Qwen3 with experts (Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder): Qwen3's attention, and softmax
//! routing to a few of many small experts.

use dflash_formats::fields::Fields;
use dflash_tensor::Result;
use dflash_tensor::attention_span::AttentionSpan;
use dflash_tensor::rope::{Rope, RopeKeys};

use super::{Family, Known, experts_count, sparse_by_step, top_k_count};
use crate::Outer;
use crate::blocks::attention::Heads;
use crate::blocks::experts::{Routing, Scores};
use crate::blocks::feed_forward::{FeedForwardSpec, MixtureSizes, MixtureStorage, activation};
use crate::blocks::pre_norm::{NormsOfHeads, PreNormFamily};
use crate::facts::HeadFacts;

pub(super) const KNOWN: &[Known] = &[Known {
    architectures: &["Qwen3MoeForCausalLM"],
    model_types: &["qwen3_moe"],
    head: HeadFacts::rms(1e-6),
    read,
}];

fn read(text: &Fields) -> Result<(Family, Outer)> {
    let layers = text.required("num_hidden_layers", Fields::size)? as usize;
    let heads = Heads::read(text, None)?;
    let rope = Rope::read(RopeKeys::of(text, heads.dim)?)?;
    let sparse = sparse_by_step(text, layers)?;
    let experts = experts_count(text, &["num_experts", "num_local_experts"])?;
    let top_k = top_k_count(text, &["num_experts_per_tok"], experts)?;
    let feed_forward = FeedForwardSpec {
        sizes: MixtureSizes {
            experts,
            top_k,
            inner: text.required("moe_intermediate_size", Fields::size)?,
            shared: 0,
            dense: text.required("intermediate_size", Fields::size)?,
        },
        fused: false,
        gated: activation(text, "hidden_act", "silu")?,
        routing: Some(Routing {
            top_k,
            scores: Scores::Softmax,
            normalised: text.flag("norm_topk_prob")?,
            scale: 1.0,
            groups: None,
        }),
        stored: MixtureStorage::USUAL,
    };
    let bias = text.flag("attention_bias")?;
    let used = text.flag("use_sliding_window")?;
    let attention_span: AttentionSpan = text.size("sliding_window")?.filter(|_| used).into();
    let family = PreNormFamily {
        bias: (bias, bias),
        norms: NormsOfHeads::Each,
        ..PreNormFamily::new(layers, heads, rope, feed_forward)
    };
    let family = family.with_attention_spans(vec![attention_span; layers]).with_experts(sparse);
    Ok((family.into(), Outer::PLAIN))
}
