//! GLM 4.5, 4.6 and 4.7: half of each head rotated, leading dense layers, then grouped sigmoid
//! routing with a correction bias, and a shared expert.

use dflash_formats::fields::Fields;
use dflash_tensor::Result;
use dflash_tensor::rope::{Rope, RopeKeys};

use super::{Family, Known, experts_count, top_k_count};
use crate::Outer;
use crate::blocks::attention::Heads;
use crate::blocks::experts::{ExpertGroups, Routing, Scores};
use crate::blocks::feed_forward::{FeedForwardSpec, MixtureSizes, MixtureStorage, activation};
use crate::blocks::pre_norm::{NormsOfHeads, PreNormFamily};
use crate::facts::HeadFacts;

pub(super) const KNOWN: &[Known] = &[Known {
    architectures: &["Glm4MoeForCausalLM"],
    model_types: &["glm4_moe"],
    head: HeadFacts::rms(1e-5),
    read,
}];

fn read(text: &Fields) -> Result<(Family, Outer)> {
    let layers = text.required("num_hidden_layers", Fields::size)? as usize;
    let heads = Heads::read(text, None)?;
    let rope = Rope::read(RopeKeys { partial: 0.5, ..RopeKeys::of(text, heads.dim)? })?;
    let inner = text.required("moe_intermediate_size", Fields::size)?;
    let counts = ["n_routed_experts", "num_local_experts", "num_experts"];
    let experts = experts_count(text, &counts)?;
    let top_k = top_k_count(text, &["num_experts_per_tok"], experts)?;
    let feed_forward = FeedForwardSpec {
        sizes: MixtureSizes {
            experts,
            top_k,
            inner,
            shared: inner * text.size("n_shared_experts")?.unwrap_or(1),
            dense: text.required("intermediate_size", Fields::size)?,
        },
        fused: false,
        gated: activation(text, "hidden_act", "silu")?,
        routing: Some(Routing {
            top_k,
            scores: Scores::Sigmoid,
            normalised: text.flag_or("norm_topk_prob", true)?,
            scale: text.number("routed_scaling_factor")?.unwrap_or(1.0),
            groups: ExpertGroups::read(text, experts)?,
        }),
        stored: MixtureStorage {
            correction: Some("gate.e_score_correction_bias"),
            shared: "shared_experts",
            ..MixtureStorage::USUAL
        },
    };
    let has_norms = text.flag("use_qk_norm")?;
    let family = PreNormFamily {
        bias: (text.flag("attention_bias")?, false),
        norms: if has_norms { NormsOfHeads::Each } else { NormsOfHeads::None },
        ..PreNormFamily::new(layers, heads, rope, feed_forward)
    };
    let dense = text.token("first_k_dense_replace")?.unwrap_or(1) as usize;
    let family = family.with_experts((0..layers).map(|layer| layer >= dense));
    Ok((family.into(), Outer::PLAIN))
}
