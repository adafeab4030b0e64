//! gpt-oss: biases everywhere, a sink for each head, a window in every other layer, YaRN, and experts of
//! a clamped SwiGLU with gate and up by turns, in MXFP4 as released.

use tch::Device;

use super::{Architecture, MixtureSizes, chosen_count, experts_count, layer_types};
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
use crate::target::blocks::rope::{Rope, RopeKeys, Scaling, Yarn, rope_parameters, yarn_mscale};
use crate::target::divided::{Divisible, Shard};
use crate::target::layer::{Layer, Reach};
use crate::target::parameters::Init;

/// Its dimensions and choices.
#[derive(Debug, Clone, PartialEq)]
pub struct GptOssConfig {
    heads: Heads,
    attention_bias: bool,
    rope: Rope,
    reaches: Vec<Reach>,
    sizes: MixtureSizes,
    swiglu_limit: f64,
}

/// What its class fills in.
const HEADS: Heads = Heads { query: 64, key: 8, dim: 64 };
const THETA: f64 = 150_000.0;
const WINDOW: i64 = 128;
const LIMIT: f64 = 7.0;
/// The sigmoid's slope, which no key says.
const ALPHA: f64 = 1.702;

impl GptOssConfig {
    pub(crate) fn read(text: &Fields) -> Result<Self> {
        let layers = text.required("num_hidden_layers", Fields::size)? as usize;
        let heads = Heads::read(text, Some(HEADS))?;
        let _ = activation(text, "hidden_act", "silu")?;
        let window = text.size("sliding_window")?.unwrap_or(WINDOW);
        let reach = |kind: &str| match kind {
            "sliding_attention" => Some(Reach::Window(window)),
            "full_attention" => Some(Reach::All),
            _ => None,
        };
        let by_turns =
            |layer: usize| if layer.is_multiple_of(2) { Reach::Window(window) } else { Reach::All };
        let inner = text.required("intermediate_size", Fields::size)?;
        let experts = experts_count(text, &["num_local_experts", "num_experts"])?;
        let chosen = ["num_experts_per_tok", "experts_per_token"];
        Ok(Self {
            heads,
            attention_bias: text.value("attention_bias").is_none()
                || text.flag("attention_bias")?,
            rope: rope(text, heads.dim)?,
            reaches: layer_types(text, layers, reach)?
                .unwrap_or_else(|| (0..layers).map(by_turns).collect()),
            sizes: MixtureSizes {
                experts,
                chosen: chosen_count(text, &chosen, experts)?,
                inner,
                shared: 0,
                dense: 0,
            },
            swiglu_limit: text.number("swiglu_limit")?.unwrap_or(LIMIT),
        })
    }
}

fn rope(text: &Fields, head_dim: i64) -> Result<Rope> {
    let parameters = rope_parameters(text)?;
    let is_written = parameters.is_some();
    let pairs = Pairs::Halves;
    let rope =
        Rope::read(RopeKeys { text, parameters, head_dim, theta: THETA, partial: 1.0, pairs })?;
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

impl Architecture for GptOssConfig {
    fn layer(&self, config: &TargetConfig, number: usize, init: &Init) -> Result<Box<dyn Layer>> {
        let module = init.path(&format!("layers.{number}"));
        let hidden = config.hidden_size;
        let norm = |name: &str| init.rms_norm(&format!("{module}.{name}.weight"), hidden, config);
        let router = RouterSpec {
            weight: &format!("{module}.mlp.router.weight"),
            bias: Some(&format!("{module}.mlp.router.bias")),
            correction: None,
            expert_scale: None,
            experts: self.sizes.experts,
            hidden,
            routing: Routing {
                chosen: self.sizes.chosen,
                scores: Scores::SoftmaxOfChosen,
                normalised: false,
                scale: 1.0,
                groups: None,
            },
        };
        let experts = ExpertsSpec {
            module: &format!("{module}.mlp.experts"),
            names: ["gate_proj", "up_proj", "down_proj"],
            stored: Stored::Interleaved,
            experts: self.sizes.experts,
            hidden,
            inner: self.sizes.inner,
            bias: true,
            gated: Gated::Clamped { alpha: ALPHA, limit: self.swiglu_limit },
            weighed: Weighed::Outputs,
        };
        Ok(Box::new(PreNormLayer {
            input_layernorm: norm("input_layernorm")?,
            self_attn: SelfAttention::new(
                init,
                AttentionSpec {
                    module: &format!("{module}.self_attn"),
                    layer: number,
                    hidden,
                    heads: self.heads,
                    reach: self.reaches[number],
                    rotary: Some(0),
                    norms: HeadNorms::None,
                    bias: (self.attention_bias, self.attention_bias),
                    fused: false,
                    scale: None,
                    softcap: None,
                    sinks: true,
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

    fn reach(&self, number: usize) -> Reach {
        self.reaches[number]
    }

    fn divided(&self) -> Vec<Divisible> {
        [self.heads.divided(), self.sizes.divided()].concat()
    }

    fn widest(&self, config: &TargetConfig) -> f64 {
        self.heads.widest(config.hidden_size).max(self.sizes.widest(config.hidden_size))
    }
}
