//! Counts accepted proposals.
//!
//! The convention is the published one: a verify step drafts B-1 tokens and yields the accepted
//! ones plus one of the target's own, so its acceptance length (tau) is `1 + accepted`. A step is
//! counted as verified, even if the answer ends inside the block, as in the reference loop and in
//! vLLM's counters, which count before they truncate.

use serde::{Deserialize, Serialize};

/// Counts over any number of answers. All of them can be summed over ranks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Acceptance {
    /// `reached[k]`: steps in which at least k proposals were accepted.
    pub reached: Vec<u64>,
    /// Answers with at least one step.
    pub responses: u64,
    /// Sum of the acceptance lengths of these answers.
    pub length_sum: f64,
}

/// The metrics that follow from the counts, measured by real decoding.
#[expect(missing_docs, reason = "docs/formats.md describes every key")]
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AcceptanceFigures {
    #[serde(alias = "tau_per_step")]
    pub acceptance_length: f64,
    #[serde(alias = "tau_per_response")]
    pub acceptance_length_per_response: f64,
    #[serde(default)]
    pub acceptance_by_slot: Vec<Option<f64>>,
}

/// How often a slot of a block was reached and accepted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SlotCounts {
    /// The slot, 1 for the first proposal.
    pub slot: usize,
    /// Steps in which every proposal before it was accepted.
    pub reached: u64,
    /// Steps in which it was accepted too.
    pub accepted: u64,
    /// `accepted / reached`.
    pub conditional_acceptance: f64,
}

impl Acceptance {
    /// Counts for blocks of `proposals` proposals.
    pub fn new(proposals: usize) -> Self {
        Self { reached: vec![0; proposals + 1], ..Self::default() }
    }

    /// Adds one answer: the accepted proposals of each step. One without steps adds nothing.
    ///
    /// # Panics
    /// If a step accepted more than a block proposes.
    pub fn record(&mut self, accepted: &[usize]) {
        if accepted.is_empty() {
            return;
        }
        for &count in accepted {
            self.reached[..=count].iter_mut().for_each(|steps| *steps += 1);
        }
        let total: usize = accepted.iter().sum();
        self.responses += 1;
        self.length_sum += 1.0 + total as f64 / accepted.len() as f64;
    }

    /// Verify steps.
    pub fn steps(&self) -> u64 {
        self.reached.first().copied().unwrap_or_default()
    }

    /// The metrics of these counts.
    pub fn figures(&self) -> AcceptanceFigures {
        let (steps, after_anchor) = (self.steps(), self.reached.iter().skip(1));
        let shares = after_anchor.clone().map(|&count| Some(ratio(count, steps)));
        AcceptanceFigures {
            acceptance_length: 1.0 + ratio(after_anchor.sum(), steps),
            acceptance_length_per_response: self.length_sum / self.responses.max(1) as f64,
            acceptance_by_slot: std::iter::once(None).chain(shares).collect(),
        }
    }

    /// The counts of every slot after the anchor.
    pub fn slots(&self) -> Vec<SlotCounts> {
        let pairs = self.reached.windows(2).enumerate();
        let of = |(before, counts): (usize, &[u64])| SlotCounts {
            slot: before + 1,
            reached: counts[0],
            accepted: counts[1],
            conditional_acceptance: ratio(counts[1], counts[0]),
        };
        pairs.map(of).collect()
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn micro_and_macro_means_differ_by_their_weights() {
        let mut acceptance = Acceptance::new(3);
        acceptance.record(&[3, 0, 0]);
        acceptance.record(&[2]);
        acceptance.record(&[]);
        assert_eq!(acceptance.steps(), 4);
        let figures = acceptance.figures();
        assert_eq!(figures.acceptance_length, 1.0 + 5.0 / 4.0);
        assert_eq!(figures.acceptance_length_per_response, (2.0 + 3.0) / 2.0);
    }

    #[test]
    fn a_slot_counts_only_when_all_before_it_matched() {
        let mut acceptance = Acceptance::new(3);
        acceptance.record(&[3, 0, 1, 1]);
        let counts: Vec<_> = acceptance
            .slots()
            .iter()
            .map(|slot| (slot.slot, slot.reached, slot.accepted))
            .collect();
        assert_eq!(counts, [(1, 4, 3), (2, 3, 1), (3, 1, 1)]);
        assert_eq!(acceptance.slots()[1].conditional_acceptance, 1.0 / 3.0);
        let shares = [None, Some(0.75), Some(0.25), Some(0.25)];
        assert_eq!(acceptance.figures().acceptance_by_slot, shares);
    }

    #[test]
    fn nothing_recorded_is_no_division_by_zero() {
        let acceptance = Acceptance::new(2);
        let figures = acceptance.figures();
        assert_eq!(figures.acceptance_length, 1.0);
        assert_eq!(figures.acceptance_length_per_response, 0.0);
        assert_eq!(figures.acceptance_by_slot[1], Some(0.0));
    }
}
