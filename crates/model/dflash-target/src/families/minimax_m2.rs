//! MiniMax M2: norms over all query heads and over all key heads of a token, partial rotation,
//! sigmoid routing with a correction bias.

use dflash_formats::fields::Fields;
use dflash_tensor::Result;
use dflash_tensor::rope::{Rope, RopeKeys};

use super::{Family, Known, experts_count, top_k_count};
use crate::Outer;
use crate::blocks::attention::Heads;
use crate::blocks::experts::{Routing, Scores};
use crate::blocks::feed_forward::{FeedForwardSpec, MixtureSizes, MixtureStorage, activation};
use crate::blocks::pre_norm::{NormsOfHeads, PreNormFamily};
use crate::facts::HeadFacts;

pub(super) const KNOWN: &[Known] = &[Known {
    architectures: &["MiniMaxM2ForCausalLM"],
    model_types: &["minimax_m2"],
    head: HeadFacts::rms(1e-6),
    read,
}];

/// Class defaults.
const HEADS: Heads = Heads { query: 48, key: 8, dim: 128 };
const THETA: f64 = 5_000_000.0;

fn read(text: &Fields) -> Result<(Family, Outer)> {
    check(text)?;
    let layers = text.required("num_hidden_layers", Fields::size)? as usize;
    let heads = Heads::read(text, Some(HEADS))?;
    // As released: a number of elements instead of a share of the head.
    let rotated = text.size("rotary_dim")?.unwrap_or(heads.dim);
    let partial = rotated as f64 / heads.dim as f64;
    let rope = Rope::read(RopeKeys { theta: THETA, partial, ..RopeKeys::of(text, heads.dim)? })?;
    let inner = text.required("intermediate_size", Fields::size)?;
    let experts = experts_count(text, &["num_local_experts", "num_experts"])?;
    let top_k = top_k_count(text, &["num_experts_per_tok"], experts)?;
    let feed_forward = FeedForwardSpec {
        sizes: MixtureSizes { experts, top_k, inner, shared: 0, dense: 0 },
        fused: false,
        gated: activation(text, "hidden_act", "silu")?,
        routing: Some(Routing {
            top_k,
            scores: Scores::Sigmoid,
            normalised: true,
            scale: 1.0,
            groups: None,
        }),
        stored: MixtureStorage {
            correction: Some("e_score_correction_bias"),
            experts: ["w1", "w3", "w2"],
            ..MixtureStorage::USUAL
        },
    };
    let family = PreNormFamily {
        norms: NormsOfHeads::Together,
        module: "block_sparse_moe",
        ..PreNormFamily::new(layers, heads, rope, feed_forward)
    };
    Ok((family.into(), Outer::PLAIN))
}

/// Rejects options that no released model uses.
fn check(text: &Fields) -> Result<()> {
    let others = |value: &serde_json::Value| {
        value.as_array().is_some_and(|list| list.iter().any(|kind| kind.as_i64() != Some(1)))
    };
    if text.value("attn_type_list").is_some_and(others) {
        return Err(text.refuse("attn_type_list", "only attention of type 1 is supported"));
    }
    if text.token("shared_intermediate_size")?.is_some_and(|size| size != 0) {
        return Err(text.refuse("shared_intermediate_size", "only 0 is supported"));
    }
    match text.text("scoring_func")?.as_deref() {
        None | Some("sigmoid") => Ok(()),
        Some(_) => Err(text.refuse("scoring_func", "only sigmoid is supported")),
    }
}
