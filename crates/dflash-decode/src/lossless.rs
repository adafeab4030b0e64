//! Proof that speculative decoding changed nothing: the two texts, token for token.
//!
//! Verifying a block and decoding one token take differently shaped matrix products, whose sums
//! round differently. Where two tokens' logits agree to that rounding, either text is the target's;
//! such a first difference is listed as a tie with its gap. Anything larger is a failure.

use dflash_model::target::Target;
use serde::Serialize;
use tch::{Kind, Tensor, no_grad};

/// Where two texts part, and by how little.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    /// Which answer, counted from 0.
    pub response: usize,
    /// Index of the first differing token in the answer.
    pub position: usize,
    /// Plain decoding's token; `None` when its text ends here.
    pub plain: Option<i64>,
    /// Speculative decoding's token; `None` when its text ends here.
    pub speculative: Option<i64>,
    /// How far the target's logits of the two are apart; `None` when one text ends here.
    pub logit_gap: Option<f64>,
    /// The largest gap that is a tie here; `None` when one text ends here.
    pub tie_tolerance: Option<f64>,
}

/// How two texts compare.
#[derive(Debug, Clone, PartialEq)]
pub enum Comparison {
    /// The same tokens.
    Identical,
    /// They part at a tie.
    Tie(Difference),
    /// They part where the target has a clear preference.
    Different(Difference),
}

/// Comparisons of all answers.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Lossless {
    /// Whether every difference is a tie.
    pub holds: bool,
    /// Answers compared.
    pub responses: usize,
    /// Answers that are the same token for token.
    pub identical: usize,
    /// Largest logit gap that counts as a tie; `None` where it follows the precision.
    pub tie_tolerance: Option<f64>,
    /// First differences that are ties.
    pub ties: Vec<Difference>,
    /// First differences that are not.
    pub failures: Vec<Difference>,
}

impl Lossless {
    /// No answer compared yet.
    pub fn new(tie_tolerance: Option<f64>) -> Self {
        Self { holds: true, tie_tolerance, ..Self::default() }
    }

    /// Adds the comparison on the next answer.
    pub fn record(&mut self, comparison: Comparison) {
        let response = self.responses;
        self.responses += 1;
        match comparison {
            Comparison::Identical => self.identical += 1,
            Comparison::Tie(difference) => self.ties.push(Difference { response, ..difference }),
            Comparison::Different(difference) => {
                self.failures.push(Difference { response, ..difference });
            }
        }
        self.holds = self.failures.is_empty();
    }
}

/// Compares `[plain, speculative]` answers to `prompt`. A first difference is a tie when the
/// target's logits of the two tokens, computed over the common text, are at most `tolerance` apart;
/// without one, as far as rounding in the target's precision reaches.
pub fn compare(
    target: &Target,
    prompt: &[i64],
    [plain, speculative]: [&[i64]; 2],
    tolerance: Option<f64>,
) -> Comparison {
    let same = plain.iter().zip(speculative).take_while(|(a, b)| a == b).count();
    if same == plain.len() && same == speculative.len() {
        return Comparison::Identical;
    }
    let tokens = (plain.get(same).copied(), speculative.get(same).copied());
    let preference = match tokens {
        (Some(a), Some(b)) => {
            Some(Preference::of(target, &[prompt, &plain[..same]].concat(), [a, b]))
        }
        _ => None,
    };
    let logit_gap = preference.as_ref().map(|preference| preference.gap);
    let tie_tolerance = preference.map(|preference| tolerance.unwrap_or(preference.rounding));
    let difference = Difference {
        response: 0,
        position: same,
        plain: tokens.0,
        speculative: tokens.1,
        logit_gap,
        tie_tolerance,
    };
    match logit_gap.zip(tie_tolerance) {
        Some((gap, tolerance)) if gap <= tolerance => Comparison::Tie(difference),
        _ => Comparison::Different(difference),
    }
}

/// How clearly a target prefers one of two tokens.
struct Preference {
    /// Distance of their logits.
    gap: f64,
    /// Distance that rounding can make.
    rounding: f64,
}

impl Preference {
    /// The preference after `text`. The gap is taken in float32 from the target's last state, since
    /// logits in bf16 would be rounded to steps as large as what is measured.
    fn of(target: &Target, text: &[i64], tokens: [i64; 2]) -> Self {
        let to_device = |ids: &[i64]| Tensor::from_slice(ids).to_device(target.device());
        let length = text.len() as i64;
        no_grad(|| {
            let last = [target.num_layers() as u32];
            let hidden_td = &target.forward_packed(&to_device(text), &[0, length], &last)[0];
            let state_1d = hidden_td.narrow(0, length - 1, 1);
            let pair_12 = target.logits_f32(&state_1d, &to_device(&tokens));
            let gap = (pair_12.double_value(&[0, 0]) - pair_12.double_value(&[0, 1])).abs();
            let largest = target.logits(&state_1d).abs().max().double_value(&[]);
            Self { gap, rounding: rounding(largest, target.dtype()) }
        })
    }
}

/// How far rounding can move two logits of a target in `kind` against each other, where the largest
/// logit has this `magnitude`: what was measured, with room to spare, in units in the last place.
///
/// Measured is how far the gap of the two best moves when tokens come in blocks of 16 instead of one
/// by one. Float32, whose sums round at every term: up to 104 units in 762 tokens of a trained target
/// of eight layers. Bf16, whose sums are kept in float32: up to 1.6 there and 4.4 in a random target
/// of 36 layers, and rounding the logits adds one.
fn rounding(magnitude: f64, kind: Kind) -> f64 {
    let (fraction_bits, units) = match kind {
        Kind::BFloat16 => (7, 8.0),
        Kind::Half => (10, 8.0),
        Kind::Double => (52, 512.0),
        _ => (23, 512.0),
    };
    let exponent = magnitude.max(f64::MIN_POSITIVE).log2().floor() as i32;
    units * 2f64.powi(exponent - fraction_bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn difference(logit_gap: Option<f64>) -> Difference {
        Difference {
            response: 0,
            position: 3,
            plain: Some(1),
            speculative: None,
            logit_gap,
            tie_tolerance: None,
        }
    }

    #[test]
    fn rounding_follows_precision_and_magnitude() {
        assert_eq!(rounding(16.0, Kind::BFloat16), 1.0);
        assert_eq!(rounding(31.9, Kind::BFloat16), 1.0);
        assert_eq!(rounding(15.9, Kind::BFloat16), 0.5);
        assert_eq!(rounding(16.0, Kind::Float), 2f64.powi(-10));
        assert_eq!(rounding(0.3, Kind::Float), 2f64.powi(-16));
        assert!(rounding(0.0, Kind::Float) >= 0.0);
    }

    #[test]
    fn ties_do_not_break_the_proof_and_failures_do() {
        let mut lossless = Lossless::new(None);
        lossless.record(Comparison::Identical);
        lossless.record(Comparison::Tie(difference(Some(1e-4))));
        assert!(lossless.holds);
        lossless.record(Comparison::Different(difference(None)));
        assert!(!lossless.holds);
        assert_eq!((lossless.responses, lossless.identical), (3, 1));
        assert_eq!((lossless.ties[0].response, lossless.failures[0].response), (1, 2));
    }
}
