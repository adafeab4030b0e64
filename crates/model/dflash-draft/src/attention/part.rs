//! One part of a merged attention: output and log-sum-exp, and gradients from the merged values.
//!
//! On a CPU in float32 or bfloat16 this uses libtorch's flash kernels, which never store scores.
//! Otherwise (float64 for gradient checks, CUDA if its variable-length kernels do not support the
//! call, and [`Kernels::Portable`]) the part's scores are materialised: at most one chunk's rows
//! times its segment, or one rectangle.

use dflash_kernels::kernels::Kernels;
use dflash_tensor::ops::accumulate_kind;
use tch::Tensor;

/// Parameters common to all parts of one attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionPart {
    pub(super) scale: f64,
    pub(super) kernels: Kernels,
}

/// A part's queries in the backward pass, with the *merged* output and log-sum-exp.
#[derive(Debug)]
pub(super) struct Query {
    /// [batch, heads, rows, D].
    pub(super) q: Tensor,
    /// [batch, heads, rows, D].
    pub(super) out: Tensor,
    /// [batch, heads, rows].
    pub(super) lse: Tensor,
    /// [batch, heads, rows, D].
    pub(super) dout: Tensor,
}

impl AttentionPart {
    /// Attention of `q` [batch, heads, rows, D] over `k`, `v` [batch, heads, columns, D] with an
    /// additive `mask` that broadcasts to [batch, heads, rows, columns].
    ///
    /// Returns the output and its log-sum-exp [batch, heads, rows] (float32, or float64).
    pub(super) fn forward(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: Option<&Tensor>,
    ) -> (Tensor, Tensor) {
        if self.kernels.take_flash(q) {
            return Tensor::internal_scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, false, mask, self.scale,
            );
        }
        let scores = self.scores(q, k, mask);
        let lse = scores.logsumexp([-1i64].as_slice(), true);
        let out = (scores - &lse).exp().to_kind(v.kind()).matmul(v);
        (out, lse.squeeze_dim(-1))
    }

    /// Gradients (dq, dk, dv) of one part.
    pub(super) fn backward(
        &self,
        query: &Query,
        k: &Tensor,
        v: &Tensor,
        mask: Option<&Tensor>,
    ) -> (Tensor, Tensor, Tensor) {
        let Query { q, out, lse, dout } = query;
        if self.kernels.take_flash(q) {
            return Tensor::internal_scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, k, v, out, lse, 0.0, false, mask, self.scale,
            );
        }
        let wide = accumulate_kind(q);
        let p = (self.scores(q, k, mask) - lse.unsqueeze(-1)).exp();
        let dv = p.to_kind(v.kind()).transpose(-2, -1).matmul(dout);
        let dp = dout.matmul(&v.transpose(-2, -1)).to_kind(wide);
        let delta = (dout.to_kind(wide) * out).sum_dim_intlist([-1i64].as_slice(), true, wide);
        let ds = (p * (dp - delta) * self.scale).to_kind(q.kind());
        (ds.matmul(k), ds.transpose(-2, -1).matmul(q), dv)
    }

    fn scores(&self, q: &Tensor, k: &Tensor, mask: Option<&Tensor>) -> Tensor {
        let wide = accumulate_kind(q);
        let scores = q.matmul(&k.transpose(-2, -1)).to_kind(wide) * self.scale;
        match mask {
            Some(mask) => scores + mask.to_kind(wide),
            None => scores,
        }
    }
}
