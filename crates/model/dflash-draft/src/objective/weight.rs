//! Slot weights and the loss denominator.

use tch::{Kind, Tensor};

use super::labels::BlockLabels;
use super::placed::ChunkPlace;
use crate::draft::BlockShape;

/// Added to the number of supervised slots, as in speculators, to avoid dividing by zero.
pub const MASKED_SLOTS_EPSILON: f64 = 1e-5;

/// Weight of a slot within its block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Weighting {
    /// `exp(-(k - 1) / gamma)` (DFlash paper; gamma 7, 5, 4 for blocks of 16, 10, 8).
    Decay {
        /// Distance in slots at which the weight has fallen to 1/e.
        gamma: f64,
    },
    /// D-PACE (arXiv 2605.18810): a slot's contribution to the expected accepted length.
    Dpace {
        /// Smoothing of confidences towards 1.
        alpha: f64,
        /// Loss from which a slot's confidence is computed.
        confidence: Confidence,
    },
}

/// The loss that D-PACE uses; both are the same for cross-entropy alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Confidence {
    /// Cross-entropy, as its authors define it.
    CrossEntropy,
    /// The weighted term, as in speculators.
    Term,
}

/// Divisor of the weighted sum of losses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denominator {
    /// The sum of the weights.
    Weights,
    /// The number of blocks with a supervised slot.
    Blocks,
    /// The number of supervised slots plus [`MASKED_SLOTS_EPSILON`].
    MaskedSlots,
}

/// `exp(-k / gamma)` for predicting slots, k starting at 0, and 0 for a slot before them.
pub fn decay_weights(block: BlockShape, gamma: f64) -> Vec<f64> {
    (0..block.rows)
        .map(|slot| match slot.checked_sub(block.first_predicting) {
            Some(distance) => (-(distance as f64) / gamma).exp(),
            None => 0.0,
        })
        .collect()
}

/// D-PACE weights [A, B] of whole blocks from `ce_ab` and `mask_ab` [A, B]; 0 where the mask is 0.
pub fn dpace_weights(ce_ab: &Tensor, mask_ab: &Tensor, alpha: f64) -> Tensor {
    let confidence: Tensor = ce_ab.neg().exp() * (1.0 - alpha) + alpha;
    let unmasked: Tensor = 1.0 - mask_ab;
    let smoothed = confidence * mask_ab + unmasked;
    let prefix = smoothed.cumprod(1, None::<Kind>) * mask_ab;
    // sum from slot k on, computed in reverse
    prefix.flip([1]).cumsum(1, None::<Kind>).flip([1]) * mask_ab
}

impl Weighting {
    /// Weights `[m]` of a chunk's slots, from their cross-entropies and losses `[m]`.
    pub(super) fn weights(&self, ce_m: &Tensor, loss_m: &Tensor, place: &ChunkPlace) -> Tensor {
        match *self {
            Self::Decay { .. } => {
                let decay_m = place.decay_m.as_ref();
                decay_m.expect("labels are placed with the weighting").shallow_clone()
            }
            Self::Dpace { alpha, confidence } => {
                let source_m = match confidence {
                    Confidence::CrossEntropy => ce_m,
                    Confidence::Term => loss_m,
                };
                let mask_ab = place.spread(&source_m.ones_like());
                place.gather(&dpace_weights(&place.spread(source_m), &mask_ab, alpha))
            }
        }
    }

    /// Weights of a row's slots, if they only depend on position.
    pub(super) fn by_distance(&self, labels: &BlockLabels) -> Option<Vec<f64>> {
        let Self::Decay { gamma } = *self else { return None };
        let table = decay_weights(labels.block(), gamma);
        let slots = labels.slots().iter();
        Some(slots.map(|&slot| table[slot as usize % table.len()]).collect())
    }
}

impl Denominator {
    /// Added to the summed denominators before dividing.
    pub fn epsilon(self) -> f64 {
        if self == Self::MaskedSlots { MASKED_SLOTS_EPSILON } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dpace_weight_is_the_later_slots_share_of_the_expected_length() {
        // by hand: s = [1, .75, .5, 1], P = [., .75, .375, .]; slot 3 is masked
        let ce =
            Tensor::from_slice(&[0.0f64, (0.5f64).ln().abs(), f64::INFINITY, 0.0]).view([1, 4]);
        let mask = Tensor::from_slice(&[0.0f64, 1.0, 1.0, 0.0]).view([1, 4]);
        let weights = Vec::<f64>::try_from(dpace_weights(&ce, &mask, 0.5).view([-1])).unwrap();
        let expected = [0.0, 0.75 + 0.375, 0.375, 0.0];
        for (weight, expected) in weights.iter().zip(expected) {
            assert!((weight - expected).abs() < 1e-12, "{weights:?}");
        }
    }

    #[test]
    fn decay_starts_at_one() {
        let weights = decay_weights(BlockShape::fill_in(4), 4.0);
        assert_eq!(weights[..2], [0.0, 1.0]);
        assert!((weights[2] - (-0.25f64).exp()).abs() < 1e-15);
    }
}
