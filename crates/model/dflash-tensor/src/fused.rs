//! Elementwise operations of the draft's training pass, forward and backward.
//!
//! On a CPU in float32, and on a GPU in float32 or bfloat16, each is one sweep of a compiled
//! kernel. Otherwise (bfloat16 on a CPU, float64 in gradient checks, a GPU without our kernels, or
//! [`Kernels::Portable`]) libtorch operations compute the same. Heads are regrouped by key/value
//! head on the way, so attention gets its layout without a copy.

use dflash_kernels::gpu::{self, HeadGradients, HeadNorms, HeadTurn, KeyRoom, Runner};
use dflash_kernels::kernels::{self, Kernels, RmsWeight};
use tch::{Kind, Tensor};

use crate::ops::{self, RotaryTables};

/// An RMS norm and the kernels that compute it.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// Shape `[D]`.
    pub weight: &'a Tensor,
    /// Added to the mean square.
    pub eps: f64,
    /// The implementation.
    pub kernels: Kernels,
}

impl Norm<'_> {
    /// `x / rms(x) * weight` over the last dimension.
    pub fn of(&self, x: &Tensor) -> Tensor {
        if let Some(runner) = self.gpu(x) {
            return gpu::rms_norm(runner, x, self.weight, self.eps);
        }
        if self.kernels.take(x) {
            return kernels::rms_norm(x, self.weight, self.eps);
        }
        ops::rms_norm(x, self.weight, self.eps)
    }

    /// Gradient of [`Self::of`] plus `residual`, written into the memory of `dy` where a kernel
    /// can. The weight's gradient is added to `dweight`.
    pub fn backward(
        &self,
        mut dy: Tensor,
        x: &Tensor,
        residual: Option<&Tensor>,
        dweight: &Tensor,
    ) -> Tensor {
        let norm = RmsWeight { weight: self.weight, eps: self.eps };
        if let Some(runner) = self.gpu(x) {
            gpu::rms_norm_backward(runner, &mut dy, x, norm, residual, None, dweight);
            return dy;
        }
        if self.kernels.take(x) {
            kernels::rms_norm_backward(&mut dy, x, norm, residual, None, dweight);
            return dy;
        }
        let (dx, added) = ops::rms_norm_backward(&dy, x, self.weight, self.eps);
        let _ = dweight.shallow_clone().g_add_(&added);
        match residual {
            Some(residual) => dx + residual,
            None => dx,
        }
    }

    /// [`Self::backward`] that also recomputes the norm's output, needed for the gradient of the
    /// weight that follows it.
    pub fn backward_again(
        &self,
        mut dy: Tensor,
        x: &Tensor,
        residual: &Tensor,
        dweight: &Tensor,
    ) -> (Tensor, Tensor) {
        let norm = RmsWeight { weight: self.weight, eps: self.eps };
        if let Some(runner) = self.gpu(x) {
            let (y, residual) = (x.empty_like(), Some(residual));
            gpu::rms_norm_backward(runner, &mut dy, x, norm, residual, Some(&y), dweight);
            return (dy, y);
        }
        if self.kernels.take(x) {
            let y = x.empty_like();
            kernels::rms_norm_backward(&mut dy, x, norm, Some(residual), Some(&y), dweight);
            return (dy, y);
        }
        let dx = self.backward(dy, x, Some(residual), dweight);
        (dx, self.of(x))
    }

    /// The GPU kernel runner for `x`, if there is one.
    fn gpu(&self, x: &Tensor) -> Option<Runner> {
        self.kernels.gpu(x).filter(|_| self.weight.kind() == x.kind())
    }

    /// Norm and rotation of the heads of `x` [N, heads * D]. Returns [kv heads, N, group, D], laid
    /// out as [`HeadOrder::ByQuery`] by a CPU kernel and [`HeadOrder::ByKeyHead`] otherwise.
    pub fn of_heads(&self, x: &Tensor, tables: &RotaryTables, kv_heads: i64) -> Tensor {
        let Self { weight, eps, kernels } = *self;
        if kernels.take(x) {
            let y_ngjd = kernels::head_norm_rope(
                x,
                RmsWeight { weight, eps },
                &tables.cos_td,
                &tables.sin_td,
                kv_heads,
            );
            return HeadOrder::ByQuery.seen(&y_ngjd);
        }
        let y_nhd = ops::head_norm_rope(x, weight, eps, tables);
        HeadOrder::ByKeyHead.seen(&y_nhd.unflatten(1, [kv_heads, -1]))
    }

    /// Overwrites `x` [N, heads * D] with its gradient under [`Self::of_heads`], given `dy` of
    /// shape [kv heads, N, group, D]. Adds the weight's gradient to `dweight`.
    pub fn of_heads_backward(
        &self,
        dy: &Tensor,
        mut x: Tensor,
        tables: &RotaryTables,
        dweight: &Tensor,
    ) {
        let Self { weight, eps, kernels } = *self;
        if kernels.take(&x) {
            let dy_ngjd = HeadOrder::ByQuery.rows(dy);
            kernels::head_norm_rope_backward(
                &dy_ngjd,
                &mut x,
                RmsWeight { weight, eps },
                &tables.cos_td,
                &tables.sin_td,
                dweight,
            );
            return;
        }
        let dy_nhd = HeadOrder::ByKeyHead.rows(dy).flatten(1, 2);
        let inverse = tables.inverse();
        let (dx, added) =
            ops::head_norm_rope_backward(&dy_nhd, &x, RmsWeight { weight, eps }, &inverse);
        x.copy_(&dx);
        let _ = dweight.shallow_clone().g_add_(&added);
    }
}

/// Memory order of a slot's heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadOrder {
    /// [N, group, kv heads, D]. All queries of one key/value head are equally spaced over slots and
    /// group, so attention takes slots and group as one dimension without a copy. CPU flash kernels
    /// produce this order.
    ByQuery,
    /// [N, kv heads, group, D], the order of checkpoints and of kernels that support grouped heads.
    ByKeyHead,
}

impl HeadOrder {
    /// View of a tensor in this order as [kv heads, N, group, D].
    pub fn seen(self, x: &Tensor) -> Tensor {
        match self {
            Self::ByQuery => x.permute([2, 0, 1, 3]),
            Self::ByKeyHead => x.permute([1, 0, 2, 3]),
        }
    }

    /// Inverse of [`Self::seen`], contiguous; copies only if the memory order differs.
    pub fn rows(self, x_jngd: &Tensor) -> Tensor {
        match self {
            Self::ByQuery => x_jngd.permute([1, 2, 0, 3]).contiguous(),
            Self::ByKeyHead => x_jngd.permute([1, 0, 2, 3]).contiguous(),
        }
    }

    /// The same values in this memory order.
    pub fn ordered(self, x_jngd: &Tensor) -> Tensor {
        self.seen(&self.rows(x_jngd))
    }
}

/// Projected rows on a GPU: query heads (if any), key heads and value heads, concatenated. Each
/// pass is one kernel launch that writes the layout attention needs.
#[derive(Debug)]
pub struct Projected<'a> {
    /// The kernel runner.
    pub runner: Runner,
    /// Query and key norms, and the rotation after them.
    pub norms: HeadNorms<'a>,
    /// Key/value heads per row.
    pub kv_heads: i64,
}

impl Projected<'_> {
    /// Returns queries [N, heads, D] if the rows hold any; writes keys and values to `room`.
    pub fn to(&self, x: &Tensor, room: KeyRoom<'_>) -> Option<Tensor> {
        let HeadNorms { query, key, eps, cosine, sine } = self.norms;
        let turn = HeadTurn { norms: Some((query, key)), eps, cosine, sine };
        gpu::heads_to(self.runner, x, &turn, room)
    }

    /// Queries [kv heads, N, group, D] and keys [kv heads, N, D], normed and rotated.
    pub fn of(&self, x: &Tensor) -> (Option<Tensor>, Tensor) {
        let (q_nhd, k_njd) = gpu::heads(self.runner, x, &self.norms, self.kv_heads);
        let seen =
            |q_nhd: Tensor| HeadOrder::ByKeyHead.seen(&q_nhd.unflatten(1, [self.kv_heads, -1]));
        (q_nhd.map(seen), k_njd.transpose(0, 1))
    }

    /// Replaces `x` by its gradient, given gradients of queries, keys and values in the layout of
    /// [`Self::of`]. The norms' gradients are added to `dweights`.
    pub fn backward(
        &self,
        x: &Tensor,
        dq_jngd: Option<&Tensor>,
        dk_jnd: &Tensor,
        dv_jnd: &Tensor,
        dquery_weight: &Tensor,
        dkey_weight: &Tensor,
    ) {
        let sum = |d: Tensor| d.to_kind(Kind::Float).contiguous();
        let query = dq_jngd.map(|d| sum(HeadOrder::ByKeyHead.rows(d).flatten(1, 2)));
        let [key, value] = [dk_jnd, dv_jnd].map(|d| sum(d.transpose(0, 1)));
        let d = HeadGradients { query: query.as_ref(), key: &key, value: &value };
        gpu::heads_backward(self.runner, x, &self.norms, &d, dquery_weight, dkey_weight);
    }
}

/// `silu(gate) * up` for `gate_up` [N, 2I].
pub fn swiglu(gate_up: &Tensor, kernels: Kernels) -> Tensor {
    match kernels.gpu(gate_up) {
        Some(runner) => gpu::swiglu(runner, gate_up),
        None if kernels.take(gate_up) => kernels::swiglu(gate_up),
        None => ops::swiglu(gate_up),
    }
}

/// Gradient of [`swiglu`] [N, 2I] and its recomputed value, in the memory of `gate_up` and `dy`
/// where a kernel can.
pub fn swiglu_backward(mut dy: Tensor, mut gate_up: Tensor, kernels: Kernels) -> (Tensor, Tensor) {
    if let Some(runner) = kernels.gpu(&gate_up) {
        gpu::swiglu_backward(runner, &mut dy, &mut gate_up);
        return (gate_up, dy);
    }
    if kernels.take(&gate_up) {
        kernels::swiglu_backward(&mut dy, &mut gate_up);
        return (gate_up, dy);
    }
    (ops::swiglu_backward(&dy, &gate_up), ops::swiglu(&gate_up))
}

/// The result of attention to some of the keys.
#[derive(Clone, Copy, Debug)]
pub struct PartialAttention<'a> {
    /// The weighted values [1, j, rows, D].
    pub out: &'a Tensor,
    /// The log-sum-exp of the scores [1, j, rows].
    pub lse: &'a Tensor,
}

/// Merges `part` into `merged`, whose memory order is [rows, j, D] and [rows, j].
pub fn merge(merged: PartialAttention<'_>, part: PartialAttention<'_>, kernels: Kernels) {
    let PartialAttention { out: merged_out, lse: merged_lse } = merged;
    let PartialAttention { out, lse } = part;
    if kernels.take(out) {
        let rows = |x: &Tensor| x.squeeze_dim(0).transpose(0, 1);
        let (part_out, part_lse) = (rows(out).contiguous(), rows(lse).contiguous());
        kernels::merge_attention(&rows(merged_out), &rows(merged_lse), &part_out, &part_lse);
        return;
    }
    let total = merged_lse.logaddexp(lse);
    let share = |lse: &Tensor| (lse - &total).exp_().unsqueeze(-1).to_kind(out.kind());
    let (old_share, new_share) = (share(merged_lse), share(lse));
    let mut merged_out = merged_out.shallow_clone();
    let _ = merged_out.g_mul_(&old_share);
    let _ = merged_out.addcmul_(out, &new_share);
    merged_lse.shallow_clone().copy_(&total);
}

#[cfg(test)]
mod tests {
    use dflash_test_support::seeded;
    use tch::Device;

    use super::*;
    use crate::ops::Rotary;

    const EPS: f64 = 1e-6;

    fn random(shape: &[i64]) -> Tensor {
        Tensor::randn(shape, (Kind::Double, Device::Cpu))
    }

    /// Compares `f` in float64 with each float32 implementation on the same inputs.
    fn agree(inputs: &[Tensor], f: impl Fn(&[Tensor], Kernels) -> Vec<Tensor>) {
        let in_kind = |kind| -> Vec<Tensor> {
            inputs.iter().map(|x| x.to_dtype(kind, false, true)).collect()
        };
        let expected = f(&in_kind(Kind::Double), Kernels::Fast);
        for kernels in [Kernels::Fast, Kernels::Portable, Kernels::Emulated] {
            let found = f(&in_kind(Kind::Float), kernels);
            for (expected, found) in expected.iter().zip(found) {
                assert_eq!(found.kind(), Kind::Float);
                // Relative to the inputs where terms of their size cancel.
                let scale = expected.abs().max().double_value(&[]).max(1.0);
                let difference = (expected - found).abs().max().double_value(&[]);
                assert!(difference <= 5e-6 * scale, "{kernels:?}: {difference} of {scale}");
            }
        }
    }

    #[test]
    fn all_paths_agree_with_float64_on_norms() {
        let _draws = seeded(tch::manual_seed);
        // odd widths leave a remainder after the vector loops; many rows use several threads
        for (rows, dim) in [(1, 1), (7, 33), (513, 64)] {
            // Away from zero: a one-element row nearly cancels, the more so the smaller it is.
            let x = random(&[rows, dim]);
            let x = &x + x.sign();
            let inputs = [random(&[rows, dim]), x, random(&[dim]), random(&[rows, dim])];
            agree(&inputs, |x, kernels| {
                let dweight = x[2].ones_like();
                let norm = Norm { weight: &x[2], eps: EPS, kernels };
                let dx = norm.backward(x[0].copy(), &x[1], Some(&x[3]), &dweight);
                let (with, again) = norm.backward_again(x[0].copy(), &x[1], &x[3], &dweight);
                vec![norm.of(&x[1]), dx, with, again, dweight]
            });
        }
    }

    #[test]
    fn all_paths_agree_with_float64_on_heads() {
        let _draws = seeded(tch::manual_seed);
        let (n, heads, kv_heads, dim) = (70, 6, 2, 8);
        let inputs = [
            random(&[n, (heads + 3) * dim]),
            random(&[dim]),
            random(&[kv_heads, n, heads / kv_heads, dim]),
        ];
        let positions = Tensor::arange(n, (Kind::Int64, Device::Cpu));
        agree(&inputs, |x, kernels| {
            let tables = Rotary::new(dim, 100.0, Device::Cpu).tables(&positions);
            let wide = x[0].narrow(1, dim, heads * dim);
            let norm = Norm { weight: &x[1], eps: EPS, kernels };
            let y = norm.of_heads(&wide, &tables, kv_heads);
            let (dx, dweight) = (x[0].copy(), x[1].ones_like());
            let part = dx.narrow(1, dim, heads * dim);
            norm.of_heads_backward(&x[2], part, &tables, &dweight);
            vec![y, dx, dweight]
        });
    }

    #[test]
    fn all_paths_agree_with_float64_on_swiglu() {
        let _draws = seeded(tch::manual_seed);
        let inputs = [random(&[300, 37]), random(&[300, 74]) * 8.0];
        agree(&inputs, |x, kernels| {
            let (dgate_up, again) = swiglu_backward(x[0].copy(), x[1].copy(), kernels);
            vec![swiglu(&x[1], kernels), dgate_up, again]
        });
    }

    #[test]
    fn a_hidden_part_has_no_share() {
        let _draws = seeded(tch::manual_seed);
        let (heads, rows, dim) = (2, 5, 8);
        let inputs = [
            random(&[1, heads, rows, dim]),
            random(&[1, heads, rows]),
            random(&[1, heads, rows, dim]),
            random(&[1, heads, rows]),
        ];
        agree(&inputs, |x, kernels| {
            // the merged tensors are row-major, the parts have any layout
            let by_row = |x: &Tensor| x.transpose(1, 2).contiguous().transpose(1, 2);
            let (out, lse) = (by_row(&x[0]), by_row(&x[1]));
            let merged = PartialAttention { out: &out, lse: &lse };
            merge(merged, PartialAttention { out: &x[2], lse: &by_row(&x[3]) }, kernels);
            let _ = x[3].get(0).get(0).fill_(-1e30);
            merge(merged, PartialAttention { out: &x[2], lse: &x[3] }, kernels);
            vec![out, lse]
        });
    }
}
