//! A row's labels on the device. On a GPU each small copy costs a launch, and a copy from pageable
//! memory makes the host wait, so a row's labels are uploaded in two copies; chunks are views.

use std::ops::Range;

use dflash_tensor::ops::accumulate_kind;
use dflash_tensor::upload;
use tch::Tensor;

use super::labels::BlockLabels;
use super::weight::Weighting;
use crate::draft::Head;

/// Labels of a row's supervised slots, on the device.
#[derive(Debug)]
pub(super) struct Placed<'a> {
    pub(super) row: &'a BlockLabels,
    slots_m: Tensor,
    tokens_m: Tensor,
    /// Weights by distance, if that weighting is used.
    decay_m: Option<Tensor>,
    /// Previous tokens of the row's predictions `[N]`, if the head needs them.
    pub(super) previous_n: Option<Tensor>,
    /// Blocks with a supervised slot, float64 scalar.
    pub(super) blocks: Tensor,
    /// Slots with a loss, float64 scalar.
    pub(super) slots: Tensor,
    /// Supervised slots by position in the block, float64 `[B]`.
    pub(super) per_slot_b: Tensor,
}

/// A chunk of whole blocks.
#[derive(Debug)]
pub(super) struct ChunkPlace {
    pub(super) block_size: i64,
    /// Index of the first block in the row.
    pub(super) first_block: i64,
    pub(super) blocks: i64,
    /// Slot indices in the row, `[m]`.
    pub(super) slots_m: Tensor,
    /// Labels, `[m]`.
    pub(super) tokens_m: Tensor,
    /// As [`Placed::decay_m`], `[m]`.
    pub(super) decay_m: Option<Tensor>,
}

impl<'a> Placed<'a> {
    /// Labels of `row` on the device of `hidden`, with the weights that do not depend on losses.
    pub(super) fn new(
        row: &'a BlockLabels,
        weighting: &Weighting,
        hidden: &Tensor,
        head: &dyn Head,
    ) -> Self {
        let count = row.slots().len() as i64;
        let previous: &[i64] = if head.is_plain() { &[] } else { row.previous() };
        let indices = upload(&[row.slots(), row.tokens(), previous].concat(), hidden.device());
        let slots = previous.len() as i64;
        let decay = weighting.by_distance(row);
        let (blocks, per_slot) = row.supervised_counts();
        let mut numbers = vec![blocks, count as f64];
        numbers.extend(&per_slot);
        numbers.extend(decay.iter().flatten());
        let numbers = upload(&numbers, hidden.device());
        let head = 2 + per_slot.len() as i64;
        let kind = accumulate_kind(hidden);
        Self {
            row,
            slots_m: indices.narrow(0, 0, count),
            tokens_m: indices.narrow(0, count, count),
            previous_n: (slots > 0).then(|| indices.narrow(0, 2 * count, slots)),
            decay_m: decay.map(|_| numbers.narrow(0, head, count).to_kind(kind)),
            blocks: numbers.get(0),
            slots: numbers.get(1),
            per_slot_b: numbers.narrow(0, 2, head - 2),
        }
    }

    /// The slots with indices `chunk`, which are those of whole blocks.
    pub(super) fn chunk(&self, chunk: &Range<usize>) -> ChunkPlace {
        let part = |x_m: &Tensor| x_m.narrow(0, chunk.start as i64, chunk.len() as i64);
        let block_size = self.row.block().rows as i64;
        let slots = &self.row.slots()[chunk.clone()];
        let first_block = slots[0] / block_size;
        ChunkPlace {
            block_size,
            first_block,
            blocks: slots[slots.len() - 1] / block_size - first_block + 1,
            slots_m: part(&self.slots_m),
            tokens_m: part(&self.tokens_m),
            decay_m: self.decay_m.as_ref().map(part),
        }
    }
}

impl ChunkPlace {
    /// Scatters `values_m` to the slots of the chunk's blocks, [blocks, B]; 0 elsewhere.
    pub(super) fn spread(&self, values_m: &Tensor) -> Tensor {
        let slots = self.blocks * self.block_size;
        Tensor::zeros([slots], (values_m.kind(), values_m.device()))
            .index_copy(0, &self.own_slots(), values_m)
            .view([self.blocks, self.block_size])
    }

    /// Inverse of [`Self::spread`], `[m]`.
    pub(super) fn gather(&self, values_ab: &Tensor) -> Tensor {
        values_ab.view([-1]).index_select(0, &self.own_slots())
    }

    /// Slot indices relative to the first block.
    fn own_slots(&self) -> Tensor {
        &self.slots_m - self.first_block * self.block_size
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::draft::{BlockShape, Dflash};

    #[test]
    fn a_chunk_is_a_view_of_what_was_copied_once() {
        let mask = [false, true, true, false, true, true];
        let tokens = [9, 1, 2, 9, 4, 5];
        let row = BlockLabels::from_slots(BlockShape::fill_in(3), &mask, &tokens, &[0; 6]);
        let hidden = Tensor::zeros([6, 2], (Kind::BFloat16, Device::Cpu));
        let placed = Placed::new(&row, &Weighting::Decay { gamma: 1.0 }, &hidden, &Dflash);
        let chunk = placed.chunk(&(2..4));
        let whole = placed.chunk(&(0..4));
        assert_eq!(whole.slots_m.data_ptr() as usize + 16, chunk.slots_m.data_ptr() as usize);
        assert_eq!(Vec::<i64>::try_from(&chunk.slots_m).unwrap(), [4, 5]);
        assert_eq!(Vec::<i64>::try_from(&chunk.tokens_m).unwrap(), [4, 5]);
        let decay = chunk.decay_m.as_ref().unwrap();
        assert_eq!(decay.kind(), Kind::Float);
        assert_eq!(Vec::<f32>::try_from(decay).unwrap(), [1.0, (-1.0f64).exp() as f32]);
        assert_eq!((chunk.first_block, chunk.blocks, whole.blocks), (1, 1, 2));
        let spread = chunk.spread(&Tensor::from_slice(&[7.0f32, 8.0]));
        assert_eq!(Vec::<f32>::try_from(spread.view([-1])).unwrap(), [0.0, 7.0, 8.0]);
        assert_eq!(Vec::<f32>::try_from(chunk.gather(&spread)).unwrap(), [7.0, 8.0]);
        let counts = [&placed.blocks, &placed.slots].map(|count| count.double_value(&[]));
        assert_eq!(counts, [2.0, 4.0]);
        assert_eq!(Vec::<f64>::try_from(&placed.per_slot_b).unwrap(), [0.0, 2.0, 2.0]);
        let dpace =
            Weighting::Dpace { alpha: 0.5, confidence: super::super::Confidence::CrossEntropy };
        assert!(Placed::new(&row, &dpace, &hidden, &Dflash).decay_m.is_none());
    }
}
