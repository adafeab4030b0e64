//! Qwen3 with experts (Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder): Qwen3's attention, and softmax
//! routing to a few of many small experts.

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
use crate::target::blocks::feed_forward::{FeedForward, Mixture, Mlp, MlpSpec, activation};
use crate::target::blocks::pre_norm::PreNormLayer;
use crate::target::blocks::rope::{Rope, RopeKeys, rope_parameters};
use crate::target::divided::{Divisible, Shard};
use crate::target::layer::{Layer, Reach};
use crate::target::parameters::Init;

/// Its dimensions and choices.
#[derive(Debug, Clone, PartialEq)]
pub struct Qwen3MoeConfig {
    heads: Heads,
    attention_bias: bool,
    rope: Rope,
    /// Of every layer.
    reach: Reach,
    sizes: MixtureSizes,
    norm_topk_prob: bool,
    gated: Gated,
    /// By layer: whether it has experts.
    sparse: Vec<bool>,
}

impl Qwen3MoeConfig {
    pub(crate) fn read(text: &Fields) -> Result<Self> {
        let layers = text.required("num_hidden_layers", Fields::size)? as usize;
        let heads = Heads::read(text, None)?;
        let rope = Rope::read(RopeKeys {
            text,
            parameters: rope_parameters(text)?,
            head_dim: heads.dim,
            theta: 10_000.0,
            partial: 1.0,
            pairs: Pairs::Halves,
        })?;
        let dense = text.tokens("mlp_only_layers")?;
        let step = text.size("decoder_sparse_step")?.unwrap_or(1) as usize;
        let is_sparse =
            |layer: usize| !dense.contains(&(layer as i64)) && (layer + 1).is_multiple_of(step);
        let experts = experts_count(text, &["num_experts", "num_local_experts"])?;
        let used = text.flag("use_sliding_window")?;
        Ok(Self {
            heads,
            attention_bias: text.flag("attention_bias")?,
            rope,
            reach: text.size("sliding_window")?.filter(|_| used).into(),
            sizes: MixtureSizes {
                experts,
                chosen: chosen_count(text, &["num_experts_per_tok"], experts)?,
                inner: text.required("moe_intermediate_size", Fields::size)?,
                shared: 0,
                dense: text.required("intermediate_size", Fields::size)?,
            },
            norm_topk_prob: text.flag("norm_topk_prob")?,
            gated: activation(text, "hidden_act", "silu")?,
            sparse: (0..layers).map(is_sparse).collect(),
        })
    }

    fn feed_forward(
        &self,
        config: &TargetConfig,
        module: &str,
        number: usize,
        init: &Init,
    ) -> Result<FeedForward> {
        let (hidden, gated) = (config.hidden_size, self.gated);
        if !self.sparse[number] {
            let inner = self.sizes.dense;
            let mlp = Mlp::new(init, &MlpSpec { module, hidden, inner, fused: false, gated })?;
            return Ok(FeedForward::Dense(mlp));
        }
        let router = RouterSpec {
            weight: &format!("{module}.gate.weight"),
            bias: None,
            correction: None,
            expert_scale: None,
            experts: self.sizes.experts,
            hidden,
            routing: Routing {
                chosen: self.sizes.chosen,
                scores: Scores::Softmax,
                normalised: self.norm_topk_prob,
                scale: 1.0,
                groups: None,
            },
        };
        let experts = ExpertsSpec {
            module: &format!("{module}.experts"),
            names: ["gate_proj", "up_proj", "down_proj"],
            stored: Stored::OutputsFirst,
            experts: self.sizes.experts,
            hidden,
            inner: self.sizes.inner,
            bias: false,
            gated,
            weighed: Weighed::Outputs,
        };
        Ok(FeedForward::Mixture(Mixture::new(init, &router, &experts, None)?))
    }
}

impl Architecture for Qwen3MoeConfig {
    fn layer(&self, config: &TargetConfig, number: usize, init: &Init) -> Result<Box<dyn Layer>> {
        let module = init.path(&format!("layers.{number}"));
        let hidden = config.hidden_size;
        let norm = |name: &str| init.rms_norm(&format!("{module}.{name}.weight"), hidden, config);
        let attention = format!("{module}.self_attn");
        Ok(Box::new(PreNormLayer {
            input_layernorm: norm("input_layernorm")?,
            self_attn: SelfAttention::new(
                init,
                AttentionSpec {
                    module: &attention,
                    layer: number,
                    hidden,
                    heads: self.heads,
                    reach: self.reach,
                    rotary: Some(0),
                    norms: HeadNorms::each(init, &attention, self.heads.dim, config)?,
                    bias: (self.attention_bias, self.attention_bias),
                    fused: false,
                    scale: None,
                    softcap: None,
                    sinks: false,
                    temperature: None,
                },
            )?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            mlp: self.feed_forward(config, &format!("{module}.mlp"), number, init)?,
        }))
    }

    fn rotaries(&self, device: Device) -> Vec<Rotary> {
        vec![self.rope.rotary(device)]
    }

    fn layer_elements(&self, config: &TargetConfig, number: usize) -> f64 {
        let hidden = config.hidden_size;
        self.heads.elements(hidden) + self.sizes.met(hidden, self.sparse[number])
    }

    fn stored_elements(&self, config: &TargetConfig, number: usize, shard: &Shard) -> f64 {
        let hidden = config.hidden_size;
        let attention = self.heads.own(shard).elements(hidden);
        attention + self.sizes.stored(hidden, self.sparse[number], shard)
    }

    fn pair_flops(&self, _number: usize) -> f64 {
        self.heads.pair_flops()
    }

    fn reach(&self, _number: usize) -> Reach {
        self.reach
    }

    fn divided(&self) -> Vec<Divisible> {
        [self.heads.divided(), self.sizes.divided()].concat()
    }

    fn widest(&self, config: &TargetConfig) -> f64 {
        self.heads.widest(config.hidden_size).max(self.sizes.widest(config.hidden_size))
    }
}
