//! The elementwise steps of the draft's training pass, each with its gradient.
//!
//! On a CPU in float32 each is one sweep of a compiled kernel; elsewhere (bfloat16, CUDA, float64
//! for gradient checks) the same mathematics out of libtorch's operations. Heads are regrouped by
//! key/value head on the way, so that attention gets its layout without a copy.

use dflash_torch_sys::kernels;
use tch::Tensor;

use crate::ops::{self, RotaryTables};

/// A norm's weight and epsilon.
pub(crate) type Norm<'a> = (&'a Tensor, f64);

/// `x / rms(x) * weight` over the last dimension.
pub(crate) fn norm(x: &Tensor, (weight, eps): Norm<'_>) -> Tensor {
    if kernels::supports(x) {
        return kernels::rms_norm(x, weight, eps);
    }
    ops::rms_norm(x, weight, eps)
}

/// Gradient of [`norm`], plus `residual`; the weight's gradient is added to `dweight`.
pub(crate) fn norm_backward(
    dy: &Tensor,
    x: &Tensor,
    (weight, eps): Norm<'_>,
    (residual, dweight): (Option<&Tensor>, &Tensor),
) -> Tensor {
    if kernels::supports(x) {
        return kernels::rms_norm_backward(dy, x, (weight, eps), residual, dweight);
    }
    let (dx, added) = ops::rms_norm_backward(dy, x, weight, eps);
    let _ = dweight.shallow_clone().g_add_(&added);
    match residual {
        Some(residual) => dx + residual,
        None => dx,
    }
}

/// Norm and rotation of the heads of `x` [N, heads * D]; result [kv heads, N, group, D].
pub(crate) fn head_norm_rope(
    x: &Tensor,
    (weight, eps): Norm<'_>,
    tables: &RotaryTables,
    kv_heads: i64,
) -> Tensor {
    if kernels::supports(x) {
        let tables = (&tables.cos_td, &tables.sin_td);
        return kernels::head_norm_rope(x, (weight, eps), tables, kv_heads);
    }
    regroup(&ops::head_norm_rope(x, weight, eps, tables), kv_heads)
}

/// Gradient of [`head_norm_rope`] for `dy` [kv heads, N, group, D], written to `dx` [N, heads * D];
/// the weight's gradient is added to `dweight`.
pub(crate) fn head_norm_rope_backward(
    dy: &Tensor,
    x: &Tensor,
    (weight, eps): Norm<'_>,
    tables: &RotaryTables,
    (dx, dweight): (&Tensor, &Tensor),
) {
    if kernels::supports(x) {
        let tables = (&tables.cos_td, &tables.sin_td);
        kernels::head_norm_rope_backward(dy, x, (weight, eps), tables, (dx, dweight));
        return;
    }
    let size = dy.size();
    let dy_nhd = dy.permute([1, 0, 2, 3]).reshape([size[1], size[0] * size[2], size[3]]);
    let inverse = tables.inverse();
    let (found, added) = ops::head_norm_rope_backward(&dy_nhd, x, (weight, eps), &inverse);
    dx.shallow_clone().copy_(&found);
    let _ = dweight.shallow_clone().g_add_(&added);
}

/// [N, heads, D] -> contiguous [kv heads, N, group, D].
pub(crate) fn regroup(x_nhd: &Tensor, kv_heads: i64) -> Tensor {
    let size = x_nhd.size();
    x_nhd.unflatten(1, [kv_heads, size[1] / kv_heads]).permute([1, 0, 2, 3]).contiguous()
}

/// `silu(gate) * up` of [N, 2I].
pub(crate) fn swiglu(gate_up: &Tensor) -> Tensor {
    if kernels::supports(gate_up) { kernels::swiglu(gate_up) } else { ops::swiglu(gate_up) }
}

/// Gradient of [`swiglu`] [N, 2I], and its value again.
pub(crate) fn swiglu_backward(dy: &Tensor, gate_up: &Tensor) -> (Tensor, Tensor) {
    if kernels::supports(gate_up) {
        return kernels::swiglu_backward(dy, gate_up);
    }
    (ops::swiglu_backward(dy, gate_up), ops::swiglu(gate_up))
}

/// Folds a part of an attention (`out` [1, j, rows, D], `lse` [1, j, rows]) into the merged one.
pub(crate) fn merge(merged: (&Tensor, &Tensor), part: (&Tensor, &Tensor)) {
    let (merged_out, merged_lse) = merged;
    let (out, lse) = part;
    if kernels::supports(out) {
        for head in 0..out.size()[1] {
            let of = |x: &Tensor| x.get(0).get(head);
            let lse = of(lse).contiguous();
            kernels::merge_attention(&of(merged_out), &of(merged_lse), &of(out), &lse);
        }
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
    use tch::{Device, Kind};

    use super::*;
    use crate::ops::Rotary;

    const EPS: f64 = 1e-6;

    fn random(shape: &[i64]) -> Tensor {
        Tensor::randn(shape, (Kind::Double, Device::Cpu))
    }

    /// Runs `f` in float64 (libtorch's operations) and in float32 (kernels) on the same inputs.
    fn agree(inputs: &[Tensor], f: impl Fn(&[Tensor]) -> Vec<Tensor>) {
        let narrow: Vec<Tensor> = inputs.iter().map(|x| x.to_kind(Kind::Float)).collect();
        for (expected, found) in f(inputs).iter().zip(f(&narrow)) {
            assert_eq!(found.kind(), Kind::Float);
            let scale = expected.abs().max().double_value(&[]);
            let difference = (expected - found).abs().max().double_value(&[]);
            assert!(difference <= 2e-6 * scale, "{difference} of {scale}");
        }
    }

    #[test]
    fn kernels_agree_with_float64_on_norms() {
        // odd widths leave a rest behind the vector loops; many rows use several threads
        for (rows, dim) in [(1, 1), (7, 33), (513, 64)] {
            let inputs =
                [random(&[rows, dim]), random(&[rows, dim]), random(&[dim]), random(&[rows, dim])];
            agree(&inputs, |x| {
                let dweight = x[2].ones_like();
                let dx = norm_backward(&x[0], &x[1], (&x[2], EPS), (Some(&x[3]), &dweight));
                vec![norm(&x[1], (&x[2], EPS)), dx, dweight]
            });
        }
    }

    #[test]
    fn kernels_agree_with_float64_on_heads() {
        let (n, heads, kv_heads, dim) = (70, 6, 2, 8);
        let inputs = [
            random(&[n, (heads + 3) * dim]),
            random(&[dim]),
            random(&[kv_heads, n, heads / kv_heads, dim]),
        ];
        let positions = Tensor::arange(n, (Kind::Int64, Device::Cpu));
        agree(&inputs, |x| {
            let tables = Rotary::new(dim, 100.0, Device::Cpu).tables(&positions);
            let wide = x[0].narrow(1, dim, heads * dim);
            let (dx, dweight) = (x[0].zeros_like(), x[1].ones_like());
            let part = dx.narrow(1, 2 * dim, heads * dim);
            head_norm_rope_backward(&x[2], &wide, (&x[1], EPS), &tables, (&part, &dweight));
            vec![head_norm_rope(&wide, (&x[1], EPS), &tables, kv_heads), dx, dweight]
        });
    }

    #[test]
    fn kernels_agree_with_float64_on_swiglu() {
        let inputs = [random(&[300, 37]), random(&[300, 74]) * 8.0];
        agree(&inputs, |x| {
            let (dgate_up, again) = swiglu_backward(&x[0], &x[1]);
            vec![swiglu(&x[1]), dgate_up, again]
        });
    }

    #[test]
    fn a_hidden_part_has_no_share() {
        let (heads, rows, dim) = (2, 5, 8);
        let inputs = [
            random(&[1, heads, rows, dim]),
            random(&[1, heads, rows]),
            random(&[1, heads, rows, dim]),
            random(&[1, heads, rows]),
        ];
        agree(&inputs, |x| {
            let (out, lse) = (x[0].copy(), x[1].copy());
            merge((&out, &lse), (&x[2], &x[3]));
            let _ = x[3].get(0).get(0).fill_(-1e30);
            merge((&out, &lse), (&x[2], &x[3]));
            vec![out, lse]
        });
    }
}
