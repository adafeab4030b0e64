//! The gated delta rule: linear attention with one memory matrix per head (Gated DeltaNet, Yang et
//! al. 2024).
//!
//! Each token decays the memory, `S = exp(g) S`, and writes the part of its value that its key does
//! not yet read, `S += k^T beta (v - k S)`; its output is `q S`. Queries, keys and values first
//! pass a short causal convolution. Few tokens are processed one by one. More are processed in
//! chunks: the updates within a chunk are one triangular system and products (the UT transform),
//! and only chunks are sequential. Both compute in float32. Shapes: `b` sequences, `t` tokens, `c`
//! channels of the convolution, `w` its width, `h` value heads, `k` and `v` dimensions of a key and
//! a value, `n` chunks, `i` tokens of a chunk.

use dflash_tensor::ops::{accumulate_kind, reciprocal_rms};
use tch::{Kind, Tensor};

use crate::layer::{Recurrence, State};
use crate::parallel::{Divisible, Shard};

/// Tokens per chunk, as in the released kernels: the system costs the square of it, the memory
/// update one product per chunk.
const CHUNK: i64 = 64;

/// Up to this many tokens are processed one by one, which is cheaper than a chunk.
const STEPS: i64 = 3;

/// Tokens of a prompt expanded at a time, to bound memory.
const SEGMENT: i64 = 16 * CHUNK;

/// Avoids division by 0 in l2 norms, as in the released kernels.
const L2_EPS: f64 = 1e-6;

/// Number and size of heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeltaHeads {
    /// Query and key heads; each is read by a whole number of value heads.
    pub(crate) keys: i64,
    pub(crate) values: i64,
    pub(crate) key_dim: i64,
    pub(crate) value_dim: i64,
}

impl DeltaHeads {
    /// Channels of the convolution: queries, keys, values.
    pub(crate) fn channels(&self) -> i64 {
        self.channel_parts().iter().sum()
    }

    /// Channels of queries, keys and values.
    pub(crate) fn channel_parts(&self) -> [i64; 3] {
        let keys = self.keys * self.key_dim;
        [keys, keys, self.values * self.value_dim]
    }

    /// Sizes divided by tensor parallelism: key heads, each with the value heads that read it.
    pub(crate) fn parallel_sizes(self) -> Vec<Divisible> {
        vec![
            Divisible::new("linear_num_key_heads", self.keys),
            Divisible::new("linear_num_value_heads", self.values),
        ]
    }

    /// A rank's heads.
    pub(crate) fn own(self, shard: &Shard) -> Self {
        Self { keys: shard.share(self.keys), values: shard.share(self.values), ..self }
    }

    /// Input elements per token of [`DeltaRule`].
    pub(crate) fn inputs(&self) -> i64 {
        self.channels() + 2 * self.values
    }
}

#[derive(Debug)]
pub(crate) struct DeltaRule {
    heads: DeltaHeads,
    /// The convolution's taps [W, C], oldest token first.
    taps_wc: Tensor,
    /// `exp(A_log)`.
    decay_h: Tensor,
    dt_bias_h: Tensor,
}

#[derive(Debug)]
struct DeltaState {
    /// The convolution's inputs of the last W-1 tokens [B, W-1, C].
    recent_bwc: Tensor,
    /// [B, H, K, V].
    memory_bhkv: Tensor,
}

/// Inputs of the rule: each [B, H, T, ..], `g` and `beta` [B, H, T].
struct DeltaInputRows {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
}

impl DeltaRule {
    /// From the checkpoint's `conv1d.weight` [C, 1, W], `A_log` `[H]` and `dt_bias` `[H]`.
    pub(crate) fn new(
        heads: DeltaHeads,
        conv_c1w: &Tensor,
        a_log_h: &Tensor,
        dt_bias_h: &Tensor,
    ) -> Self {
        let f32 = |x: &Tensor| x.to_kind(accumulate_kind(x));
        Self {
            heads,
            taps_wc: f32(conv_c1w).squeeze_dim(1).tr().contiguous(),
            decay_h: f32(a_log_h).exp(),
            dt_bias_h: f32(dt_bias_h),
        }
    }

    /// The state before the first token of `batch` sequences.
    fn start(&self, batch: i64) -> DeltaState {
        let DeltaHeads { values, key_dim, value_dim, .. } = self.heads;
        let size = self.taps_wc.size();
        let options = (self.taps_wc.kind(), self.taps_wc.device());
        DeltaState {
            recent_bwc: Tensor::zeros([batch, size[0] - 1, size[1]], options),
            memory_bhkv: Tensor::zeros([batch, values, key_dim, value_dim], options),
        }
    }

    /// Outputs [B, T, H*V] of tokens after `state`, and the new state. `inputs_bti` holds per token
    /// the queries, keys and values before the convolution, then the logits of `beta` and the time
    /// steps of each value head.
    fn advance(&self, inputs_bti: &Tensor, state: &DeltaState) -> (Tensor, DeltaState) {
        let mut state = DeltaState {
            recent_bwc: state.recent_bwc.shallow_clone(),
            memory_bhkv: state.memory_bhkv.shallow_clone(),
        };
        let mut outputs = Vec::new();
        for segment in inputs_bti.split(SEGMENT, 1) {
            let (rows, recent_bwc) = self.rows(&segment, &state.recent_bwc);
            let (out_bhtv, memory_bhkv) = match segment.size()[1] <= STEPS {
                true => steps(&rows, &state.memory_bhkv),
                false => chunks(&rows, &state.memory_bhkv),
            };
            state = DeltaState { recent_bwc, memory_bhkv };
            outputs.push(out_bhtv.transpose(1, 2).flatten(2, 3));
        }
        (Tensor::cat(&outputs, 1).to_kind(inputs_bti.kind()), state)
    }

    /// The rule's inputs for a segment, and the convolution's new state.
    fn rows(&self, inputs_bti: &Tensor, recent_bwc: &Tensor) -> (DeltaInputRows, Tensor) {
        let DeltaHeads { keys, values, key_dim, value_dim } = self.heads;
        let inputs = inputs_bti.to_kind(accumulate_kind(inputs_bti));
        let parts = inputs.split_with_sizes([self.heads.channels(), values, values], -1);
        let (mixed_btc, recent_bwc) = self.convolve(&parts[0], recent_bwc);
        let mixed = mixed_btc.split_with_sizes(self.heads.channel_parts(), -1);
        let heads_first = |x: Tensor| x.transpose(1, 2).contiguous();
        let normed = |x: &Tensor| {
            let x = x.unflatten(-1, [keys, key_dim]);
            let norm =
                (x.square().sum_dim_intlist([-1i64].as_slice(), true, x.kind()) + L2_EPS).rsqrt();
            heads_first((x * norm).repeat_interleave_self_int(values / keys, 2, None))
        };
        let rows = DeltaInputRows {
            q: normed(&mixed[0]) * (key_dim as f64).powf(-0.5),
            k: normed(&mixed[1]),
            v: heads_first(mixed[2].unflatten(-1, [values, value_dim])),
            beta: heads_first(parts[1].sigmoid()),
            g: heads_first((&parts[2] + &self.dt_bias_h).softplus() * self.decay_h.neg()),
        };
        (rows, recent_bwc)
    }

    /// Causal convolution per channel with SiLU; also returns the last W-1 inputs.
    fn convolve(&self, x_btc: &Tensor, recent_bwc: &Tensor) -> (Tensor, Tensor) {
        let (width, tokens) = (self.taps_wc.size()[0], x_btc.size()[1]);
        let all_btc = Tensor::cat(&[recent_bwc, x_btc], 1);
        let mut sum_btc = all_btc.narrow(1, 0, tokens) * self.taps_wc.get(0);
        for tap in 1..width {
            sum_btc = sum_btc.addcmul(&all_btc.narrow(1, tap, tokens), &self.taps_wc.get(tap));
        }
        (sum_btc.silu(), all_btc.narrow(1, tokens, width - 1).copy())
    }
}

impl Recurrence for DeltaRule {
    fn zero(&self, _like: &Tensor) -> State {
        self.start(1).into()
    }

    fn run(&self, inputs_ti: &Tensor, state: &State) -> (Tensor, State) {
        let (out_bto, after) = self.advance(&inputs_ti.unsqueeze(0), &DeltaState::of(state));
        (out_bto.squeeze_dim(0), after.into())
    }
}

impl DeltaState {
    fn of(State(parts): &State) -> Self {
        Self { recent_bwc: parts[0].shallow_clone(), memory_bhkv: parts[1].shallow_clone() }
    }
}

impl From<DeltaState> for State {
    fn from(state: DeltaState) -> Self {
        Self(vec![state.recent_bwc, state.memory_bhkv])
    }
}

/// Norm of a head's outputs with a SiLU gate: `x / rms(x) * weight * silu(gate)`, for `x` and
/// `gate` [T, H, V] and `weight` `[V]`. The weight is used as stored, even in models whose other
/// norms add one.
pub(crate) fn gated_norm(x: &Tensor, gate: &Tensor, weight_v: &Tensor, eps: f64) -> Tensor {
    let kind = accumulate_kind(x);
    let wide = x.to_kind(kind);
    let normed = (&wide * reciprocal_rms(&wide, eps)).to_kind(x.kind()) * weight_v;
    (normed * gate.to_kind(kind).silu()).to_kind(x.kind())
}

/// Processes token by token.
fn steps(rows: &DeltaInputRows, memory_bhkv: &Tensor) -> (Tensor, Tensor) {
    let mut memory = memory_bhkv.shallow_clone();
    let fade = rows.g.exp();
    let outputs: Vec<Tensor> = (0..rows.q.size()[2])
        .map(|t| {
            let at = |x: &Tensor| x.narrow(2, t, 1);
            let scalar = |x: &Tensor| at(x).unsqueeze(-1);
            let (q, k, v) = (at(&rows.q), at(&rows.k), at(&rows.v));
            memory = &memory * scalar(&fade);
            let written = (v - k.matmul(&memory)) * scalar(&rows.beta);
            memory = &memory + k.transpose(-1, -2) * written;
            q.matmul(&memory)
        })
        .collect();
    (Tensor::cat(&outputs, 2), memory)
}

/// Processes chunk by chunk. The last chunk is padded with tokens that neither write nor decay.
fn chunks(rows: &DeltaInputRows, memory_bhkv: &Tensor) -> (Tensor, Tensor) {
    let tokens = rows.q.size()[2];
    let chunk = CHUNK.min(tokens);
    let count = (tokens + chunk - 1) / chunk;
    let filled = count * chunk - tokens;
    let wide = |x: &Tensor| x.constant_pad_nd([0, 0, 0, filled]).unflatten(2, [count, chunk]);
    let narrow = |x: &Tensor| x.constant_pad_nd([0, filled]).unflatten(2, [count, chunk]);
    let (q, k, v) = (wide(&rows.q), wide(&rows.k), wide(&rows.v));
    let beta = narrow(&rows.beta).unsqueeze(-1);
    // Logarithm of the remaining share of the chunk's initial memory at each token; in float64,
    // since small differences of large sums are needed.
    let fade = narrow(&rows.g).cumsum(-1, Kind::Double);
    let left = |log: Tensor| log.to_kind(q.kind()).exp();
    let behind = Tensor::ones([chunk, chunk], (Kind::Bool, q.device())).triu(1);
    let between =
        left((fade.unsqueeze(-1) - fade.unsqueeze(-2)).masked_fill(&behind, f64::NEG_INFINITY));
    let since_start = left(fade.unsqueeze(-1));
    let last = fade.narrow(-1, chunk - 1, 1);
    let until_end = left((&last - &fade).unsqueeze(-1));
    let k_t = k.transpose(-1, -2);
    let k_beta = &k * &beta;
    // What each token writes depends on the earlier writes in its chunk: (I + L) X = B, for the
    // values and for the keys that read the memory before the chunk.
    let system = k_beta.matmul(&k_t) * &between;
    let right = Tensor::cat(&[v * beta, k_beta * &since_start], -1);
    let solved = system.linalg_solve_triangular(&right, false, true, true);
    let (key_dim, value_dim) = (k.size()[4], solved.size()[4] - k.size()[4]);
    let written = solved.narrow(-1, 0, value_dim);
    let reading = solved.narrow(-1, value_dim, key_dim);
    let scores = q.matmul(&k_t) * between;
    let q_start = &q * since_start;
    let k_end = (k * until_end).transpose(-1, -2);
    let kept = left(last.unsqueeze(-1));
    let mut memory = memory_bhkv.shallow_clone();
    let outputs: Vec<Tensor> = (0..count)
        .map(|n| {
            let at = |x: &Tensor| x.select(2, n);
            let written = at(&written) - at(&reading).matmul(&memory);
            let out = at(&q_start).matmul(&memory) + at(&scores).matmul(&written);
            memory = &memory * at(&kept) + at(&k_end).matmul(&written);
            out
        })
        .collect();
    (Tensor::cat(&outputs, 2).narrow(2, 0, tokens), memory)
}

#[cfg(test)]
mod tests {
    use dflash_test_support::seeded;
    use tch::Device;

    use super::*;

    const F64: (Kind, Device) = (Kind::Double, Device::Cpu);
    const HEADS: DeltaHeads = DeltaHeads { keys: 2, values: 6, key_dim: 8, value_dim: 5 };
    const WIDTH: i64 = 4;

    /// The rule with weights of O(1), and `tokens` inputs [B, T, I], in float64.
    fn problem(batch: i64, tokens: i64) -> ([Tensor; 3], Tensor) {
        let conv_c1w = Tensor::randn([HEADS.channels(), 1, WIDTH], F64) * 0.5;
        let a_log_h = Tensor::randn([HEADS.values], F64);
        let dt_bias_h = Tensor::randn([HEADS.values], F64);
        let inputs_bti = Tensor::randn([batch, tokens, HEADS.inputs()], F64);
        ([conv_c1w, a_log_h, dt_bias_h], inputs_bti)
    }

    fn rule(weights: &[Tensor; 3], kind: Kind) -> DeltaRule {
        let [conv, a_log, dt_bias] = weights.each_ref().map(|x| x.to_kind(kind));
        DeltaRule::new(HEADS, &conv, &a_log, &dt_bias)
    }

    /// The definition with scalar arithmetic, for one sequence from the start: outputs [T][H*V].
    fn naive([conv_c1w, a_log_h, dt_bias_h]: &[Tensor; 3], inputs_ti: &Tensor) -> Vec<Vec<f64>> {
        let matrix = |x: &Tensor| Vec::<Vec<f64>>::try_from(x).unwrap();
        let (taps, inputs) = (matrix(&conv_c1w.squeeze_dim(1)), matrix(inputs_ti));
        let [a_log, dt_bias] = [a_log_h, dt_bias_h].map(|x| Vec::<f64>::try_from(x).unwrap());
        let DeltaHeads { keys, values, key_dim, value_dim } = HEADS;
        let [keys, values, key_dim, value_dim] =
            [keys, values, key_dim, value_dim].map(|x| x as usize);
        let mut memory = vec![vec![vec![0.0; value_dim]; key_dim]; values];
        let mut outputs = Vec::new();
        for t in 0..inputs.len() {
            let mixed: Vec<f64> = (0..taps.len())
                .map(|c| {
                    let tap = |w: usize| {
                        let at = (t + w + 1).checked_sub(WIDTH as usize);
                        at.map_or(0.0, |at| taps[c][w] * inputs[at][c])
                    };
                    let sum: f64 = (0..WIDTH as usize).map(tap).sum();
                    sum / (1.0 + (-sum).exp())
                })
                .collect();
            let unit = |start: usize| {
                let x = &mixed[start..start + key_dim];
                let norm = (x.iter().map(|x| x * x).sum::<f64>() + L2_EPS).sqrt();
                x.iter().map(|x| x / norm).collect::<Vec<f64>>()
            };
            let mut output = Vec::new();
            for h in 0..values {
                let head = h / (values / keys);
                let (q, k) = (unit(head * key_dim), unit((keys + head) * key_dim));
                let v = &mixed[2 * keys * key_dim + h * value_dim..][..value_dim];
                let logits = &inputs[t][taps.len()..];
                let beta = 1.0 / (1.0 + (-logits[h]).exp());
                let step = (1.0 + (logits[values + h] + dt_bias[h]).exp()).ln();
                let fade = (-a_log[h].exp() * step).exp();
                let memory = &mut memory[h];
                memory.iter_mut().flatten().for_each(|x| *x *= fade);
                for d in 0..value_dim {
                    let read: f64 = (0..key_dim).map(|i| k[i] * memory[i][d]).sum();
                    (0..key_dim).for_each(|i| memory[i][d] += k[i] * beta * (v[d] - read));
                    let out: f64 = (0..key_dim).map(|i| q[i] * memory[i][d]).sum();
                    output.push(out / (key_dim as f64).sqrt());
                }
            }
            outputs.push(output);
        }
        outputs
    }

    fn largest_difference(one: &Tensor, other: &Tensor) -> f64 {
        assert_eq!(one.size(), other.size());
        (one.to_kind(Kind::Double) - other.to_kind(Kind::Double)).abs().max().double_value(&[])
    }

    /// float64 may differ from the definition by rounding, float32 by 1e-5 of outputs of O(1).
    #[test]
    fn chunks_and_steps_are_the_definition() {
        let _draws = seeded(tch::manual_seed);
        for tokens in [1, 2, STEPS, STEPS + 1, 16, 63, 64, 65, 129, 200, SEGMENT, SEGMENT + 2] {
            let (weights, inputs_bti) = problem(2, tokens);
            let expected: Vec<Vec<f64>> =
                (0..2).flat_map(|b| naive(&weights, &inputs_bti.get(b))).collect();
            let expected = Tensor::from_slice2(&expected).view([2, tokens, -1]);
            assert!(
                expected.abs().max().double_value(&[]) > 0.01,
                "outputs of no size prove nothing"
            );
            for (kind, bound) in [(Kind::Double, 1e-12), (Kind::Float, 1e-5)] {
                let rule = rule(&weights, kind);
                let (output, _) = rule.advance(&inputs_bti.to_kind(kind), &rule.start(2));
                let difference = largest_difference(&output, &expected);
                assert!(difference < bound, "{tokens} tokens in {kind:?} differ by {difference:e}");
            }
        }
    }

    #[test]
    fn a_sequence_may_be_cut_anywhere() {
        let _draws = seeded(tch::manual_seed);
        let tokens = 70;
        let (weights, inputs_bti) = problem(1, tokens);
        let rule = rule(&weights, Kind::Float);
        let inputs = inputs_bti.to_kind(Kind::Float);
        let (whole, end) = rule.advance(&inputs, &rule.start(1));
        for cut in 1..tokens {
            let (first, state) = rule.advance(&inputs.narrow(1, 0, cut), &rule.start(1));
            let (second, state) = rule.advance(&inputs.narrow(1, cut, tokens - cut), &state);
            let difference = largest_difference(&Tensor::cat(&[first, second], 1), &whole);
            assert!(difference < 1e-5, "cut at {cut}: {difference:e}");
            assert!(largest_difference(&state.memory_bhkv, &end.memory_bhkv) < 1e-5, "{cut}");
            assert_eq!(state.recent_bwc, end.recent_bwc, "{cut}");
        }
    }

    /// Memory that decays within a token, and memory that never does.
    #[test]
    fn strong_and_weak_decay_make_no_number_that_is_not_one() {
        let _draws = seeded(tch::manual_seed);
        for a_log in [-20.0, 6.0] {
            let (mut weights, inputs_bti) = problem(1, 100);
            weights[1] = Tensor::full([HEADS.values], a_log, F64);
            let expected = Tensor::from_slice2(&naive(&weights, &inputs_bti.get(0)));
            let rule = rule(&weights, Kind::Float);
            let (output, _) = rule.advance(&inputs_bti.to_kind(Kind::Float), &rule.start(1));
            let difference = largest_difference(&output.get(0), &expected);
            assert!(difference < 1e-5, "{a_log}: {difference:e}");
        }
    }

    #[test]
    fn half_precision_inputs_are_computed_in_float32() {
        let _draws = seeded(tch::manual_seed);
        let (weights, inputs_bti) = problem(1, 70);
        let rule = rule(&weights, Kind::Float);
        let half = inputs_bti.to_kind(Kind::BFloat16);
        let (output, state) = rule.advance(&half, &rule.start(1));
        let (expected, _) = rule.advance(&half.to_kind(Kind::Float), &rule.start(1));
        assert_eq!(output, expected.to_kind(Kind::BFloat16));
        assert_eq!((state.memory_bhkv.kind(), state.recent_bwc.kind()), (Kind::Float, Kind::Float));
    }
}
