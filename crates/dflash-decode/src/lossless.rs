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
}

/// How two texts compare.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// The same tokens.
    Identical,
    /// They part at a tie.
    Tie(Difference),
    /// They part where the target has a clear preference.
    Different(Difference),
}

/// Verdicts over all answers.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Lossless {
    /// Whether every difference is a tie.
    pub holds: bool,
    /// Answers compared.
    pub responses: usize,
    /// Answers that are the same token for token.
    pub identical: usize,
    /// Largest logit gap that counts as a tie.
    pub tie_tolerance: f64,
    /// First differences that are ties.
    pub ties: Vec<Difference>,
    /// First differences that are not.
    pub failures: Vec<Difference>,
}

impl Lossless {
    /// No answer compared yet.
    pub fn new(tie_tolerance: f64) -> Self {
        Self { holds: true, tie_tolerance, ..Self::default() }
    }

    /// Adds the verdict on the next answer.
    pub fn record(&mut self, verdict: Verdict) {
        let response = self.responses;
        self.responses += 1;
        match verdict {
            Verdict::Identical => self.identical += 1,
            Verdict::Tie(difference) => self.ties.push(Difference { response, ..difference }),
            Verdict::Different(difference) => {
                self.failures.push(Difference { response, ..difference });
            }
        }
        self.holds = self.failures.is_empty();
    }
}

/// Compares `[plain, speculative]` answers to `prompt`; a first difference of at most `tolerance`
/// in the target's logits (computed over the common text) is a tie.
pub fn compare(
    target: &Target,
    prompt: &[i64],
    [plain, speculative]: [&[i64]; 2],
    tolerance: f64,
) -> Verdict {
    let same = plain.iter().zip(speculative).take_while(|(a, b)| a == b).count();
    if same == plain.len() && same == speculative.len() {
        return Verdict::Identical;
    }
    let tokens = (plain.get(same).copied(), speculative.get(same).copied());
    let logit_gap = match tokens {
        (Some(a), Some(b)) => Some(gap(target, &[prompt, &plain[..same]].concat(), a, b)),
        _ => None,
    };
    let difference = Difference {
        response: 0,
        position: same,
        plain: tokens.0,
        speculative: tokens.1,
        logit_gap,
    };
    match logit_gap {
        Some(gap) if gap <= tolerance => Verdict::Tie(difference),
        _ => Verdict::Different(difference),
    }
}

/// Distance of the target's logits of tokens `a` and `b` after `text`.
fn gap(target: &Target, text: &[i64], a: i64, b: i64) -> f64 {
    let ids_t = Tensor::from_slice(text).to_device(target.device());
    let length = text.len() as i64;
    no_grad(|| {
        let last = [target.num_layers() as u32];
        let hidden_td = &target.forward_packed(&ids_t, &[0, length], &last)[0];
        let logits_v =
            target.logits(&hidden_td.narrow(0, length - 1, 1)).get(0).to_kind(Kind::Double);
        (logits_v.double_value(&[a]) - logits_v.double_value(&[b])).abs()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn difference(logit_gap: Option<f64>) -> Difference {
        Difference { response: 0, position: 3, plain: Some(1), speculative: None, logit_gap }
    }

    #[test]
    fn ties_do_not_break_the_proof_and_failures_do() {
        let mut lossless = Lossless::new(1e-3);
        lossless.record(Verdict::Identical);
        lossless.record(Verdict::Tie(difference(Some(1e-4))));
        assert!(lossless.holds);
        lossless.record(Verdict::Different(difference(None)));
        assert!(!lossless.holds);
        assert_eq!((lossless.responses, lossless.identical), (3, 1));
        assert_eq!((lossless.ties[0].response, lossless.failures[0].response), (1, 2));
    }
}
