//! One answer: its times and its verify steps.

use dflash_run::Acceptance;
use serde::{Deserialize, Serialize};

/// An answer to one prompt in one decoding mode.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// Row of the set, counted from 0 over the answered rows.
    pub row: usize,
    /// Turn within the row, from 0.
    pub turn: usize,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the answer, its end token included.
    pub tokens: usize,
    /// Seconds from the prompt to the first token.
    pub first_token_s: f64,
    /// Seconds from the prompt to the last token.
    pub total_s: f64,
    /// Whether it ended at the length limit, not by itself.
    #[serde(default, skip_serializing_if = "is_false")]
    pub cut: bool,
    /// Its verify steps; `None` for plain decoding, or if only the sum over all answers is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verification: Option<Verification>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
fn is_false(flag: &bool) -> bool {
    !flag
}

/// Counts over verify steps. All of them can be added.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verification {
    /// Verify steps.
    pub steps: u64,
    /// Proposals accepted in them.
    pub accepted: u64,
    /// For each slot after the anchor, the steps in which it was accepted. Empty if not known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub accepted_by_slot: Vec<u64>,
}

impl Answer {
    /// Seconds from the first token to the last.
    pub fn decode_s(&self) -> f64 {
        self.total_s - self.first_token_s
    }

    /// Tokens after the first.
    pub fn decode_tokens(&self) -> f64 {
        self.tokens as f64 - 1.0
    }
}

impl Verification {
    /// Counts of steps; `accepted` has the number accepted in each, at most `proposals`.
    ///
    /// # Panics
    /// If a step accepted more than a block proposes.
    pub fn of(accepted: &[usize], proposals: usize) -> Self {
        let mut accepted_by_slot = vec![0; proposals];
        for &count in accepted {
            accepted_by_slot[..count].iter_mut().for_each(|steps| *steps += 1);
        }
        let total: usize = accepted.iter().sum();
        Self { steps: accepted.len() as u64, accepted: total as u64, accepted_by_slot }
    }

    /// Sum of all; by slot only if every entry with steps has counts by slot.
    pub fn sum<'a>(all: impl Iterator<Item = &'a Self> + Clone) -> Self {
        let mut sum = Self::default();
        let knows = |one: &Self| one.steps == 0 || !one.accepted_by_slot.is_empty();
        let all_know = all.clone().all(knows);
        for one in all {
            sum.steps += one.steps;
            sum.accepted += one.accepted;
            if all_know {
                let slots = sum.accepted_by_slot.len().max(one.accepted_by_slot.len());
                sum.accepted_by_slot.resize(slots, 0);
                for (sum, &one) in sum.accepted_by_slot.iter_mut().zip(&one.accepted_by_slot) {
                    *sum += one;
                }
            }
        }
        sum
    }

    /// Tokens per step: the accepted ones plus one of the target's own. `None` without steps.
    pub fn acceptance_length(&self) -> Option<f64> {
        (self.steps > 0).then(|| 1.0 + self.accepted as f64 / self.steps as f64)
    }

    /// The share of all steps in which each slot was accepted, the anchor's first (`None`).
    pub fn acceptance_by_slot(&self) -> Vec<Option<f64>> {
        let share = |&accepted: &u64| Some(accepted as f64 / self.steps.max(1) as f64);
        match self.accepted_by_slot.is_empty() {
            true => Vec::new(),
            false => std::iter::once(None).chain(self.accepted_by_slot.iter().map(share)).collect(),
        }
    }

    /// The same counts in the form of validations, with `lengths` as each answer's acceptance
    /// length.
    pub(crate) fn counts(&self, lengths: &[f64]) -> Acceptance {
        Acceptance {
            reached: std::iter::once(self.steps).chain(self.accepted_by_slot.clone()).collect(),
            responses: lengths.len() as u64,
            length_sum: lengths.iter().sum(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_counts_only_when_all_before_it_matched() {
        let counts = Verification::of(&[3, 0, 1, 1], 3);
        assert_eq!((counts.steps, counts.accepted), (4, 5));
        assert_eq!(counts.accepted_by_slot, [3, 1, 1]);
        assert_eq!(counts.acceptance_length(), Some(2.25));
        assert_eq!(counts.acceptance_by_slot(), [None, Some(0.75), Some(0.25), Some(0.25)]);
        assert_eq!(Verification::default().acceptance_length(), None);
    }

    #[test]
    fn sums_are_by_slot_only_where_all_parts_are() {
        let by_slot = Verification::of(&[1, 0], 2);
        let none = Verification::default();
        let total = Verification { steps: 3, accepted: 4, accepted_by_slot: Vec::new() };
        let sum = Verification::sum([&by_slot, &none, &by_slot].into_iter());
        assert_eq!(sum, Verification { steps: 4, accepted: 2, accepted_by_slot: vec![2, 0] });
        let sum = Verification::sum([&by_slot, &total].into_iter());
        assert_eq!(sum, Verification { steps: 5, accepted: 5, accepted_by_slot: Vec::new() });
    }
}
