//! Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: fused projections, LongRoPE, in Phi-4-mini over three quarters
//! of a head.

use tch::Device;

use super::Architecture;
use crate::Result;
use crate::fields::Fields;
use crate::ops::{Pairs, Rotary};
use crate::target::TargetConfig;
use crate::target::blocks::attention::{AttentionSpec, HeadNorms, Heads, SelfAttention};
use crate::target::blocks::experts::Gated;
use crate::target::blocks::feed_forward::{FeedForward, Mlp, MlpSpec, activation, mlp_elements};
use crate::target::blocks::pre_norm::PreNormLayer;
use crate::target::blocks::rope::{Rope, RopeKeys, rope_parameters};
use crate::target::divided::{Divisible, Shard};
use crate::target::layer::{Layer, Reach};
use crate::target::parameters::Init;

/// Its dimensions and choices.
#[derive(Debug, Clone, PartialEq)]
pub struct Phi3Config {
    heads: Heads,
    intermediate_size: i64,
    gated: Gated,
    rope: Rope,
    /// Of every layer.
    reach: Reach,
}

impl Phi3Config {
    pub(crate) fn read(text: &Fields) -> Result<Self> {
        let heads = Heads::read(text, None)?;
        let mut parameters = rope_parameters(text)?;
        if let Some(parameters) = &mut parameters {
            // Phi-3's first releases call it so.
            parameters.rename("yarn", "longrope");
        }
        let rope = Rope::read(RopeKeys {
            text,
            parameters,
            head_dim: heads.dim,
            theta: 10_000.0,
            partial: 1.0,
            pairs: Pairs::Halves,
        })?;
        Ok(Self {
            heads,
            intermediate_size: text.required("intermediate_size", Fields::size)?,
            gated: activation(text, "hidden_act", "silu")?,
            rope,
            reach: text.size("sliding_window")?.into(),
        })
    }
}

impl Architecture for Phi3Config {
    fn layer(&self, config: &TargetConfig, number: usize, init: &Init) -> Result<Box<dyn Layer>> {
        let module = init.path(&format!("layers.{number}"));
        let hidden = config.hidden_size;
        let norm = |name: &str| init.rms_norm(&format!("{module}.{name}.weight"), hidden, config);
        Ok(Box::new(PreNormLayer {
            input_layernorm: norm("input_layernorm")?,
            self_attn: SelfAttention::new(
                init,
                AttentionSpec {
                    module: &format!("{module}.self_attn"),
                    layer: number,
                    hidden,
                    heads: self.heads,
                    reach: self.reach,
                    rotary: Some(0),
                    norms: HeadNorms::None,
                    bias: (false, false),
                    fused: true,
                    scale: None,
                    softcap: None,
                    sinks: false,
                    temperature: None,
                },
            )?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            mlp: FeedForward::Dense(Mlp::new(
                init,
                &MlpSpec {
                    module: &format!("{module}.mlp"),
                    hidden,
                    inner: self.intermediate_size,
                    fused: true,
                    gated: self.gated,
                },
            )?),
        }))
    }

    fn rotaries(&self, device: Device) -> Vec<Rotary> {
        vec![self.rope.rotary(device)]
    }

    fn layer_elements(&self, config: &TargetConfig, _number: usize) -> f64 {
        let hidden = config.hidden_size;
        self.heads.elements(hidden) + mlp_elements(hidden, self.intermediate_size)
    }

    fn stored_elements(&self, config: &TargetConfig, _number: usize, shard: &Shard) -> f64 {
        let (hidden, inner) = (config.hidden_size, shard.share(self.intermediate_size));
        self.heads.own(shard).elements(hidden) + mlp_elements(hidden, inner)
    }

    fn pair_flops(&self, _number: usize) -> f64 {
        self.heads.pair_flops()
    }

    fn reach(&self, _number: usize) -> Reach {
        self.reach
    }

    fn divided(&self) -> Vec<Divisible> {
        let inner = Divisible::new("intermediate_size", self.intermediate_size);
        [self.heads.divided(), vec![inner]].concat()
    }

    fn widest(&self, config: &TargetConfig) -> f64 {
        let (hidden, inner) = (config.hidden_size, self.intermediate_size);
        self.heads.widest(hidden).max((4 * hidden + 3 * inner) as f64)
    }
}
