//! Checks that speculative decoding changed nothing: compares the two texts token for token.
//!
//! Verifying a block and decoding one token use differently shaped matrix products, whose sums
//! round differently. If two tokens' logits agree up to that rounding, either text is the target's;
//! such a first difference is listed as a tie with its gap. Anything larger is a failure.

use std::fmt::{self, Display, Formatter};

use serde::{Deserialize, Serialize};

/// The first difference of two texts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// Which answer, counted from 0.
    pub response: usize,
    /// Index of the first differing token in the answer.
    pub position: usize,
    /// Plain decoding's token; `None` if its text ends here.
    pub plain: Option<i64>,
    /// Speculative decoding's token; `None` if its text ends here.
    pub speculative: Option<i64>,
    /// The difference of the target's logits of the two; `None` if one text ends here.
    pub logit_gap: Option<f64>,
    /// The largest gap that is a tie here; `None` if one text ends here.
    pub tie_tolerance: Option<f64>,
}

impl Difference {
    /// Whether the target prefers neither token by more than rounding.
    pub fn is_tie(&self) -> bool {
        self.logit_gap.zip(self.tie_tolerance).is_some_and(|(gap, tolerance)| gap <= tolerance)
    }
}

/// Comparisons of all answers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Lossless {
    /// Whether every difference is a tie.
    pub holds: bool,
    /// Answers compared.
    pub responses: usize,
    /// Answers that are identical token for token.
    pub identical: usize,
    /// Largest logit gap that counts as a tie; `None` if it depends on the precision.
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

    /// Adds the comparison of the next answer, `None` if its texts are the same.
    pub fn record(&mut self, difference: Option<Difference>) {
        let response = self.responses;
        self.responses += 1;
        match difference.map(|difference| Difference { response, ..difference }) {
            None => self.identical += 1,
            Some(difference) if difference.is_tie() => self.ties.push(difference),
            Some(difference) => self.failures.push(difference),
        }
        self.holds = self.failures.is_empty();
    }
}

impl Lossless {
    /// The comparisons of several sets as one; answers are numbered consecutively. `None` if there
    /// are none.
    pub(crate) fn sum<'a>(all: impl Iterator<Item = &'a Self>) -> Option<Self> {
        all.fold(None, |sum, one| {
            let Some(mut sum): Option<Self> = sum else { return Some(one.clone()) };
            let before = sum.responses;
            let later = |difference: &Difference| Difference {
                response: before + difference.response,
                ..difference.clone()
            };
            sum.ties.extend(one.ties.iter().map(later));
            sum.failures.extend(one.failures.iter().map(later));
            sum.responses += one.responses;
            sum.identical += one.identical;
            sum.holds &= one.holds;
            Some(sum)
        })
    }
}

impl Display for Difference {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let token = |token: Option<i64>| token.map_or("end".to_owned(), |id| id.to_string());
        write!(
            f,
            "answer {}, token {}: plain {}, speculative {}",
            self.response,
            self.position,
            token(self.plain),
            token(self.speculative)
        )?;
        match self.logit_gap.zip(self.tie_tolerance) {
            Some((gap, tie)) => write!(f, ", logits {gap:.1e} apart (a tie up to {tie:.1e})"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn difference(logit_gap: f64) -> Option<Difference> {
        Some(Difference {
            response: 0,
            position: 3,
            plain: Some(1),
            speculative: Some(2),
            logit_gap: Some(logit_gap),
            tie_tolerance: Some(1e-3),
        })
    }

    #[test]
    fn ties_do_not_break_the_proof_and_failures_do() {
        let mut lossless = Lossless::new(None);
        lossless.record(None);
        lossless.record(difference(1e-4));
        assert!(lossless.holds);
        lossless.record(difference(1e-2));
        assert!(!lossless.holds);
        assert_eq!((lossless.responses, lossless.identical), (3, 1));
        assert_eq!((lossless.ties[0].response, lossless.failures[0].response), (1, 2));
        let both = Lossless::sum([&lossless, &lossless].into_iter()).unwrap();
        assert_eq!((both.responses, both.identical, both.holds), (6, 2, false));
        assert_eq!(both.failures[1].response, 5);
        assert_eq!(Lossless::sum(std::iter::empty()), None);
    }
}
