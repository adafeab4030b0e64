//! How much each slot counts, and what the weighted sum is divided by.

use std::ops::Range;

use tch::{Kind, Tensor};

use super::labels::BlockLabels;

/// Added to the number of masked slots by speculators, so that an empty row divides by something.
pub const MASKED_SLOTS_EPSILON: f64 = 1e-5;

/// Weight of a slot within its block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Weighting {
    /// `exp(-(k - 1) / gamma)` (DFlash paper; gamma 7, 5, 4 for blocks of 16, 10, 8).
    Decay {
        /// Slots after which the weight has fallen to 1/e.
        gamma: f64,
    },
    /// D-PACE (arXiv 2605.18810): by how much a slot adds to the expected accepted length.
    Dpace {
        /// Smoothing of the confidences towards 1.
        alpha: f64,
        /// What a slot's confidence is computed from.
        confidence: Confidence,
    },
}

/// What D-PACE takes as a slot's loss; the same for cross-entropy alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Confidence {
    /// Cross-entropy, as its authors define it.
    CrossEntropy,
    /// The term that is weighted, as speculators does it.
    Term,
}

/// What the weighted sum of losses is divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denominator {
    /// The sum of the weights.
    Weights,
    /// The number of blocks with a supervised slot.
    Blocks,
    /// The number of supervised slots plus [`MASKED_SLOTS_EPSILON`].
    MaskedSlots,
}

/// `exp(-(k - first_slot) / gamma)` for each slot, 0 before `first_slot`.
pub fn decay_weights(block_size: usize, first_slot: usize, gamma: f64) -> Vec<f64> {
    (0..block_size)
        .map(|slot| match slot.checked_sub(first_slot) {
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
    // sum from slot k on = total minus what comes before k
    prefix.flip([1]).cumsum(1, None::<Kind>).flip([1]) * mask_ab
}

/// Where a chunk's slots lie in their blocks.
#[derive(Debug)]
pub(super) struct ChunkPlace {
    block_size: i64,
    first_slot: usize,
    blocks: i64,
    /// Slots relative to the chunk's first block, `[m]`.
    slots_m: Tensor,
    /// Slots within their blocks, on the host.
    offsets: Vec<usize>,
}

impl ChunkPlace {
    pub(super) fn new(labels: &BlockLabels, chunk: &Range<usize>, like: &Tensor) -> Self {
        let block_size = labels.block_size() as i64;
        let slots = &labels.slots()[chunk.clone()];
        let first_block = slots[0] / block_size;
        let relative: Vec<i64> = slots.iter().map(|slot| slot - first_block * block_size).collect();
        Self {
            block_size,
            first_slot: labels.first_slot(),
            blocks: slots[slots.len() - 1] / block_size - first_block + 1,
            offsets: slots.iter().map(|slot| (slot % block_size) as usize).collect(),
            slots_m: Tensor::from_slice(&relative).to_device(like.device()),
        }
    }
}

impl Weighting {
    /// Weights `[m]` of a chunk's slots, from their cross-entropies and losses `[m]`.
    pub(super) fn weights(&self, ce_m: &Tensor, loss_m: &Tensor, place: &ChunkPlace) -> Tensor {
        match *self {
            Self::Decay { gamma } => {
                let table = decay_weights(place.block_size as usize, place.first_slot, gamma);
                let weights: Vec<f64> = place.offsets.iter().map(|&slot| table[slot]).collect();
                Tensor::from_slice(&weights).to_kind(ce_m.kind()).to_device(ce_m.device())
            }
            Self::Dpace { alpha, confidence } => {
                let source_m = match confidence {
                    Confidence::CrossEntropy => ce_m,
                    Confidence::Term => loss_m,
                };
                let dense = |values_m: &Tensor| {
                    source_m
                        .new_zeros(
                            [place.blocks * place.block_size],
                            (source_m.kind(), source_m.device()),
                        )
                        .index_copy(0, &place.slots_m, values_m)
                        .view([place.blocks, place.block_size])
                };
                let weights = dpace_weights(&dense(source_m), &dense(&source_m.ones_like()), alpha);
                weights.view([-1]).index_select(0, &place.slots_m)
            }
        }
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
        let weights = decay_weights(4, 1, 4.0);
        assert_eq!(weights[..2], [0.0, 1.0]);
        assert!((weights[2] - (-0.25f64).exp()).abs() < 1e-15);
    }
}
