//! Operations shared by target and draft: RMS norm, rotary embedding, SwiGLU, each with its
//! gradient, and attention.
//!
//! The draft's training pass runs without autograd: it keeps what the gradients below need and
//! calls them itself. This bounds its memory and lets it reuse buffers. The forward functions are
//! differentiable, so a target can also be trained with autograd.

use dflash_kernels::kernels::{Kernels, RmsWeight};
use tch::{Device, Kind, Tensor};

/// `x / rms(x) * weight` over the last dimension, computed in float32 whatever the input.
///
/// Shapes: `x` [.., D], `weight` `[D]`; result as `x`.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Tensor {
    let x_f32 = x.to_kind(accumulate_kind(x));
    let scale = reciprocal_rms(&x_f32, eps);
    (x_f32 * scale).to_kind(x.kind()) * weight
}

/// `1 / sqrt(mean(x^2) + eps)` over the last dimension, which stays with size 1.
pub fn reciprocal_rms(x: &Tensor, eps: f64) -> Tensor {
    let kind = x.kind();
    (x.square().mean_dim([-1i64].as_slice(), true, kind) + eps).rsqrt()
}

/// The type for norm arithmetic: float32, or float64 in gradient checks.
pub fn accumulate_kind(x: &Tensor) -> Kind {
    if x.kind() == Kind::Double { Kind::Double } else { Kind::Float }
}

/// Gradient of [`rms_norm`] with respect to its input and its weight.
///
/// `dy`, `x` [.., D]; the weight's gradient is summed over all rows. Returns (`dx`, `dweight`).
pub fn rms_norm_backward(dy: &Tensor, x: &Tensor, weight: &Tensor, eps: f64) -> (Tensor, Tensor) {
    let kind = accumulate_kind(x);
    let x_f32 = x.to_kind(kind);
    let dy_f32 = dy.to_kind(kind);
    let scale = reciprocal_rms(&x_f32, eps);
    let normed = &x_f32 * &scale;
    let dim = *x.size().last().expect("a normalised tensor has a dimension");
    let dweight =
        (&dy_f32 * &normed).reshape([-1, dim]).sum_dim_intlist([0i64].as_slice(), false, kind);
    let dnormed = dy_f32 * weight.to_kind(kind);
    let projected = (&dnormed * &normed).mean_dim([-1i64].as_slice(), true, kind);
    let dx = (dnormed - normed * projected) * scale;
    (dx.to_kind(x.kind()), dweight)
}

/// Cosines and sines, one row per position.
#[derive(Debug)]
pub struct RotaryTables {
    /// [T, D/2], float32 (float64 for a float64 [`Rotary`]).
    pub cos_td: Tensor,
    /// [T, D/2].
    pub sin_td: Tensor,
}

impl RotaryTables {
    /// Tables of the inverse rotation, which also computes the rotation's gradient.
    pub fn inverse(&self) -> Self {
        Self { cos_td: self.cos_td.shallow_clone(), sin_td: self.sin_td.neg() }
    }

    /// Applies `take` to both tables.
    pub fn map(&self, take: impl Fn(&Tensor) -> Tensor) -> Self {
        Self { cos_td: take(&self.cos_td), sin_td: take(&self.sin_td) }
    }

    /// Rows `start .. start + length`.
    pub fn narrow(&self, start: i64, length: i64) -> Self {
        self.map(|table| table.narrow(0, start, length))
    }
}

/// Rotary position embedding.
#[derive(Debug)]
pub struct Rotary {
    inverse_frequency: Tensor,
    /// Factor on cosines and sines.
    attention_factor: f64,
    /// How a head's elements are paired for rotation.
    pub pairs: Pairs,
    /// Separate frequencies for long sequences (LongRoPE).
    pub long: Option<LongContext>,
}

/// How a head's elements are paired for rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairs {
    /// Element i with element i + D/2, as in most Hugging Face models.
    Halves,
    /// Element 2i with element 2i + 1.
    Neighbours,
}

/// Frequencies for sequences longer than a threshold.
#[derive(Debug)]
pub struct LongContext {
    /// [D/2].
    pub inverse_frequency: Tensor,
    /// Longest sequence, in tokens, that uses the short frequencies.
    pub beyond: i64,
}

impl Rotary {
    /// Frequencies `theta^(-2i/head_dim)`.
    pub fn new(head_dim: i64, theta: f64, device: Device) -> Self {
        // Transformers computes the exponent in float32; so do we, to agree in the last bit.
        let exponent = Tensor::arange_start_step(0, head_dim, 2, (Kind::Int64, device))
            .to_kind(Kind::Float)
            / head_dim as f64;
        let base = Tensor::from(theta as f32).to_device(device);
        Self::of_frequencies(base.pow(&exponent).reciprocal(), 1.0, Pairs::Halves)
    }

    /// From frequencies [D/2]; cosines and sines are multiplied by `attention_factor`.
    pub(crate) fn of_frequencies(
        inverse_frequency: Tensor,
        attention_factor: f64,
        pairs: Pairs,
    ) -> Self {
        Self { inverse_frequency, attention_factor, pairs, long: None }
    }

    /// Adds separate frequencies for long sequences.
    pub(crate) fn with_long(self, long: LongContext) -> Self {
        Self { long: Some(long), ..self }
    }

    /// Tables for `positions` `[T]` (int64). With [`LongContext`], positions from `beyond` on use
    /// the long frequencies.
    pub fn tables(&self, positions: &Tensor) -> RotaryTables {
        match &self.long {
            None => self.turned(positions, &self.inverse_frequency),
            Some(long) => {
                let is_long = positions.ge(long.beyond).unsqueeze(-1);
                let frequency =
                    long.inverse_frequency.where_self(&is_long, &self.inverse_frequency);
                self.turned(positions, &frequency)
            }
        }
    }

    /// Tables for `positions` `[T]` of a long sequence; `None` without [`LongContext`].
    pub fn long_tables(&self, positions: &Tensor) -> Option<RotaryTables> {
        self.long.as_ref().map(|long| self.turned(positions, &long.inverse_frequency))
    }

    fn turned(&self, positions: &Tensor, frequency: &Tensor) -> RotaryTables {
        let angles = positions.to_kind(Kind::Float).unsqueeze(-1) * frequency;
        let (cos_td, sin_td) = (angles.cos(), angles.sin());
        if self.attention_factor == 1.0 {
            return RotaryTables { cos_td, sin_td };
        }
        let (cos_td, sin_td) = (cos_td * self.attention_factor, sin_td * self.attention_factor);
        RotaryTables { cos_td, sin_td }
    }
}

/// Rotates `x_thd` [T, heads, D] by the tables' T positions; same kind as `x_thd`.
pub fn rotate(x_thd: &Tensor, tables: &RotaryTables) -> Tensor {
    let kind = x_thd.kind();
    let cos = tables.cos_td.unsqueeze(1).to_kind(kind);
    let sin = tables.sin_td.unsqueeze(1).to_kind(kind);
    let halves = x_thd.chunk(2, -1);
    let (low, high) = (&halves[0], &halves[1]);
    Tensor::cat(&[low * &cos - high * &sin, high * &cos + low * &sin], -1)
}

/// `silu(gate) * up` of a fused projection [.., 2I] whose first half is the gate; result [.., I].
pub fn swiglu(gate_up: &Tensor) -> Tensor {
    let halves = gate_up.chunk(2, -1);
    halves[0].silu() * &halves[1]
}

/// Gradient of [`swiglu`]: `dy` [.., I], `gate_up` [.., 2I]; result [.., 2I].
pub fn swiglu_backward(dy: &Tensor, gate_up: &Tensor) -> Tensor {
    let halves = gate_up.chunk(2, -1);
    let (gate, up) = (&halves[0], &halves[1]);
    let sigmoid = gate.sigmoid();
    let silu = gate * &sigmoid;
    let dsilu = &sigmoid + &silu * (1.0 - &sigmoid);
    Tensor::cat(&[dy * up * dsilu, dy * silu], -1)
}

/// Attention scores that differ from `q k / sqrt(D)`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Scores<'a> {
    /// Replaces `1 / sqrt(D)`.
    pub scale: Option<f64>,
    /// Soft cap c: a score x becomes `c * tanh(x / c)`.
    pub softcap: Option<f64>,
    /// Attention sink: an extra score that takes softmax weight but has no value. One per head [N,
    /// 1], or one per query [N, rows].
    pub sinks_nr: Option<&'a Tensor>,
}

impl Scores<'_> {
    /// Calls `attend` with the sinks reshaped for queries folded into the rows of their key head.
    pub fn folded<T>(self, key_heads: i64, attend: impl FnOnce(Scores<'_>) -> T) -> T {
        let sinks = self.sinks_nr.map(|sinks| sinks.reshape([key_heads, -1]));
        attend(Scores { sinks_nr: sinks.as_ref(), ..self })
    }
}

/// Query chunk of [`scored_attention`], whose scores over all keys are in memory at once.
const SCORED_QUERIES: i64 = 256;

/// [`attention`] with custom scores: `q` [batch, heads, rows, D], `k` [batch, key heads, columns,
/// D], `v` [batch, key heads, columns, E].
pub fn scored_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    is_causal: bool,
    scores: Scores<'_>,
    kernels: Kernels,
) -> Tensor {
    if scores.softcap.is_none() && scores.sinks_nr.is_none() {
        return scaled_attention(q, k, v, mask, is_causal, scores.scale, kernels);
    }
    let size = q.size();
    let (rows, key_heads, columns) = (size[2], k.size()[1], k.size()[2]);
    let groups = size[1] / key_heads;
    let float = |x: &Tensor| x.to_kind(accumulate_kind(x));
    let (k, v) = (float(k).unsqueeze(2), float(v).unsqueeze(2));
    let scale = scores.scale.unwrap_or((size[3] as f64).sqrt().recip());
    let of_rows = |start: i64| {
        let length = SCORED_QUERIES.min(rows - start);
        let q = float(&q.narrow(2, start, length)).view([size[0], key_heads, groups, length, -1]);
        let mut scores_rc = q.matmul(&k.transpose(-1, -2)) * scale;
        if let Some(cap) = scores.softcap {
            scores_rc = (scores_rc / cap).tanh() * cap;
        }
        let mut scores_rc = scores_rc.view([size[0], size[1], length, columns]);
        if let Some(mask) = mask {
            scores_rc += if mask.size()[mask.dim() - 2] == 1 {
                mask.shallow_clone()
            } else {
                mask.narrow(-2, start, length)
            };
        } else if is_causal {
            let future = Tensor::ones([length, columns], (Kind::Bool, q.device()));
            let _ = scores_rc.masked_fill_(&future.triu(start + 1), f64::NEG_INFINITY);
        }
        let weights = match scores.sinks_nr {
            None => scores_rc.softmax(-1, scores_rc.kind()),
            Some(sinks) => {
                let sinks = match sinks.size()[1] {
                    1 => sinks.shallow_clone(),
                    _ => sinks.narrow(1, start, length),
                };
                let sinks =
                    float(&sinks).unsqueeze(-1).expand([size[0], size[1], length, 1], false);
                let all = Tensor::cat(&[&scores_rc, &sinks], -1);
                all.softmax(-1, all.kind()).narrow(-1, 0, columns)
            }
        };
        let weights = weights.view([size[0], key_heads, groups, length, columns]);
        weights.matmul(&v).view([size[0], size[1], length, -1])
    };
    let parts: Vec<Tensor> = (0..rows).step_by(SCORED_QUERIES as usize).map(of_rows).collect();
    Tensor::cat(&parts, 2).to_kind(q.kind())
}

/// Scaled dot-product attention of `q` [batch, heads, rows, D] over `k` and `v` [batch, key heads,
/// columns, D], masked or causal; heads are a multiple of key heads. libtorch picks the kernel; on
/// the portable path it uses one that exists on every device.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    is_causal: bool,
    kernels: Kernels,
) -> Tensor {
    scaled_attention(q, k, v, mask, is_causal, None, kernels)
}

/// [`attention`] with an optional scale instead of `1 / sqrt(D)`.
fn scaled_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    is_causal: bool,
    scale: Option<f64>,
    kernels: Kernels,
) -> Tensor {
    let groups = q.size()[1] / k.size()[1];
    if kernels == Kernels::Portable && q.device() == Device::Cpu {
        let none = None::<&Tensor>;
        return Tensor::internal_scaled_dot_product_attention_math(
            q,
            k,
            v,
            mask,
            0.0,
            is_causal,
            none,
            scale,
            groups > 1,
        )
        .0;
    }
    if groups > 1 && q.requires_grad() {
        // The CPU kernel's backward pass needs as many key heads as query heads.
        let repeat = |x: &Tensor| x.repeat_interleave_self_int(groups, 1, None);
        let (k, v) = (repeat(k), repeat(v));
        return Tensor::scaled_dot_product_attention(q, &k, &v, mask, 0.0, is_causal, scale, false);
    }
    Tensor::scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale, groups > 1)
}

/// Cached rows in `kind` with a contiguous last dimension. Copies if the cache uses the layout of
/// the compiled passes.
pub fn dense(x: &Tensor, kind: Kind) -> Tensor {
    let x = x.to_kind(kind);
    if x.stride().last() == Some(&1) { x } else { x.contiguous() }
}

/// Argmax of each row of `logits_rv` [R, V], `[R]`; the first of equal logits wins.
pub fn most_likely(logits_rv: &Tensor) -> Tensor {
    // Three to four times as fast as argmax on a CPU, where only this reduction is vectorised.
    logits_rv.max_dim(-1, false).1
}

/// Norm per head, then rotation: `x` [T, heads * D], `weight` `[D]`; result [T, heads, D].
pub fn head_norm_rope(x: &Tensor, weight: &Tensor, eps: f64, tables: &RotaryTables) -> Tensor {
    let head_dim = weight.size()[0];
    let x_thd = x.unflatten(1, [x.size()[1] / head_dim, head_dim]);
    rotate(&rms_norm(&x_thd, weight, eps), tables)
}

/// Gradient of [`head_norm_rope`] for `dy_thd` [T, heads, D]: (`dx` [T, heads * D], `dweight`).
/// `inverse` holds the inverse of the forward tables.
pub fn head_norm_rope_backward(
    dy_thd: &Tensor,
    x: &Tensor,
    RmsWeight { weight, eps }: RmsWeight<'_>,
    inverse: &RotaryTables,
) -> (Tensor, Tensor) {
    let x_thd = x.unflatten(1, [dy_thd.size()[1], dy_thd.size()[2]]);
    let (dx_thd, dweight) = rms_norm_backward(&rotate(dy_thd, inverse), &x_thd, weight, eps);
    (dx_thd.flatten(1, 2), dweight)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflash_test_support::seeded;

    const F64: (Kind, Device) = (Kind::Double, Device::Cpu);

    fn leaf(shape: &[i64]) -> Tensor {
        Tensor::randn(shape, F64).set_requires_grad(true)
    }

    fn close(actual: &Tensor, expected: &Tensor, tolerance: f64) {
        let difference = (actual - expected).abs().max().double_value(&[]);
        assert!(difference <= tolerance, "differs by {difference}");
    }

    #[test]
    fn rms_norm_gradient_is_autograds() {
        let _draws = seeded(tch::manual_seed);
        let (x, weight) = (leaf(&[3, 4, 6]), leaf(&[6]));
        let dy = Tensor::randn([3, 4, 6], F64);
        let loss = (rms_norm(&x, &weight, 1e-6) * &dy).sum(Kind::Double);
        loss.backward();
        let (dx, dweight) =
            tch::no_grad(|| rms_norm_backward(&dy, &x.detach(), &weight.detach(), 1e-6));
        close(&dx, &x.grad(), 1e-12);
        close(&dweight, &weight.grad(), 1e-12);
    }

    #[test]
    fn swiglu_gradient_is_autograds() {
        let _draws = seeded(tch::manual_seed);
        let gate_up = leaf(&[5, 8]);
        let dy = Tensor::randn([5, 4], F64);
        (swiglu(&gate_up) * &dy).sum(Kind::Double).backward();
        close(&swiglu_backward(&dy, &gate_up.detach()), &gate_up.grad(), 1e-12);
    }

    #[test]
    fn the_inverse_rotation_is_the_gradient_and_undoes_it() {
        let _draws = seeded(tch::manual_seed);
        let positions = Tensor::from_slice(&[0i64, 7, 1000]);
        let tables = Rotary::new(8, 10_000.0, Device::Cpu).tables(&positions);
        let x = leaf(&[3, 2, 8]);
        let dy = Tensor::randn([3, 2, 8], F64);
        let rotated = rotate(&x, &tables);
        (&rotated * &dy).sum(Kind::Double).backward();
        close(&rotate(&dy, &tables.inverse()), &x.grad(), 1e-12);
        // float32 tables: cos^2 + sin^2 is 1 only to rounding
        close(&rotate(&rotated.detach(), &tables.inverse()), &x.detach(), 1e-6);
        close(&rotated.detach().get(0), &x.detach().get(0), 0.0);
    }

    #[test]
    fn grouped_heads_give_the_same_with_and_without_gradient_on_both_paths() {
        let options = (Kind::Float, Device::Cpu);
        let q = Tensor::randn([1, 4, 6, 8], options);
        let (k, v) = (Tensor::randn([1, 2, 6, 8], options), Tensor::randn([1, 2, 6, 8], options));
        let plain = attention(&q, &k, &v, None, true, Kernels::Fast);
        let traced_q = q.copy().set_requires_grad(true);
        let traced = attention(&traced_q, &k, &v, None, true, Kernels::Fast);
        let portable = attention(&q, &k, &v, None, true, Kernels::Portable);
        close(&traced.detach(), &plain, 1e-6);
        close(&portable, &plain, 1e-6);
    }
}
