//! Gemma 2 and 3: norms with weight 1 + w before and after each half of a layer, scaled embeddings,
//! sliding windows in most layers.
//!
//! Gemma 2 soft-caps its scores. Gemma 3 instead normalises heads, and has a separate rotary base
//! per layer type; its config.json has a key for the cap, which Transformers and vLLM ignore.

use dflash_formats::fields::Fields;
use dflash_kernels::kernels::Kernels;
use dflash_tensor::Result;
use dflash_tensor::attention_span::AttentionSpan;
use dflash_tensor::ops::Rotary;
use dflash_tensor::rope::{Rope, RopeKeys};
use tch::{Device, Tensor};

use super::{Architecture, Family, Known, layer_types};
use crate::TargetConfig;
use crate::blocks::attention::{AttentionSpec, HeadNorms, Heads, SelfAttention};
use crate::blocks::experts::Gated;
use crate::blocks::feed_forward::{Mlp, MlpSpec, activation, mlp_elements};
use crate::config::Outer;
use crate::facts::{HeadFacts, NormKind};
use crate::layer::{Layer, Memory, Pass, RmsNorm};
use crate::parallel::{Divisible, Shard};
use crate::parameters::Init;

pub(super) const KNOWN: &[Known] = &[
    Known {
        architectures: &["Gemma2ForCausalLM"],
        model_types: &["gemma2"],
        head: HeadFacts::gemma(NormKind::RmsPlusOne, Some(30.0)),
        read: Gemma3Config::read_second,
    },
    Known {
        architectures: &["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
        model_types: &["gemma3_text", "gemma3"],
        head: HeadFacts::gemma(NormKind::RmsPlusOne, None),
        read: Gemma3Config::read,
    },
];

/// Its dimensions and choices.
#[derive(Debug, Clone, PartialEq)]
struct Gemma3Config {
    heads: Heads,
    intermediate_size: i64,
    gated: Gated,
    attention_bias: bool,
    /// Scores are divided by its square root.
    query_pre_attn_scalar: f64,
    attn_logit_softcapping: Option<f64>,
    /// Whether query and key heads are normalised.
    qk_norm: bool,
    /// For full and for sliding layers.
    ropes: [Rope; 2],
    attention_spans: Vec<AttentionSpan>,
}

/// Differences between Gemma 2 and 3.
struct Version {
    ropes: [Rope; 2],
    /// Interval of full layers, if config.json does not list them.
    pattern: i64,
    /// Soft caps of scores and of final logits.
    caps: [Option<f64>; 2],
    qk_norm: bool,
}

/// Class defaults: released configs omit values that equal the 4B model's.
const HEADS: Heads = Heads { query: 8, key: 4, dim: 256 };
const VOCAB_SIZE: i64 = 262_208;
const WINDOW: i64 = 4096;
const BASES: [f64; 2] = [1_000_000.0, 10_000.0];

impl Gemma3Config {
    /// Reads a Gemma 3 config.json.
    fn read(text: &Fields) -> Result<(Family, Outer)> {
        let head_dim = Heads::read(text, Some(HEADS))?.dim;
        let version =
            Version { ropes: ropes(text, head_dim)?, pattern: 6, caps: [None; 2], qk_norm: true };
        Self::of(text, version)
    }

    /// Reads a Gemma 2 config.json.
    fn read_second(text: &Fields) -> Result<(Family, Outer)> {
        let head_dim = Heads::read(text, Some(HEADS))?.dim;
        let rope = Rope::read(RopeKeys { theta: BASES[1], ..RopeKeys::of(text, head_dim)? })?;
        let cap = |key, released| if text.has(key) { text.number(key) } else { Ok(Some(released)) };
        let caps = [cap("attn_logit_softcapping", 50.0)?, cap("final_logit_softcapping", 30.0)?];
        let ropes = [rope.clone(), rope];
        Self::of(text, Version { ropes, pattern: 2, caps, qk_norm: false })
    }

    fn of(text: &Fields, version: Version) -> Result<(Family, Outer)> {
        let Version { ropes, pattern: released, caps: [cap, final_cap], qk_norm } = version;
        let layers = text.required("num_hidden_layers", Fields::size)? as usize;
        if text.flag("use_bidirectional_attention")? {
            return Err(text.refuse("use_bidirectional_attention", "only false is supported"));
        }
        let window = text.size("sliding_window")?.unwrap_or(WINDOW);
        let attention_span = |kind: &str| match kind {
            "sliding_attention" => Some(AttentionSpan::Window(window)),
            "full_attention" => Some(AttentionSpan::All),
            _ => None,
        };
        let pattern =
            text.size("sliding_window_pattern")?.or(text.size("_sliding_window_pattern")?);
        let pattern = pattern.unwrap_or(released) as usize;
        let by_pattern = |layer: usize| match (layer + 1) % pattern {
            0 => AttentionSpan::All,
            _ => AttentionSpan::Window(window),
        };
        let heads = Heads::read(text, Some(HEADS))?;
        let config = Self {
            heads,
            intermediate_size: text.required("intermediate_size", Fields::size)?,
            gated: activation(text, "hidden_activation", "gelu_pytorch_tanh")?,
            attention_bias: text.flag("attention_bias")?,
            query_pre_attn_scalar: text.number("query_pre_attn_scalar")?.unwrap_or(256.0),
            attn_logit_softcapping: cap,
            qk_norm,
            ropes,
            attention_spans: layer_types(text, layers, attention_span)?
                .unwrap_or_else(|| (0..layers).map(by_pattern).collect()),
        };
        let hidden = text.required("hidden_size", Fields::size)?;
        let outer = Outer {
            embedding_scale: (hidden as f64).sqrt(),
            norm_plus_one: true,
            final_softcap: text.number("final_logit_softcapping")?.or(final_cap),
        };
        Ok((config.into(), outer))
    }

    fn is_sliding(&self, layer: usize) -> bool {
        self.attention_spans[layer] != AttentionSpan::All
    }
}

/// For full and sliding layers: `rope_parameters` by layer type, or, in configs before 2026,
/// `rope_theta` and `rope_scaling` for full layers and `rope_local_base_freq` for sliding ones.
fn ropes(text: &Fields, head_dim: i64) -> Result<[Rope; 2]> {
    let new = text.object("rope_parameters")?;
    let of_kind = |kind: &str| new.as_ref().map_or(Ok(None), |new| new.object(kind));
    let by_kind = new.as_ref().is_some_and(|new| new.has("full_attention"));
    let full = match by_kind {
        true => of_kind("full_attention")?,
        false => text.object("rope_scaling")?.or(text.object("rope_parameters")?),
    };
    let read = |parameters, theta| {
        Rope::read(RopeKeys { parameters, theta, ..RopeKeys::of(text, head_dim)? })
    };
    let full = read(full, BASES[0])?;
    let local = text.number("rope_local_base_freq")?.unwrap_or(BASES[1]);
    let sliding = match of_kind("sliding_attention")? {
        Some(parameters) => {
            let theta = parameters.number("rope_theta")?.unwrap_or(local);
            Rope { theta, ..read(Some(parameters), local)? }
        }
        None => Rope::plain(local, head_dim),
    };
    Ok([full, sliding])
}

impl Architecture for Gemma3Config {
    fn layer(&self, config: &TargetConfig, number: usize, init: &Init) -> Result<Box<dyn Layer>> {
        let module = init.path(&format!("layers.{number}"));
        let hidden = config.hidden_size;
        let norm = |name: &str| init.rms_norm(&format!("{module}.{name}.weight"), hidden, config);
        let attention = format!("{module}.self_attn");
        Ok(Box::new(Gemma3Layer {
            input_layernorm: norm("input_layernorm")?,
            self_attn: SelfAttention::new(
                init,
                AttentionSpec {
                    module: &attention,
                    layer: number,
                    hidden,
                    heads: self.heads,
                    attention_span: self.attention_spans[number],
                    rotary: Some(usize::from(self.is_sliding(number))),
                    norms: match self.qk_norm {
                        true => HeadNorms::each(init, &attention, self.heads.dim, config)?,
                        false => HeadNorms::None,
                    },
                    bias: (self.attention_bias, self.attention_bias),
                    fused: false,
                    scale: Some(self.query_pre_attn_scalar.powf(-0.5)),
                    softcap: self.attn_logit_softcapping,
                    sinks: false,
                    temperature: None,
                },
            )?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            pre_feedforward_layernorm: norm("pre_feedforward_layernorm")?,
            mlp: Mlp::new(
                init,
                &MlpSpec {
                    module: &format!("{module}.mlp"),
                    hidden,
                    inner: self.intermediate_size,
                    fused: false,
                    gated: self.gated,
                },
            )?,
            post_feedforward_layernorm: norm("post_feedforward_layernorm")?,
        }))
    }

    fn rotaries(&self, device: Device) -> Vec<Rotary> {
        self.ropes.iter().map(|rope| rope.rotary(device)).collect()
    }

    fn stored_elements(&self, config: &TargetConfig, _number: usize, shard: &Shard) -> f64 {
        let (hidden, inner) = (config.hidden_size, shard.share(self.intermediate_size));
        self.heads.own(shard).elements(hidden) + mlp_elements(hidden, inner)
    }

    fn pair_flops(&self, _number: usize) -> f64 {
        self.heads.pair_flops()
    }

    fn attention_span(&self, number: usize) -> AttentionSpan {
        self.attention_spans[number]
    }

    fn parallel_sizes(&self) -> Vec<Divisible> {
        let inner = Divisible::new("intermediate_size", self.intermediate_size);
        [self.heads.parallel_sizes(), vec![inner]].concat()
    }

    fn widest(&self, config: &TargetConfig) -> f64 {
        let (hidden, inner) = (config.hidden_size, self.intermediate_size);
        self.heads.widest(hidden).max((4 * hidden + 3 * inner) as f64)
    }

    fn vocab_size(&self) -> Option<i64> {
        Some(VOCAB_SIZE)
    }

    // Released configs omit class defaults.
    fn is_tied(&self) -> bool {
        true
    }
}

/// Field names are the checkpoint's.
#[derive(Debug)]
struct Gemma3Layer {
    input_layernorm: RmsNorm,
    self_attn: SelfAttention,
    post_attention_layernorm: RmsNorm,
    pre_feedforward_layernorm: RmsNorm,
    mlp: Mlp,
    post_feedforward_layernorm: RmsNorm,
}

impl Layer for Gemma3Layer {
    fn forward(&self, x_th: &Tensor, pass: &mut Pass<'_>) -> Tensor {
        let attended = self.self_attn.forward(&self.input_layernorm.of(x_th), pass);
        let x_th = x_th + self.post_attention_layernorm.of(&attended);
        let made = self.mlp.forward(&self.pre_feedforward_layernorm.of(&x_th));
        x_th + self.post_feedforward_layernorm.of(&made)
    }

    fn memory(&self) -> Memory {
        self.self_attn.memory()
    }

    fn set_kernels(&mut self, kernels: Kernels) {
        for norm in [
            &mut self.input_layernorm,
            &mut self.post_attention_layernorm,
            &mut self.pre_feedforward_layernorm,
            &mut self.post_feedforward_layernorm,
        ] {
            norm.kernels = kernels;
        }
        self.self_attn.set_kernels(kernels);
        self.mlp.set_kernels(kernels);
    }
}
