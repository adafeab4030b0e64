//! Qwen3-Next: three of four layers are gated delta networks, the fourth is attention with an
//! output gate and partial rotation; each is followed by a mixture of experts with a shared expert.
//! Norms use 1 + w, except the gated norm of the delta networks.
//!
//! Qwen3.5 (`super::qwen3_5`) shares these layers and differs by choices of [`HybridConfig`].
//! Shapes: `t` tokens, `h` hidden, `g` key heads of a delta network, `n` its value heads, `k` and
//! `v` dimensions of a key and a value.

use dflash_formats::fields::Fields;
use dflash_kernels::kernels::Kernels;
use dflash_tensor::Result;
use dflash_tensor::attention_span::AttentionSpan;
use dflash_tensor::ops::Rotary;
use dflash_tensor::rope::{Rope, RopeKeys};
use tch::{Device, Tensor};

use super::{Architecture, Family, Known, experts_count, layer_types, sparse_by_step};
use crate::blocks::attention::Heads;
use crate::blocks::delta::{DeltaHeads, DeltaRule, gated_norm};
use crate::blocks::experts::{Routing, Scores};
use crate::blocks::feed_forward::{
    FeedForward, FeedForwardSpec, MixtureSizes, MixtureStorage, activation,
};
use crate::blocks::gated_attention::GatedAttention;
use crate::facts::HeadFacts;
use crate::layer::{Layer, Memory, Pass, RmsNorm};
use crate::parallel::{Divisible, Shard};
use crate::parameters::{Init, Linear, LinearSpec, Outputs, Split};
use crate::{Outer, TargetConfig};

pub(super) const KNOWN: &[Known] = &[Known {
    architectures: &["Qwen3NextForCausalLM"],
    model_types: &["qwen3_next"],
    head: HeadFacts::plus_one(),
    read,
}];

fn read(text: &Fields) -> Result<(Family, Outer)> {
    let layers = text.required("num_hidden_layers", Fields::size)? as usize;
    // Transformers' class normalises by default.
    let normalised = text.flag_or("norm_topk_prob", true)?;
    let sparse = sparse_by_step(text, layers)?;
    HybridConfig::read_with(text, sparse, normalised, DeltaInputs::ByKeyHead)
}

/// Dimensions and choices of Qwen3-Next's and Qwen3.5's layers.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct HybridConfig {
    heads: Heads,
    attention_bias: bool,
    rope: Rope,
    delta: DeltaHeads,
    /// Width of the delta networks' convolution.
    conv_width: i64,
    delta_inputs: DeltaInputs,
    /// Per layer.
    mixers: Vec<Mixer>,
    feed_forward: FeedForwardSpec,
    /// Per layer, whether it has experts.
    sparse: Vec<bool>,
}

/// The token mixer of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mixer {
    Attention,
    Delta,
}

/// How a delta network's input projections are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeltaInputs {
    /// `in_proj_qkvz` and `in_proj_ba`, each ordered by key head.
    ByKeyHead,
    /// `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`.
    Apart,
}

/// Default interval of attention layers.
const ATTENTION_INTERVAL: i64 = 4;

/// Default rotated share of a head.
const PARTIAL_ROTARY: f64 = 0.25;

impl HybridConfig {
    /// Reads config.json, given the `sparse` layers and whether experts' shares are normalised.
    pub(super) fn read_with(
        text: &Fields,
        sparse: Vec<bool>,
        normalised: bool,
        delta_inputs: DeltaInputs,
    ) -> Result<(Family, Outer)> {
        let size = |key| text.required(key, Fields::size);
        let heads = Heads::read(text, None)?;
        let delta = DeltaHeads {
            keys: size("linear_num_key_heads")?,
            values: size("linear_num_value_heads")?,
            key_dim: size("linear_key_head_dim")?,
            value_dim: size("linear_value_head_dim")?,
        };
        if delta.values % delta.keys != 0 {
            let expected = "it must be a multiple of linear_num_key_heads";
            return Err(text.refuse("linear_num_value_heads", expected));
        }
        let (any_sparse, any_dense) = (sparse.contains(&true), sparse.contains(&false));
        let of = |any: bool, key| if any { size(key) } else { Ok(0) };
        let sizes = MixtureSizes {
            experts: if any_sparse { experts_count(text, &["num_experts"])? } else { 0 },
            top_k: of(any_sparse, "num_experts_per_tok")?,
            inner: of(any_sparse, "moe_intermediate_size")?,
            shared: of(any_sparse, "shared_expert_intermediate_size")?,
            dense: of(any_dense, "intermediate_size")?,
        };
        let keys = RopeKeys { partial: PARTIAL_ROTARY, ..RopeKeys::of(text, heads.dim)? };
        let config = Self {
            heads,
            attention_bias: text.flag("attention_bias")?,
            rope: Rope::read(keys)?,
            delta,
            conv_width: text.size("linear_conv_kernel_dim")?.unwrap_or(4),
            delta_inputs,
            mixers: mixers(text, sparse.len())?,
            feed_forward: FeedForwardSpec {
                sizes,
                fused: false,
                gated: activation(text, "hidden_act", "silu")?,
                routing: Some(Routing {
                    top_k: sizes.top_k,
                    scores: Scores::Softmax,
                    normalised,
                    scale: 1.0,
                    groups: None,
                }),
                stored: MixtureStorage {
                    shared_gate: Some("shared_expert_gate.weight"),
                    ..MixtureStorage::USUAL
                },
            },
            sparse,
        };
        Ok((config.into(), Outer { norm_plus_one: true, ..Outer::PLAIN }))
    }

    /// Matrix elements of a rank's mixer in layer `number`.
    fn mixer_elements(&self, hidden: i64, number: usize, shard: &Shard) -> f64 {
        match self.mixers[number] {
            Mixer::Attention => {
                let own = self.heads.own(shard);
                own.elements(hidden) + (hidden * own.query_size()) as f64
            }
            Mixer::Delta => {
                let own = self.delta.own(shard);
                let gate_and_output = 2 * own.values * own.value_dim;
                (hidden * (own.inputs() + gate_and_output)) as f64
            }
        }
    }
}

/// From `layer_types`, or else from `full_attention_interval`.
fn mixers(text: &Fields, layers: usize) -> Result<Vec<Mixer>> {
    let named = |name: &str| match name {
        "full_attention" => Some(Mixer::Attention),
        "linear_attention" => Some(Mixer::Delta),
        _ => None,
    };
    if let Some(mixers) = layer_types(text, layers, named)? {
        return Ok(mixers);
    }
    let interval = text.size("full_attention_interval")?.unwrap_or(ATTENTION_INTERVAL);
    let mixer = |layer: usize| match (layer as i64 + 1) % interval {
        0 => Mixer::Attention,
        _ => Mixer::Delta,
    };
    Ok((0..layers).map(mixer).collect())
}

impl Architecture for HybridConfig {
    fn layer(&self, config: &TargetConfig, number: usize, init: &Init) -> Result<Box<dyn Layer>> {
        Ok(Box::new(HybridLayer::new(config, self, number, init)?))
    }

    fn rotaries(&self, device: Device) -> Vec<Rotary> {
        vec![self.rope.rotary(device)]
    }

    fn layer_elements(&self, config: &TargetConfig, number: usize) -> f64 {
        let hidden = config.hidden_size;
        self.mixer_elements(hidden, number, &Shard::WHOLE)
            + self.feed_forward.sizes.active_params(hidden, self.sparse[number])
    }

    fn stored_elements(&self, config: &TargetConfig, number: usize, shard: &Shard) -> f64 {
        let hidden = config.hidden_size;
        self.mixer_elements(hidden, number, shard)
            + self.feed_forward.sizes.stored_params(hidden, self.sparse[number], shard)
    }

    fn pair_flops(&self, number: usize) -> f64 {
        match self.mixers[number] {
            Mixer::Attention => self.heads.pair_flops(),
            // Reading by key, writing, reading by query: one product with the memory each.
            Mixer::Delta => {
                let DeltaHeads { values, key_dim, value_dim, .. } = self.delta;
                6.0 * (values * key_dim * value_dim) as f64
            }
        }
    }

    fn attention_span(&self, number: usize) -> AttentionSpan {
        match self.mixers[number] {
            Mixer::Attention => AttentionSpan::All,
            // A token's cost does not depend on the context length.
            Mixer::Delta => AttentionSpan::Window(1),
        }
    }

    fn parallel_sizes(&self) -> Vec<Divisible> {
        let delta = match self.mixers.contains(&Mixer::Delta) {
            true => self.delta.parallel_sizes(),
            false => Vec::new(),
        };
        [self.heads.parallel_sizes(), delta, self.feed_forward.sizes.parallel_sizes()].concat()
    }

    fn widest(&self, config: &TargetConfig) -> f64 {
        let attention = 5 * self.heads.query_size() + 3 * self.heads.key_size();
        // Inputs, convolved and split by head, in float32.
        let mixer = attention.max(6 * self.delta.inputs());
        let mixer = (2 * config.hidden_size + mixer) as f64;
        mixer.max(self.feed_forward.sizes.widest(config.hidden_size))
    }
}

/// One layer: norm, mixer, norm, MLP, each half added to the residual stream.
#[derive(Debug)]
struct HybridLayer {
    input_norm: RmsNorm,
    mixer: TokenMixer,
    post_attention_norm: RmsNorm,
    mlp: FeedForward,
}

#[derive(Debug)]
enum TokenMixer {
    Attention(GatedAttention),
    Delta(GatedDeltaNet),
}

impl HybridLayer {
    fn new(
        target: &TargetConfig,
        config: &HybridConfig,
        number: usize,
        init: &Init,
    ) -> Result<Self> {
        let module = init.path(&format!("layers.{number}"));
        let within = |part: &str| format!("{module}.{part}");
        let norm = |part: &str| {
            init.rms_norm(&within(&format!("{part}.weight")), target.hidden_size, target)
        };
        let mixer = match config.mixers[number] {
            Mixer::Attention => TokenMixer::Attention(GatedAttention::new(
                target,
                config.heads,
                config.attention_bias,
                number,
                &within("self_attn"),
                init,
            )?),
            Mixer::Delta => TokenMixer::Delta(GatedDeltaNet::new(
                target,
                config,
                number,
                &within("linear_attn"),
                init,
            )?),
        };
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            mixer,
            post_attention_norm: norm("post_attention_layernorm")?,
            mlp: config.feed_forward.read(
                init,
                &within("mlp"),
                target.hidden_size,
                config.sparse[number],
            )?,
        })
    }
}

impl Layer for HybridLayer {
    fn forward(&self, x_th: &Tensor, pass: &mut Pass<'_>) -> Tensor {
        let normed = self.input_norm.of(x_th);
        let x_th = match &self.mixer {
            TokenMixer::Attention(attention) => attention.add_to(x_th, &normed, pass),
            TokenMixer::Delta(delta) => delta.add_to(x_th, &normed, pass),
        };
        let normed = self.post_attention_norm.of(&x_th);
        self.mlp.add_onto(x_th, &normed)
    }

    fn memory(&self) -> Memory {
        match &self.mixer {
            TokenMixer::Attention(attention) => attention.memory(),
            TokenMixer::Delta(_) => Memory::State,
        }
    }

    fn set_kernels(&mut self, kernels: Kernels) {
        self.input_norm.kernels = kernels;
        self.post_attention_norm.kernels = kernels;
        self.mlp.set_kernels(kernels);
        if let TokenMixer::Attention(attention) = &mut self.mixer {
            attention.set_kernels(kernels);
        }
    }
}

/// A gated delta network: queries, keys and values pass a short convolution and the delta rule,
/// whose outputs are normalised per head and gated. A tensor-parallel rank has some of the key
/// heads and the value heads that read them.
#[derive(Debug)]
struct GatedDeltaNet {
    layer: usize,
    /// This rank's heads.
    heads: DeltaHeads,
    inputs: InputProjections,
    rule: DeltaRule,
    /// Weight of the gated norm `[V]`, and its epsilon.
    norm_v: Tensor,
    eps: f64,
    output: Linear,
}

#[derive(Debug)]
enum InputProjections {
    ByKeyHead { qkvz: Linear, ba: Linear },
    Apart(Linear),
}

impl GatedDeltaNet {
    fn new(
        target: &TargetConfig,
        config: &HybridConfig,
        layer: usize,
        module: &str,
        init: &Init,
    ) -> Result<Self> {
        let (heads, hidden) = (config.delta, target.hidden_size);
        let [queries, keys, values] = heads.channel_parts();
        let linear = |name, parts: &[(&str, i64)], input, split| {
            let parts: Vec<_> =
                parts.iter().map(|&(name, size)| (name, Outputs::Even(size))).collect();
            let parts = &parts;
            init.linear(&LinearSpec { module, name, parts, input, bias: false, split })
        };
        let from_hidden = |name, parts: &[(&str, i64)]| linear(name, parts, hidden, Split::Outputs);
        let inputs = match config.delta_inputs {
            // Stored by key head, each together with the value heads that read it.
            DeltaInputs::ByKeyHead => InputProjections::ByKeyHead {
                qkvz: from_hidden(
                    "in_proj_qkvz",
                    &[("in_proj_qkvz", queries + keys + 2 * values)],
                )?,
                ba: from_hidden("in_proj_ba", &[("in_proj_ba", 2 * heads.values)])?,
            },
            DeltaInputs::Apart => {
                let parts = [
                    ("in_proj_qkv", queries),
                    ("in_proj_qkv", keys),
                    ("in_proj_qkv", values),
                    ("in_proj_b", heads.values),
                    ("in_proj_a", heads.values),
                    ("in_proj_z", values),
                ];
                InputProjections::Apart(from_hidden("in_proj", &parts)?)
            }
        };
        let own = |name: &str, parts: &[i64], rest: &[i64]| -> Result<Tensor> {
            let shape = [&[parts.iter().sum()], rest].concat();
            let whole = init.float32(&format!("{module}.{name}"), &shape)?;
            Ok(init.shard.own_rows(&whole, parts))
        };
        let conv = own("conv1d.weight", &heads.channel_parts(), &[1, config.conv_width])?;
        let a_log = own("A_log", &[heads.values], &[])?;
        let dt_bias = own("dt_bias", &[heads.values], &[])?;
        let own_heads = heads.own(&init.shard);
        Ok(Self {
            layer,
            heads: own_heads,
            inputs,
            rule: DeltaRule::new(own_heads, &conv, &a_log, &dt_bias),
            norm_v: init.norm(&format!("{module}.norm.weight"), heads.value_dim)?,
            eps: target.rms_norm_eps,
            output: linear("out_proj", &[("out_proj", hidden)], values, Split::Inputs)?,
        })
    }

    /// `residual_th` plus the output for `x_th`.
    fn add_to(&self, residual_th: &Tensor, x_th: &Tensor, pass: &mut Pass<'_>) -> Tensor {
        let (inputs, z) = self.inputs.apply(self.heads, x_th);
        let by_head = |x: &Tensor| x.unflatten(1, [self.heads.values, self.heads.value_dim]);
        let out = by_head(&pass.attend.scan(self.layer, &self.rule, &inputs));
        let gated = gated_norm(&out, &by_head(&z), &self.norm_v, self.eps);
        self.output.add_to(residual_th, &gated.flatten(1, 2))
    }
}

impl InputProjections {
    /// The rule's inputs [T, ..] and the gate [T, N*V].
    fn apply(&self, heads: DeltaHeads, x_th: &Tensor) -> (Tensor, Tensor) {
        let values = heads.values * heads.value_dim;
        let (qkvz, ba) = match self {
            Self::Apart(all) => {
                let all = all.apply(x_th);
                let inputs = heads.inputs();
                return (all.narrow(1, 0, inputs), all.narrow(1, inputs, values));
            }
            Self::ByKeyHead { qkvz, ba } => (qkvz.apply(x_th), ba.apply(x_th)),
        };
        let (of_key, key_dim) = (heads.values / heads.keys, heads.key_dim);
        let by_key_head = |x: &Tensor, sizes: &[i64]| {
            let parts = x.unflatten(1, [heads.keys, -1]).split_with_sizes(sizes, 2);
            parts.iter().map(|part| part.flatten(1, 2)).collect::<Vec<_>>()
        };
        let value_dim = of_key * heads.value_dim;
        let qkvz = by_key_head(&qkvz, &[key_dim, key_dim, value_dim, value_dim]);
        let ba = by_key_head(&ba, &[of_key, of_key]);
        let inputs = [&qkvz[0], &qkvz[1], &qkvz[2], &ba[0], &ba[1]];
        (Tensor::cat(&inputs, 1), qkvz[3].shallow_clone())
    }
}
