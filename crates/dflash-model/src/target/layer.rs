//! One decoder layer: norm, attention, norm, SwiGLU MLP, each added to the residual stream.
//!
//! Every product runs over all tokens of a call at once; only attention knows which token belongs
//! to which document or cache, and it does so behind [`Attend`]. Shapes: `t` tokens, `h` hidden,
//! `n` query heads, `m` key and value heads, `d` head dimension, `o` any output.

use dflash_torch_sys::decode::LayerWeights;
use dflash_torch_sys::kernels::{self, Kernels};
use tch::Tensor;

use super::config::TargetConfig;
use super::parameters::{Init, Linear, LinearSpec};
use super::rotary::HeadTables;
use crate::fused::Norm;
use crate::ops::rms_norm;
use crate::{Result, fused};

/// Rotated queries and keys, and values, of the tokens of one call.
#[derive(Debug)]
pub(crate) struct Projected {
    pub(crate) q_tnd: Tensor,
    pub(crate) k_tmd: Tensor,
    pub(crate) v_tmd: Tensor,
    /// What computes the attention over them.
    pub(crate) kernels: Kernels,
}

/// Which layer asks for attention, and how far back it sees.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) layer: usize,
    pub(crate) window: Option<i64>,
}

/// Causal attention over whatever the tokens may see: their documents, or a cache.
pub(crate) trait Attend {
    /// Attention's output, heads side by side [T, N*D].
    fn attend(&mut self, place: Place, projected: &Projected) -> Tensor;
}

/// The weights of one layer.
#[derive(Debug)]
pub(crate) struct DecoderLayer {
    place: Place,
    module: String,
    pub(crate) kernels: Kernels,
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

impl DecoderLayer {
    pub(crate) fn new(config: &TargetConfig, layer: usize, init: &Init) -> Result<Self> {
        let module = format!("model.layers.{layer}");
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let (query, key) = (config.query_size(), config.key_size());
        let linear = |part: &str, name: &str, parts: &[(&str, i64)], input: i64, bias: bool| {
            let module = &format!("{module}.{part}");
            init.linear(&LinearSpec { module, name, parts, input, bias })
        };
        let norm = |name: &str| init.norm(&format!("{module}.{name}.weight"), hidden);
        let qkv_parts = [("q_proj", query), ("k_proj", key), ("v_proj", key)];
        let (output_parts, down_parts) = ([("o_proj", hidden)], [("down_proj", hidden)]);
        let gate_up_parts = [("gate_proj", inner), ("up_proj", inner)];
        Ok(Self {
            place: Place { layer, window: config.windows[layer] },
            kernels: Kernels::Fast,
            eps: config.rms_norm_eps,
            head_dim: config.head_dim,
            query_heads: config.num_attention_heads,
            key_heads: config.num_key_value_heads,
            input_norm_h: norm("input_layernorm")?,
            post_attention_norm_h: norm("post_attention_layernorm")?,
            qk_norm: config.qk_norm.then(|| QkNorm::new(config, &module, init)).transpose()?,
            qkv: linear("self_attn", "qkv_proj", &qkv_parts, hidden, config.qkv_bias)?,
            output: linear("self_attn", "o_proj", &output_parts, query, config.output_bias)?,
            gate_up: linear("mlp", "gate_up_proj", &gate_up_parts, hidden, config.mlp_bias)?,
            down: linear("mlp", "down_proj", &down_parts, inner, config.mlp_bias)?,
            module,
        })
    }

    /// The residual stream after this layer [T, H].
    pub(crate) fn forward(
        &self,
        x_th: &Tensor,
        tables: &HeadTables,
        attention: &mut dyn Attend,
    ) -> Tensor {
        let attended = attention.attend(self.place, &self.project(x_th, tables));
        let x_th = self.output.add_to(x_th, &attended);
        let normed = self.norm(&x_th, &self.post_attention_norm_h);
        self.down.add_to(&x_th, &fused::swiglu(&self.gate_up.apply(&normed), self.kernels))
    }

    fn norm(&self, x_th: &Tensor, weight: &Tensor) -> Tensor {
        norm(x_th, Norm { weight, eps: self.eps, kernels: self.kernels })
    }

    fn project(&self, x_th: &Tensor, tables: &HeadTables) -> Projected {
        let qkv_to = self.qkv.apply(&self.norm(x_th, &self.input_norm_h));
        let (queries, keys, kernels) = (self.query_heads, self.key_heads, self.kernels);
        let part =
            |start: i64, count: i64| qkv_to.narrow(1, start * self.head_dim, count * self.head_dim);
        let heads = |part: Tensor, count: i64| part.view([-1, count, self.head_dim]);
        let v_tmd = heads(part(queries + keys, keys), keys);
        if let Some(norms) = self.qk_norm.as_ref().filter(|_| kernels.take(&qkv_to)) {
            // One sweep each; a single group keeps the heads of a token together.
            let half = (&tables.half.cos_td, &tables.half.sin_td);
            let normed = |part: Tensor, norm_d: &Tensor| {
                kernels::head_norm_rope(&part, (norm_d, self.eps), half, 1).squeeze_dim(2)
            };
            let q_tnd = normed(part(0, queries), &norms.query_d);
            let k_tmd = normed(part(queries, keys), &norms.key_d);
            return Projected { q_tnd, k_tmd, v_tmd, kernels };
        }
        let qk = heads(part(0, queries + keys), queries + keys);
        let qk = match &self.qk_norm {
            Some(norms) => tables.rotate(&norms.apply(&qk, (queries, keys), self.eps)),
            None => tables.rotate(&qk),
        };
        let (q_tnd, k_tmd) = (qk.narrow(1, 0, queries), qk.narrow(1, queries, keys));
        Projected { q_tnd, k_tmd, v_tmd, kernels }
    }

    /// The weights, to be packed.
    pub(crate) fn weights(&self) -> LayerWeights<'_> {
        LayerWeights {
            qkv: self.qkv.projection(),
            output: self.output.projection(),
            gate_up: self.gate_up.projection(),
            down: self.down.projection(),
            input_norm: &self.input_norm_h,
            post_norm: &self.post_attention_norm_h,
            head_norms: self.qk_norm.as_ref().map(|norms| (&norms.query_d, &norms.key_d)),
            window: self.place.window,
        }
    }

    /// The parameters as they are trained: fused projections, norms.
    pub(crate) fn parameters(&self) -> Vec<(String, Tensor)> {
        self.linears().into_iter().flat_map(Linear::parameters).chain(self.norms()).collect()
    }

    /// The tensors as a checkpoint stores them.
    pub(crate) fn checkpoint(&self) -> Vec<(String, Tensor)> {
        self.linears().into_iter().flat_map(Linear::checkpoint).chain(self.norms()).collect()
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

impl QkNorm {
    fn new(config: &TargetConfig, module: &str, init: &Init) -> Result<Self> {
        let norm =
            |name: &str| init.norm(&format!("{module}.self_attn.{name}.weight"), config.head_dim);
        Ok(Self { query_d: norm("q_norm")?, key_d: norm("k_norm")? })
    }

    /// Normalises query and key heads [T, N+M, D] in one operation, with the weights repeated.
    fn apply(&self, qk: &Tensor, (queries, keys): (i64, i64), eps: f64) -> Tensor {
        let rows = |norm_d: &Tensor, count: i64| norm_d.unsqueeze(0).expand([count, -1], false);
        rms_norm(qk, &Tensor::cat(&[rows(&self.query_d, queries), rows(&self.key_d, keys)], 0), eps)
    }
}

/// RMS norm over the last dimension: in training the differentiable form, else in one sweep.
pub(crate) fn norm(x: &Tensor, Norm { weight, eps, kernels }: Norm<'_>) -> Tensor {
    match () {
        () if kernels.take(x) => kernels::rms_norm(&x.contiguous(), weight, eps),
        () if weight.requires_grad() => rms_norm(x, weight, eps),
        () => x.internal_fused_rms_norm(weight.size(), Some(weight), eps).0,
    }
}
