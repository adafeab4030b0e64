//! GLM 4.5, 4.6 and 4.7: half of each head rotated, dense first layers, then sigmoid routing in groups
//! with a correction, beside a shared expert.

use tch::Device;

use super::{Architecture, MixtureSizes, chosen_count, experts_count};
use crate::Result;
use crate::fields::Fields;
use crate::ops::{Pairs, Rotary};
use crate::target::TargetConfig;
use crate::target::blocks::attention::{AttentionSpec, HeadNorms, Heads, SelfAttention};
use crate::target::blocks::experts::{
    ExpertGroups, ExpertsSpec, Gated, RouterSpec, Routing, Scores, Stored, Weighed,
};
use crate::target::blocks::feed_forward::{
    FeedForward, Mixture, Mlp, MlpSpec, SharedExpert, activation,
};
use crate::target::blocks::pre_norm::PreNormLayer;
use crate::target::blocks::rope::{Rope, RopeKeys, rope_parameters};
use crate::target::divided::{Divisible, Shard};
use crate::target::layer::{Layer, Reach};
use crate::target::parameters::Init;

/// Its dimensions and choices.
#[derive(Debug, Clone, PartialEq)]
pub struct Glm4MoeConfig {
    heads: Heads,
    attention_bias: bool,
    use_qk_norm: bool,
    rope: Rope,
    sizes: MixtureSizes,
    routing: Routing,
    gated: Gated,
    first_k_dense_replace: usize,
}

impl Glm4MoeConfig {
    pub(crate) fn read(text: &Fields) -> Result<Self> {
        let heads = Heads::read(text, None)?;
        let rope = Rope::read(RopeKeys {
            text,
            parameters: rope_parameters(text)?,
            head_dim: heads.dim,
            theta: 10_000.0,
            partial: 0.5,
            pairs: Pairs::Halves,
        })?;
        let inner = text.required("moe_intermediate_size", Fields::size)?;
        let counts = ["n_routed_experts", "num_local_experts", "num_experts"];
        let experts = experts_count(text, &counts)?;
        let sizes = MixtureSizes {
            experts,
            chosen: chosen_count(text, &["num_experts_per_tok"], experts)?,
            inner,
            shared: inner * text.size("n_shared_experts")?.unwrap_or(1),
            dense: text.required("intermediate_size", Fields::size)?,
        };
        let normalised = text.value("norm_topk_prob").is_none() || text.flag("norm_topk_prob")?;
        Ok(Self {
            heads,
            attention_bias: text.flag("attention_bias")?,
            use_qk_norm: text.flag("use_qk_norm")?,
            rope,
            sizes,
            routing: Routing {
                chosen: sizes.chosen,
                scores: Scores::Sigmoid,
                normalised,
                scale: text.number("routed_scaling_factor")?.unwrap_or(1.0),
                groups: ExpertGroups::read(text, sizes.experts)?,
            },
            gated: activation(text, "hidden_act", "silu")?,
            first_k_dense_replace: text.token("first_k_dense_replace")?.unwrap_or(1) as usize,
        })
    }

    fn is_sparse(&self, layer: usize) -> bool {
        layer >= self.first_k_dense_replace
    }

    fn feed_forward(
        &self,
        config: &TargetConfig,
        module: &str,
        number: usize,
        init: &Init,
    ) -> Result<FeedForward> {
        let (hidden, gated) = (config.hidden_size, self.gated);
        let mlp = |module: &str, inner| {
            Mlp::new(init, &MlpSpec { module, hidden, inner, fused: false, gated })
        };
        if !self.is_sparse(number) {
            return Ok(FeedForward::Dense(mlp(module, self.sizes.dense)?));
        }
        let router = RouterSpec {
            weight: &format!("{module}.gate.weight"),
            bias: None,
            correction: Some(&format!("{module}.gate.e_score_correction_bias")),
            expert_scale: None,
            experts: self.sizes.experts,
            hidden,
            routing: self.routing,
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
        let shared = mlp(&format!("{module}.shared_experts"), self.sizes.shared)?;
        let shared = SharedExpert { mlp: shared, gate_1h: None };
        Ok(FeedForward::Mixture(Mixture::new(init, &router, &experts, Some(shared))?))
    }
}

impl Architecture for Glm4MoeConfig {
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
                    reach: Reach::All,
                    rotary: Some(0),
                    norms: match self.use_qk_norm {
                        true => HeadNorms::each(init, &attention, self.heads.dim, config)?,
                        false => HeadNorms::None,
                    },
                    bias: (self.attention_bias, false),
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
        self.heads.elements(hidden) + self.sizes.met(hidden, self.is_sparse(number))
    }

    fn stored_elements(&self, config: &TargetConfig, number: usize, shard: &Shard) -> f64 {
        let hidden = config.hidden_size;
        let attention = self.heads.own(shard).elements(hidden);
        attention + self.sizes.stored(hidden, self.is_sparse(number), shard)
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
