//! Compares log-probabilities computed from logits with those that a source reports, and finds the
//! scale that matches them.

use dflash_hidden_states::{Dtype, LogProbability};
use dflash_run::Agreement;
use tch::{Kind, Tensor};

/// Root mean square of the differences that rounding explains, in units in the last place of the
/// largest logit: each side rounds its logits by at most half a unit, plus earlier roundings.
/// Models in bfloat16 showed up to 0.45 units, wrong weights 1.6 and more (LOG.md).
const UNITS: f64 = 1.5;
/// Natural logarithm of the largest logit scale searched: 1/64 to 64.
const WIDEST: f64 = 4.2;
const STEPS: usize = 60;

/// The log-probabilities that a source reports, as positions in a sample.
#[derive(Debug)]
pub(super) struct Reported {
    /// Row of the state preceding the token.
    rows_n: Tensor,
    tokens_n: Tensor,
    values_n: Tensor,
}

impl Reported {
    pub(super) fn new(reported: &[LogProbability]) -> Self {
        let (mut rows, mut tokens, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for of in reported {
            rows.push(of.position as i64 - 1);
            tokens.push(of.token);
            values.push(of.value);
        }
        Self {
            rows_n: Tensor::from_slice(&rows),
            tokens_n: Tensor::from_slice(&tokens),
            values_n: Tensor::from_slice(&values),
        }
    }

    /// Without those at the ends of a sample of `tokens`, where shifted rows have no neighbour.
    pub(super) fn inner(reported: &[LogProbability], tokens: usize) -> Self {
        let is_inner = |of: &&LogProbability| (2..tokens).contains(&of.position);
        Self::new(&reported.iter().filter(is_inner).cloned().collect::<Vec<_>>())
    }

    pub(super) fn len(&self) -> usize {
        self.rows_n.size()[0] as usize
    }

    /// Log-probabilities from `logits_tv` at the reported positions, float32 on the host.
    fn ours(&self, logits_tv: &Tensor) -> Tensor {
        let device = logits_tv.device();
        let all_tv = logits_tv.to_kind(Kind::Float).log_softmax(-1, Kind::Float);
        let rows_n = self.rows_n.to_device(device);
        let chosen_n1 = self.tokens_n.to_device(device).unsqueeze(1);
        let ours_n = all_tv.index_select(0, &rows_n).gather(1, &chosen_n1, false).squeeze_dim(1);
        ours_n.to_device(tch::Device::Cpu)
    }

    /// Agreement of `logits_tv` with the reported values, for states of type `dtype`.
    pub(super) fn agreement(&self, logits_tv: &Tensor, dtype: Dtype) -> Agreement {
        let gaps_n = self.ours(logits_tv) - &self.values_n;
        let largest_logit = logits_tv.abs().max().to_kind(Kind::Double).double_value(&[]);
        Agreement {
            compared: self.len(),
            root_mean_square: root_mean_square(&gaps_n),
            largest: gaps_n.abs().max().double_value(&[]),
            bound: bound(largest_logit, dtype),
        }
    }

    /// The scale of `logits_tv` that best matches the reported values: a ternary search over its
    /// logarithm, in which the distance has a single minimum.
    pub(super) fn best_scale(&self, logits_tv: &Tensor) -> f64 {
        let logits_tv = logits_tv.to_kind(Kind::Float);
        let apart =
            |log: f64| root_mean_square(&(self.ours(&(&logits_tv * log.exp())) - &self.values_n));
        let (mut low, mut high) = (-WIDEST, WIDEST);
        for _ in 0..STEPS {
            let third = (high - low) / 3.0;
            if apart(low + third) < apart(high - third) {
                high -= third;
            } else {
                low += third;
            }
            if high - low < 1e-5 {
                break;
            }
        }
        (0.5 * (low + high)).exp()
    }

    /// Correlation of the log-probabilities from `logits_tv` with the reported ones.
    pub(super) fn correlation(&self, logits_tv: &Tensor) -> f64 {
        let centred = |x_n: Tensor| {
            let x_n = x_n.to_kind(Kind::Double);
            &x_n - x_n.mean(Kind::Double)
        };
        let (a_n, b_n) = (centred(self.ours(logits_tv)), centred(self.values_n.shallow_clone()));
        let product = |a: &Tensor, b: &Tensor| (a * b).sum(Kind::Double).double_value(&[]);
        product(&a_n, &b_n) / (product(&a_n, &a_n) * product(&b_n, &b_n)).sqrt().max(1e-30)
    }
}

pub(super) fn agrees(agreement: &Agreement) -> bool {
    agreement.root_mean_square <= agreement.bound
}

fn root_mean_square(x_n: &Tensor) -> f64 {
    (x_n * x_n).mean(Kind::Double).double_value(&[]).sqrt()
}

/// Difference that rounding explains for logits of magnitude up to `largest`.
fn bound(largest: f64, dtype: Dtype) -> f64 {
    // Mantissa bits: bfloat16's, and those of TensorFloat-32, which GPUs use for float32 matmuls.
    let bits = if dtype == Dtype::Bf16 { 7.0 } else { 10.0 };
    UNITS * (largest.max(1.0).log2().floor() - bits).exp2()
}

/// Mean loss in nats per token of predicting each next token from `logits_tv`.
pub(super) fn loss(logits_tv: &Tensor, input_ids: &[i64]) -> f64 {
    let last = input_ids.len() as i64 - 1;
    let labels_t = Tensor::from_slice(&input_ids[1..]).to_device(logits_tv.device());
    let logits_tv = logits_tv.narrow(0, 0, last).to_kind(Kind::Float);
    logits_tv.cross_entropy_for_logits(&labels_t).double_value(&[])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_follow_the_type_and_the_largest_logit() {
        assert_eq!(bound(7.9, Dtype::Bf16), 1.5 / 32.0);
        assert_eq!(bound(8.0, Dtype::Bf16), 1.5 / 16.0);
        assert_eq!(bound(0.1, Dtype::Bf16), 1.5 / 128.0);
        assert_eq!(bound(8.0, Dtype::F32), 1.5 / 128.0);
    }
}
