//! Llama 2 and 3, Mistral, Qwen2, Qwen3: norm, attention, norm, SwiGLU, with residuals.
//!
//! Differences (biases, head norms, windows, RoPE scaling) are choices in [`DenseConfig`]; the
//! layer reads those and never the family's name. Shapes: `t` tokens, `h` hidden, `n` query heads,
//! `m` key and value heads, `d` head dimension, `o` any output.

use dflash_formats::fields::Fields;
use dflash_kernels::decode::{LayerWeights, Layout};
use dflash_kernels::kernels::{self, Kernels, RmsWeight};
use dflash_tensor::Result;
use dflash_tensor::attention_span::{AttentionPlace, AttentionSpan};
use dflash_tensor::fused::{self, Norm};
use dflash_tensor::ops::{Rotary, Scores, rms_norm};
use dflash_tensor::rope::{Rope, RopeKeys};
use serde_json::{Value, json};
use tch::{Device, Tensor};

use super::{Architecture, Family, Known};
use crate::blocks::attention::Heads;
use crate::blocks::feed_forward::mlp_elements;
use crate::facts::HeadFacts;
use crate::heads::FusedHeads;
use crate::layer::{Attend, Layer, Memory, Pass, Projected, norm};
use crate::parallel::{Divisible, Shard};
use crate::parameters::{Init, Linear, LinearSpec, Outputs, Split};
use crate::rotary::HeadTables;
use crate::{Outer, TargetConfig};

pub(super) const KNOWN: &[Known] = &[
    Known {
        architectures: &["LlamaForCausalLM"],
        model_types: &["llama"],
        head: HeadFacts::rms(1e-6),
        read: |text| read(text, DenseKind::Llama),
    },
    Known {
        architectures: &["MistralForCausalLM"],
        model_types: &["mistral"],
        head: HeadFacts::rms(1e-6),
        read: |text| read(text, DenseKind::Mistral),
    },
    Known {
        architectures: &["Qwen2ForCausalLM"],
        model_types: &["qwen2"],
        head: HeadFacts::rms(1e-6),
        read: |text| read(text, DenseKind::Qwen2),
    },
    Known {
        architectures: &["Qwen3ForCausalLM"],
        model_types: &["qwen3"],
        head: HeadFacts::rms(1e-6),
        read: |text| read(text, DenseKind::Qwen3),
    },
];

fn read(text: &Fields, kind: DenseKind) -> Result<(Family, Outer)> {
    Ok((DenseConfig::read(text, kind)?.into(), Outer::PLAIN))
}

/// The family of a dense model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DenseKind {
    /// Llama 2, 3.x.
    Llama,
    /// Mistral 7B and derivatives.
    Mistral,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen3, dense.
    Qwen3,
}

impl DenseKind {
    /// The name under `architectures` in config.json.
    pub fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    /// The name under `model_type`.
    pub(crate) fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }
}

/// Dimensions and choices. Field names follow Hugging Face where it has one.
#[allow(missing_docs, reason = "Hugging Face's names")]
#[derive(Debug, Clone, PartialEq)]
pub struct DenseConfig {
    /// The family, which determines the architecture's name in saved targets.
    pub kind: DenseKind,
    pub intermediate_size: i64,
    pub num_attention_heads: i64,
    pub num_key_value_heads: i64,
    pub head_dim: i64,
    pub rope: Rope,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether o has a bias.
    pub output_bias: bool,
    /// Whether gate, up and down have biases.
    pub mlp_bias: bool,
    /// Whether queries and keys are normalised per head before the rotation.
    pub qk_norm: bool,
    /// Sliding window per layer in tokens (including the token itself); `None` for full attention.
    pub windows: Vec<Option<i64>>,
}

impl DenseConfig {
    /// A small Qwen3 of `layers` layers.
    pub(crate) fn small(hidden_size: i64, layers: usize) -> Self {
        Self {
            kind: DenseKind::Qwen3,
            intermediate_size: hidden_size * 3,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: hidden_size / 4,
            rope: Rope::plain(10_000.0, hidden_size / 4),
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            qk_norm: true,
            windows: vec![None; layers],
        }
    }

    /// Reads config.json.
    pub(crate) fn read(fields: &Fields, kind: DenseKind) -> Result<Self> {
        let hidden_size = fields.required("hidden_size", Fields::size)?;
        let heads = fields.required("num_attention_heads", Fields::size)?;
        let layers = fields.required("num_hidden_layers", Fields::size)? as usize;
        let attention_bias = fields.flag("attention_bias")?;
        let head_dim = fields.size("head_dim")?.unwrap_or(hidden_size / heads);
        let config = Self {
            kind,
            intermediate_size: fields.required("intermediate_size", Fields::size)?,
            num_attention_heads: heads,
            num_key_value_heads: fields.size("num_key_value_heads")?.unwrap_or(heads),
            head_dim,
            rope: rope(fields, head_dim)?,
            // Qwen2 always has these biases, without a config key.
            qkv_bias: kind == DenseKind::Qwen2 || attention_bias,
            output_bias: kind != DenseKind::Qwen2 && attention_bias,
            mlp_bias: fields.flag("mlp_bias")?,
            qk_norm: kind == DenseKind::Qwen3,
            windows: windows(fields, kind, layers)?,
        };
        config.check(fields)?;
        Ok(config)
    }

    fn check(&self, fields: &Fields) -> Result<()> {
        let activation = fields.text("hidden_act")?.unwrap_or("silu".into());
        if activation != "silu" {
            return Err(fields.refuse("hidden_act", "only silu is supported"));
        }
        if self.num_attention_heads % self.num_key_value_heads != 0 {
            return Err(fields.refuse("num_key_value_heads", "it must divide num_attention_heads"));
        }
        if self.head_dim % 2 != 0 {
            return Err(fields.refuse("head_dim", "rotary embedding needs an even number"));
        }
        Ok(())
    }

    /// Total width of the query heads.
    pub fn query_size(&self) -> i64 {
        self.num_attention_heads * self.head_dim
    }

    /// Total width of the key heads; that of the value heads is the same.
    pub fn key_size(&self) -> i64 {
        self.num_key_value_heads * self.head_dim
    }

    pub(crate) fn heads(&self) -> Heads {
        Heads { query: self.num_attention_heads, key: self.num_key_value_heads, dim: self.head_dim }
    }

    /// Its keys of config.json.
    pub(crate) fn to_json(&self) -> Value {
        let sliding = self.windows.iter().flatten().next();
        let layer_type = |window: &Option<i64>| match window {
            Some(_) => "sliding_attention",
            None => "full_attention",
        };
        json!({
            "architectures": [self.kind.architecture()],
            "model_type": self.kind.model_type(),
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.rope.theta,
            "rope_parameters": self.rope.to_json(),
            "attention_bias": self.output_bias,
            "attention_dropout": 0.0,
            "mlp_bias": self.mlp_bias,
            "hidden_act": "silu",
            "layer_types": self.windows.iter().map(layer_type).collect::<Vec<_>>(),
            "sliding_window": sliding,
            "use_sliding_window": sliding.is_some(),
            "max_window_layers": self.windows.len(),
        })
    }
}

impl Architecture for DenseConfig {
    fn layer(&self, config: &TargetConfig, number: usize, init: &Init) -> Result<Box<dyn Layer>> {
        Ok(Box::new(DenseLayer::new(config, self, number, init)?))
    }

    fn rotaries(&self, device: Device) -> Vec<Rotary> {
        vec![self.rope.rotary(device)]
    }

    fn stored_elements(&self, config: &TargetConfig, _number: usize, shard: &Shard) -> f64 {
        let (hidden, inner) = (config.hidden_size, shard.share(self.intermediate_size));
        self.heads().own(shard).elements(hidden) + mlp_elements(hidden, inner)
    }

    fn pair_flops(&self, _number: usize) -> f64 {
        4.0 * self.query_size() as f64
    }

    fn attention_span(&self, number: usize) -> AttentionSpan {
        self.windows[number].into()
    }

    fn parallel_sizes(&self) -> Vec<Divisible> {
        let inner = Divisible::new("intermediate_size", self.intermediate_size);
        [self.heads().parallel_sizes(), vec![inner]].concat()
    }

    fn widest(&self, config: &TargetConfig) -> f64 {
        let (h, i) = (config.hidden_size as f64, self.intermediate_size as f64);
        let (query, key) = (self.query_size() as f64, self.key_size() as f64);
        let attention = 2.0 * h + 3.0 * query + 3.0 * key;
        attention.max(4.0 * h + 3.0 * i)
    }

    fn dense(&self) -> Option<&DenseConfig> {
        Some(self)
    }
}

#[derive(Debug)]
struct DenseLayer {
    number: usize,
    attention_span: AttentionSpan,
    module: String,
    kernels: Kernels,
    eps: f64,
    head_dim: i64,
    query_heads: i64,
    key_heads: i64,
    input_norm_h: Tensor,
    post_attention_norm_h: Tensor,
    qk_norm: Option<QkNorm>,
    qkv: Linear,
    output: Linear,
    gate_up: Linear,
    down: Linear,
}

/// Per-head norms of queries and keys.
#[derive(Debug)]
struct QkNorm {
    query_d: Tensor,
    key_d: Tensor,
}

impl DenseLayer {
    fn new(
        target: &TargetConfig,
        config: &DenseConfig,
        number: usize,
        init: &Init,
    ) -> Result<Self> {
        let module = init.path(&format!("layers.{number}"));
        let (hidden, inner) = (target.hidden_size, config.intermediate_size);
        let (heads, own) = (config.heads(), config.heads().own(&init.shard));
        let linear = |(part, name): (&str, &str), parts: &[(&str, Outputs)], input, bias, split| {
            let module = &format!("{module}.{part}");
            let layout = if name == "gate_up_proj" { Layout::Gated } else { Layout::Plain };
            init.packable(&LinearSpec { module, name, parts, input, bias, split }, layout)
        };
        let norm = |name: &str| init.norm(&format!("{module}.{name}.weight"), hidden);
        let (queries, keys) = (heads.queries(), heads.keys());
        let qkv_parts = [("q_proj", queries), ("k_proj", keys), ("v_proj", keys)];
        let [output_parts, down_parts] =
            ["o_proj", "down_proj"].map(|name| [(name, Outputs::Even(hidden))]);
        let gate_up_parts = ["gate_proj", "up_proj"].map(|name| (name, Outputs::Even(inner)));
        let query = heads.query_size();
        let (qkv_bias, o_bias, bias) = (config.qkv_bias, config.output_bias, config.mlp_bias);
        Ok(Self {
            number,
            attention_span: config.windows[number].into(),
            kernels: Kernels::Fast,
            eps: target.rms_norm_eps,
            head_dim: config.head_dim,
            query_heads: own.query,
            key_heads: own.key,
            input_norm_h: norm("input_layernorm")?,
            post_attention_norm_h: norm("post_attention_layernorm")?,
            qk_norm: config.qk_norm.then(|| QkNorm::new(config, &module, init)).transpose()?,
            qkv: linear(("self_attn", "qkv_proj"), &qkv_parts, hidden, qkv_bias, Split::Outputs)?,
            output: linear(("self_attn", "o_proj"), &output_parts, query, o_bias, Split::Inputs)?,
            gate_up: linear(("mlp", "gate_up_proj"), &gate_up_parts, hidden, bias, Split::Outputs)?,
            down: linear(("mlp", "down_proj"), &down_parts, inner, bias, Split::Inputs)?,
            module,
        })
    }

    fn norm(&self, x_th: &Tensor, weight: &Tensor) -> Tensor {
        norm(x_th, Norm { weight, eps: self.eps, kernels: self.kernels })
    }

    fn project(&self, x_th: &Tensor, tables: &HeadTables, attend: &dyn Attend) -> Projected {
        let qkv_to = self.qkv.apply(&self.norm(x_th, &self.input_norm_h));
        let (queries, keys, kernels) = (self.query_heads, self.key_heads, self.kernels);
        let fused = FusedHeads {
            qkv_to: &qkv_to,
            heads: Heads { query: queries, key: keys, dim: self.head_dim },
            norms: self.qk_norm.as_ref().map(|norms| (&norms.query_d, &norms.key_d)),
            eps: self.eps,
            tables,
            kernels,
        };
        if let Some(projected) = fused.project(self.number, attend) {
            return projected;
        }
        let part =
            |start: i64, count: i64| qkv_to.narrow(1, start * self.head_dim, count * self.head_dim);
        let heads = |part: Tensor, count: i64| part.view([-1, count, self.head_dim]);
        let v_tme = heads(part(queries + keys, keys), keys);
        if let Some(norms) = self.qk_norm.as_ref().filter(|_| kernels.take(&qkv_to)) {
            // One sweep each; a group size of one keeps a token's heads together.
            let (cosine, sine) = (&tables.half.cos_td, &tables.half.sin_td);
            let normed = |part: Tensor, norm_d: &Tensor| {
                let norm = RmsWeight { weight: norm_d, eps: self.eps };
                kernels::head_norm_rope(&part, norm, cosine, sine, 1).squeeze_dim(2)
            };
            let q_tnd = normed(part(0, queries), &norms.query_d);
            let k_tmd = normed(part(queries, keys), &norms.key_d);
            return Projected { q_tnd, k_tmd, v_tme, kernels, are_kept: false };
        }
        let qk = heads(part(0, queries + keys), queries + keys);
        let qk = match &self.qk_norm {
            Some(norms) => tables.rotate(&norms.apply(&qk, queries, keys, self.eps)),
            None => tables.rotate(&qk),
        };
        let (q_tnd, k_tmd) = (qk.narrow(1, 0, queries), qk.narrow(1, queries, keys));
        Projected { q_tnd, k_tmd, v_tme, kernels, are_kept: false }
    }

    fn linears(&self) -> [&Linear; 4] {
        [&self.qkv, &self.output, &self.gate_up, &self.down]
    }

    fn norms(&self) -> Vec<(String, Tensor)> {
        let mut norms = vec![
            ("input_layernorm", &self.input_norm_h),
            ("post_attention_layernorm", &self.post_attention_norm_h),
        ];
        if let Some(qk_norm) = &self.qk_norm {
            norms.push(("self_attn.q_norm", &qk_norm.query_d));
            norms.push(("self_attn.k_norm", &qk_norm.key_d));
        }
        let named = |(name, tensor): (&str, &Tensor)| {
            (format!("{}.{name}.weight", self.module), tensor.shallow_clone())
        };
        norms.into_iter().map(named).collect()
    }
}

impl Layer for DenseLayer {
    fn forward(&self, x_th: &Tensor, pass: &mut Pass<'_>) -> Tensor {
        let place = AttentionPlace {
            layer: self.number,
            attention_span: self.attention_span,
            scores: Scores::default(),
        };
        let projected = self.project(x_th, &pass.tables[0], &*pass.attend);
        let attended = pass.attend.attend(place, &projected);
        let x_th = self.output.add_to(x_th, &attended);
        let normed = self.norm(&x_th, &self.post_attention_norm_h);
        self.down.add_onto(x_th, &fused::swiglu(&self.gate_up.apply(&normed), self.kernels))
    }

    fn memory(&self) -> Memory {
        Memory::Keys { heads: self.key_heads, key_dim: self.head_dim, value_dim: self.head_dim }
    }

    fn set_kernels(&mut self, kernels: Kernels) {
        self.kernels = kernels;
        if kernels != Kernels::Fast {
            let linears = [&mut self.qkv, &mut self.output, &mut self.gate_up, &mut self.down];
            linears.into_iter().for_each(Linear::unpack);
        }
    }

    fn packed(&self) -> Option<LayerWeights<'_>> {
        Some(LayerWeights {
            qkv: self.qkv.projection(),
            output: self.output.projection(),
            gate_up: self.gate_up.projection(),
            down: self.down.projection(),
            input_norm: &self.input_norm_h,
            post_norm: &self.post_attention_norm_h,
            head_norms: self.qk_norm.as_ref().map(|norms| (&norms.query_d, &norms.key_d)),
            window: self.attention_span.window(),
        })
    }

    fn parameters(&self) -> Vec<(String, Tensor)> {
        self.linears().into_iter().flat_map(Linear::parameters).chain(self.norms()).collect()
    }

    fn checkpoint(&self) -> Vec<(String, Tensor)> {
        self.linears().into_iter().flat_map(Linear::checkpoint).chain(self.norms()).collect()
    }
}

impl QkNorm {
    fn new(config: &DenseConfig, module: &str, init: &Init) -> Result<Self> {
        let norm =
            |name: &str| init.norm(&format!("{module}.self_attn.{name}.weight"), config.head_dim);
        Ok(Self { query_d: norm("q_norm")?, key_d: norm("k_norm")? })
    }

    /// Normalises query and key heads [T, N+M, D] in one operation, with repeated weights.
    fn apply(&self, qk: &Tensor, queries: i64, keys: i64, eps: f64) -> Tensor {
        let rows = |norm_d: &Tensor, count: i64| norm_d.unsqueeze(0).expand([count, -1], false);
        rms_norm(qk, &Tensor::cat(&[rows(&self.query_d, queries), rows(&self.key_d, keys)], 0), eps)
    }
}

/// Requires rotation of whole heads with length-independent frequencies, as the packed passes do.
fn rope(fields: &Fields, head_dim: i64) -> Result<Rope> {
    let rope = Rope::read(RopeKeys::of(fields, head_dim)?)?;
    if rope.rotated != head_dim {
        return Err(fields.refuse("partial_rotary_factor", "only 1.0 is supported"));
    }
    match rope.turns_alike() {
        true => Ok(rope),
        false => Err(fields.refuse(
            "rope_parameters",
            "of its types default, linear, llama3 and yarn are supported here",
        )),
    }
}

/// The sliding window of every layer, by Hugging Face's rules.
fn windows(fields: &Fields, kind: DenseKind, layers: usize) -> Result<Vec<Option<i64>>> {
    let window = match kind {
        DenseKind::Llama => None,
        // Mistral's class defaults to its first release's window.
        DenseKind::Mistral if !fields.has("sliding_window") => Some(4096),
        DenseKind::Mistral => fields.size("sliding_window")?,
        DenseKind::Qwen2 | DenseKind::Qwen3 => {
            let used = fields.flag("use_sliding_window")?;
            fields.size("sliding_window")?.filter(|_| used)
        }
    };
    let Some(window) = window else { return Ok(vec![None; layers]) };
    match fields.texts("layer_types")? {
        Some(types) if types.len() != layers => {
            Err(fields.refuse("layer_types", "one entry per layer is needed"))
        }
        Some(types) => Ok(types
            .iter()
            .map(|layer_type| (layer_type == "sliding_attention").then_some(window))
            .collect()),
        None => {
            let full = match kind {
                DenseKind::Mistral => 0,
                _ => fields.size("max_window_layers")?.unwrap_or(28) as usize,
            };
            Ok((0..layers).map(|layer| (layer >= full).then_some(window)).collect())
        }
    }
}
