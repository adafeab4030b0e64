//! MiniMax M2: norms over all query heads and over all key heads of a token, a part of each head rotated,
//! sigmoid routing with a correction.

use tch::Device;

use super::{Architecture, MixtureSizes, chosen_count, experts_count};
use crate::Result;
use crate::fields::Fields;
use crate::ops::{Pairs, Rotary};
use crate::target::TargetConfig;
use crate::target::blocks::attention::{AttentionSpec, HeadNorms, Heads, SelfAttention};
use crate::target::blocks::experts::{
    ExpertsSpec, Gated, RouterSpec, Routing, Scores, Stored, Weighed,
};
use crate::target::blocks::feed_forward::{FeedForward, Mixture, activation};
use crate::target::blocks::pre_norm::PreNormLayer;
use crate::target::blocks::rope::{Rope, RopeKeys, rope_parameters};
use crate::target::divided::{Divisible, Shard};
use crate::target::layer::{Layer, Reach};
use crate::target::parameters::Init;

/// Its dimensions and choices.
#[derive(Debug, Clone, PartialEq)]
pub struct MiniMaxM2Config {
    heads: Heads,
    rope: Rope,
    sizes: MixtureSizes,
    gated: Gated,
}

/// What its class fills in.
const HEADS: Heads = Heads { query: 48, key: 8, dim: 128 };
const THETA: f64 = 5_000_000.0;

impl MiniMaxM2Config {
    pub(crate) fn read(text: &Fields) -> Result<Self> {
        check(text)?;
        let heads = Heads::read(text, Some(HEADS))?;
        // As released: a number of elements in place of a share of the head.
        let rotated = text.size("rotary_dim")?.unwrap_or(heads.dim);
        let rope = Rope::read(RopeKeys {
            text,
            parameters: rope_parameters(text)?,
            head_dim: heads.dim,
            theta: THETA,
            partial: rotated as f64 / heads.dim as f64,
            pairs: Pairs::Halves,
        })?;
        let inner = text.required("intermediate_size", Fields::size)?;
        let experts = experts_count(text, &["num_local_experts", "num_experts"])?;
        Ok(Self {
            heads,
            rope,
            sizes: MixtureSizes {
                experts,
                chosen: chosen_count(text, &["num_experts_per_tok"], experts)?,
                inner,
                shared: 0,
                dense: 0,
            },
            gated: activation(text, "hidden_act", "silu")?,
        })
    }
}

/// What the released files could say and no released model does.
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

impl Architecture for MiniMaxM2Config {
    fn layer(&self, config: &TargetConfig, number: usize, init: &Init) -> Result<Box<dyn Layer>> {
        let module = init.path(&format!("layers.{number}"));
        let hidden = config.hidden_size;
        let norm = |name: &str| init.rms_norm(&format!("{module}.{name}.weight"), hidden, config);
        let attention = format!("{module}.self_attn");
        let sparse = format!("{module}.block_sparse_moe");
        let router = RouterSpec {
            weight: &format!("{sparse}.gate.weight"),
            bias: None,
            correction: Some(&format!("{sparse}.e_score_correction_bias")),
            expert_scale: None,
            experts: self.sizes.experts,
            hidden,
            routing: Routing {
                chosen: self.sizes.chosen,
                scores: Scores::Sigmoid,
                normalised: true,
                scale: 1.0,
                groups: None,
            },
        };
        let experts = ExpertsSpec {
            module: &format!("{sparse}.experts"),
            names: ["w1", "w3", "w2"],
            stored: Stored::OutputsFirst,
            experts: self.sizes.experts,
            hidden,
            inner: self.sizes.inner,
            bias: false,
            gated: self.gated,
            weighed: Weighed::Outputs,
        };
        Ok(Box::new(PreNormLayer {
            input_layernorm: norm("input_layernorm")?,
            self_attn: SelfAttention::new(
                init,
                AttentionSpec {
                    module: &attention,
                    layer: number,
                    hidden,
                    heads: self.heads,
                    reach: Reach::All,
                    rotary: Some(0),
                    norms: HeadNorms::together(init, &attention, self.heads, config)?,
                    bias: (false, false),
                    fused: false,
                    scale: None,
                    softcap: None,
                    sinks: false,
                    temperature: None,
                },
            )?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            mlp: FeedForward::Mixture(Mixture::new(init, &router, &experts, None)?),
        }))
    }

    fn rotaries(&self, device: Device) -> Vec<Rotary> {
        vec![self.rope.rotary(device)]
    }

    fn layer_elements(&self, config: &TargetConfig, _number: usize) -> f64 {
        self.heads.elements(config.hidden_size) + self.sizes.met(config.hidden_size, true)
    }

    fn stored_elements(&self, config: &TargetConfig, _number: usize, shard: &Shard) -> f64 {
        let hidden = config.hidden_size;
        let attention = self.heads.own(shard).elements(hidden);
        attention + self.sizes.stored(hidden, true, shard)
    }

    fn pair_flops(&self, _number: usize) -> f64 {
        self.heads.pair_flops()
    }

    fn reach(&self, _number: usize) -> Reach {
        Reach::All
    }

    fn divided(&self) -> Vec<Divisible> {
        [self.heads.divided(), self.sizes.divided()].concat()
    }

    fn widest(&self, config: &TargetConfig) -> f64 {
        self.heads.widest(config.hidden_size).max(self.sizes.widest(config.hidden_size))
    }
}
