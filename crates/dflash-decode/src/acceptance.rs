//! Counting what the target accepts.
//!
//! The convention is the published one: a verify step drafts B-1 tokens and yields the accepted
//! ones plus one of the target's own, so tau is `1 + accepted`. A step is counted as it was
//! verified, also when the answer ends (by an end token or the length limit) inside the block: the
//! reference loop and vLLM's counters do the same, since they count before they cut.

use serde::Serialize;

/// Counts over any number of answers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Acceptance {
    steps: u64,
    /// `reached[k]`: steps in which at least k proposals were accepted.
    reached: Vec<u64>,
    /// Mean tokens per step of each answer.
    response_taus: Vec<f64>,
}

/// How slot `position` of a block fared.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Position {
    /// The slot, 1 for the first proposal.
    pub position: usize,
    /// Steps in which every proposal before it was accepted.
    pub reached: u64,
    /// Steps in which it was accepted too.
    pub accepted: u64,
    /// `accepted / reached`.
    pub conditional_rate: f64,
    /// `accepted / steps`, as vLLM reports it.
    pub rate: f64,
}

impl Acceptance {
    /// Counts for blocks of `block_size` slots.
    pub fn new(block_size: usize) -> Self {
        Self { reached: vec![0; block_size], ..Self::default() }
    }

    /// Adds one answer: accepted proposals of each of its steps. One without steps adds nothing.
    ///
    /// # Panics
    /// When a step accepted more than a block proposes.
    pub fn record(&mut self, accepted: &[usize]) {
        if accepted.is_empty() {
            return;
        }
        self.steps += accepted.len() as u64;
        for &count in accepted {
            self.reached[..=count].iter_mut().for_each(|steps| *steps += 1);
        }
        let total: usize = accepted.iter().sum();
        self.response_taus.push(1.0 + total as f64 / accepted.len() as f64);
    }

    /// Verify steps.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Steps in which at least k proposals were accepted, for k from 0 on.
    pub fn reached(&self) -> &[u64] {
        &self.reached
    }

    /// Mean tokens per step of each answer.
    pub fn response_taus(&self) -> &[f64] {
        &self.response_taus
    }

    /// Mean tokens per step over all steps (micro; vLLM's `1 + accepted / drafts`).
    pub fn tau_per_step(&self) -> f64 {
        1.0 + ratio(self.reached.iter().skip(1).sum(), self.steps)
    }

    /// Mean over answers of their mean tokens per step (macro; the paper's).
    pub fn tau_per_response(&self) -> f64 {
        let responses = self.response_taus.len().max(1) as f64;
        self.response_taus.iter().sum::<f64>() / responses
    }

    /// Every slot after the anchor.
    pub fn positions(&self) -> Vec<Position> {
        self.reached
            .windows(2)
            .enumerate()
            .map(|(before, counts)| Position {
                position: before + 1,
                reached: counts[0],
                accepted: counts[1],
                conditional_rate: ratio(counts[1], counts[0]),
                rate: ratio(counts[1], self.steps),
            })
            .collect()
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
        let mut acceptance = Acceptance::new(4);
        acceptance.record(&[3, 0, 0]);
        acceptance.record(&[2]);
        acceptance.record(&[]);
        assert_eq!(acceptance.steps(), 4);
        assert_eq!(acceptance.tau_per_step(), 1.0 + 5.0 / 4.0);
        assert_eq!(acceptance.tau_per_response(), (2.0 + 3.0) / 2.0);
    }

    #[test]
    fn a_slot_counts_only_when_all_before_it_matched() {
        let mut acceptance = Acceptance::new(4);
        acceptance.record(&[3, 0, 1, 1]);
        let counts: Vec<_> =
            acceptance.positions().iter().map(|p| (p.position, p.reached, p.accepted)).collect();
        assert_eq!(counts, [(1, 4, 3), (2, 3, 1), (3, 1, 1)]);
        let second = &acceptance.positions()[1];
        assert_eq!((second.conditional_rate, second.rate), (1.0 / 3.0, 0.25));
    }

    #[test]
    fn nothing_recorded_is_no_division_by_zero() {
        let acceptance = Acceptance::new(3);
        assert_eq!(acceptance.tau_per_step(), 1.0);
        assert_eq!(acceptance.tau_per_response(), 0.0);
        assert_eq!(acceptance.positions()[0].rate, 0.0);
    }
}
