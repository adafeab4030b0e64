//! Attention with gated output: each query has a gate of the same size, whose sigmoid multiplies
//! the head's output. Query and key heads are normalised before the rotation.
//!
//! Shapes: `t` tokens, `h` hidden, `n` query heads, `m` key and value heads, `d` head dimension.

use dflash_kernels::kernels::Kernels;
use dflash_tensor::Result;
use dflash_tensor::attention_span::{AttentionPlace, AttentionSpan};
use dflash_tensor::ops::Scores;
use tch::Tensor;

use crate::TargetConfig;
use crate::blocks::attention::Heads;
use crate::layer::{Memory, Pass, Projected, RmsNorm};
use crate::parameters::{Init, Linear, LinearSpec, Outputs, Split};

#[derive(Debug)]
pub(crate) struct GatedAttention {
    layer: usize,
    heads: Heads,
    qkv: Linear,
    query_norm: RmsNorm,
    key_norm: RmsNorm,
    output: Linear,
    kernels: Kernels,
}

impl GatedAttention {
    /// Reads the attention of layer `layer` from `module`; `bias` applies to its projections.
    pub(crate) fn new(
        config: &TargetConfig,
        whole: Heads,
        bias: bool,
        layer: usize,
        module: &str,
        init: &Init,
    ) -> Result<Self> {
        let (query, dim) = (whole.query_size(), whole.dim);
        let linear = |name, parts: &[(&str, Outputs)], input, split| {
            init.linear(&LinearSpec { module, name, parts, input, bias, split })
        };
        // Each head's query followed by its gate, so that a rank's share has both.
        let query_gate = Outputs::Even(2 * query);
        let qkv = [("q_proj", query_gate), ("k_proj", whole.keys()), ("v_proj", whole.keys())];
        let output = [("o_proj", Outputs::Even(config.hidden_size))];
        let norm = |name: &str| init.rms_norm(&format!("{module}.{name}.weight"), dim, config);
        Ok(Self {
            layer,
            heads: whole.own(&init.shard),
            qkv: linear("qkv_proj", &qkv, config.hidden_size, Split::Outputs)?,
            query_norm: norm("q_norm")?,
            key_norm: norm("k_norm")?,
            output: linear("o_proj", &output, query, Split::Inputs)?,
            kernels: Kernels::Fast,
        })
    }

    /// `residual_th` plus the attention output for `x_th`.
    pub(crate) fn add_to(
        &self,
        residual_th: &Tensor,
        x_th: &Tensor,
        pass: &mut Pass<'_>,
    ) -> Tensor {
        let Heads { query: queries, key: keys, dim } = self.heads;
        let parts =
            self.qkv.apply(x_th).split_with_sizes([2 * queries * dim, keys * dim, keys * dim], 1);
        let query_gate = parts[0].view([-1, queries, 2 * dim]);
        let gate_tnd = query_gate.narrow(2, dim, dim);
        let tables = &pass.tables[0];
        let q_tnd = self.query_norm.of(&query_gate.narrow(2, 0, dim).contiguous());
        let k_tmd = self.key_norm.of(&parts[1].reshape([-1, keys, dim]));
        let projected = Projected {
            q_tnd: tables.rotate(&q_tnd),
            k_tmd: tables.rotate(&k_tmd),
            v_tme: parts[2].reshape([-1, keys, dim]),
            kernels: self.kernels,
            are_kept: false,
        };
        let place = AttentionPlace {
            layer: self.layer,
            attention_span: AttentionSpan::All,
            scores: Scores::default(),
        };
        let attended = pass.attend.attend(place, &projected);
        self.output.add_to(residual_th, &(attended * gate_tnd.sigmoid().flatten(1, 2)))
    }

    pub(crate) fn memory(&self) -> Memory {
        let Heads { key, dim, .. } = self.heads;
        Memory::Keys { heads: key, key_dim: dim, value_dim: dim }
    }

    pub(crate) fn set_kernels(&mut self, kernels: Kernels) {
        self.kernels = kernels;
        self.query_norm.kernels = kernels;
        self.key_norm.kernels = kernels;
    }
}
