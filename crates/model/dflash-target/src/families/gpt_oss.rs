//! gpt-oss: biases everywhere, an attention sink per head, a sliding window in every other layer,
//! YaRN, and experts with a clamped SwiGLU, gate and up interleaved; released in MXFP4.

use dflash_formats::fields::Fields;
use dflash_tensor::Result;
use dflash_tensor::attention_span::AttentionSpan;
use dflash_tensor::rope::{Rope, RopeKeys, Scaling, Yarn, yarn_mscale};

use super::{Family, Known, experts_count, layer_types, top_k_count};
use crate::Outer;
use crate::blocks::attention::Heads;
use crate::blocks::experts::{Gated, Routing, Scores, Stored};
use crate::blocks::feed_forward::{FeedForwardSpec, MixtureSizes, MixtureStorage, activation};
use crate::blocks::pre_norm::PreNormFamily;
use crate::facts::HeadFacts;

pub(super) const KNOWN: &[Known] = &[Known {
    architectures: &["GptOssForCausalLM"],
    model_types: &["gpt_oss"],
    head: HeadFacts::rms(1e-5),
    read,
}];

/// Class defaults.
const HEADS: Heads = Heads { query: 64, key: 8, dim: 64 };
const THETA: f64 = 150_000.0;
const WINDOW: i64 = 128;
const LIMIT: f64 = 7.0;
/// Slope of the sigmoid; not configurable.
const ALPHA: f64 = 1.702;

fn read(text: &Fields) -> Result<(Family, Outer)> {
    let layers = text.required("num_hidden_layers", Fields::size)? as usize;
    let heads = Heads::read(text, Some(HEADS))?;
    let _ = activation(text, "hidden_act", "silu")?;
    let inner = text.required("intermediate_size", Fields::size)?;
    let experts = experts_count(text, &["num_local_experts", "num_experts"])?;
    let top_k = top_k_count(text, &["num_experts_per_tok", "experts_per_token"], experts)?;
    let limit = text.number("swiglu_limit")?.unwrap_or(LIMIT);
    let feed_forward = FeedForwardSpec {
        sizes: MixtureSizes { experts, top_k, inner, shared: 0, dense: 0 },
        fused: false,
        gated: Gated::Clamped { alpha: ALPHA, limit },
        routing: Some(Routing {
            top_k,
            scores: Scores::SoftmaxOfTopK,
            normalised: false,
            scale: 1.0,
            groups: None,
        }),
        stored: MixtureStorage {
            router: "router.weight",
            router_bias: Some("router.bias"),
            layout: Stored::Interleaved,
            bias: true,
            ..MixtureStorage::USUAL
        },
    };
    let bias = text.flag_or("attention_bias", true)?;
    let family = PreNormFamily {
        bias: (bias, bias),
        sinks: true,
        ..PreNormFamily::new(layers, heads, rope(text, heads.dim)?, feed_forward)
    };
    Ok((family.with_attention_spans(attention_spans(text, layers)?).into(), Outer::PLAIN))
}

fn attention_spans(text: &Fields, layers: usize) -> Result<Vec<AttentionSpan>> {
    let window = text.size("sliding_window")?.unwrap_or(WINDOW);
    let attention_span = |kind: &str| match kind {
        "sliding_attention" => Some(AttentionSpan::Window(window)),
        "full_attention" => Some(AttentionSpan::All),
        _ => None,
    };
    let by_turns = |layer: usize| {
        if layer.is_multiple_of(2) { AttentionSpan::Window(window) } else { AttentionSpan::All }
    };
    let named = layer_types(text, layers, attention_span)?;
    Ok(named.unwrap_or_else(|| (0..layers).map(by_turns).collect()))
}

fn rope(text: &Fields, head_dim: i64) -> Result<Rope> {
    let keys = RopeKeys { theta: THETA, ..RopeKeys::of(text, head_dim)? };
    let is_written = keys.parameters.is_some();
    let rope = Rope::read(keys)?;
    if is_written {
        return Ok(rope);
    }
    let yarn = Yarn {
        factor: 32.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: false,
        original_max_position_embeddings: 4096,
        attention_factor: yarn_mscale(32.0, 1.0),
    };
    Ok(Rope { scaling: Scaling::Yarn(yarn), ..rope })
}
