//! Labels of supervised slots, and their split into chunks.

use std::ops::Range;

use dflash_tensor::upload;
use tch::{Device, Tensor};

use super::vocabulary::DraftVocabulary;
use crate::draft::BlockShape;

/// Which token is the label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LabelSource {
    /// The data's token. If the target generated the data greedily, this is also its argmax.
    Data,
    /// The argmax of the target's distribution, within the pruned vocabulary if there is one.
    TargetArgmax,
}

/// A packed row as needed for labels.
#[derive(Clone, Copy, Debug)]
pub struct LabelledRow<'a> {
    /// `[T]`.
    pub input_ids: &'a [i64],
    /// `[T]`, true where the token is supervised.
    pub loss_mask: &'a [bool],
    /// First position of each document, and the end of the last.
    pub document_starts: &'a [usize],
}

/// The supervised slots of a row's blocks, in order.
#[derive(Clone, Debug, Default)]
pub struct BlockLabels {
    block: BlockShape,
    blocks: usize,
    slots: Vec<i64>,
    tokens: Vec<i64>,
    distribution_rows: Vec<i64>,
    /// For every slot the data's token before the one that it predicts.
    previous: Vec<i64>,
    /// Supervised slots with a token outside the draft's vocabulary: no loss, but a miss.
    misses: Vec<i64>,
}

impl BlockLabels {
    /// Labels of the blocks at `anchors`. A slot is supervised by the token that its row predicts,
    /// if that token is in the anchor's document and its loss mask is set.
    pub fn new(
        row: LabelledRow<'_>,
        anchors: &[usize],
        block: BlockShape,
        vocabulary: Option<&DraftVocabulary>,
    ) -> Self {
        let mut labels = Self { block, blocks: anchors.len(), ..Self::default() };
        for (number, &anchor) in anchors.iter().enumerate() {
            let next = row.document_starts.partition_point(|&start| start <= anchor);
            // position of the first row's token
            let first = anchor + block.shift();
            // an anchor row without a prediction gets its own token, which is not used
            let before = |row: usize| (first + row).saturating_sub(1).max(anchor);
            let last = row.input_ids.len() - 1;
            labels.previous.extend((0..block.rows).map(|at| row.input_ids[before(at).min(last)]));
            let end = row.document_starts[next].min(first + block.rows);
            for position in anchor + 1..end {
                if row.loss_mask[position] {
                    let slot = (number * block.rows + position - first) as i64;
                    labels.push(slot, row.input_ids[position], position as i64 - 1, vocabulary);
                }
            }
        }
        labels
    }

    /// Labels from every slot's `mask`, token and target row.
    pub fn from_slots(
        block: BlockShape,
        mask: &[bool],
        tokens: &[i64],
        distribution_rows: &[i64],
    ) -> Self {
        let blocks = mask.len() / block.rows;
        let mut labels = Self { block, blocks, ..Self::default() };
        for slot in (0..mask.len()).filter(|&slot| mask[slot]) {
            labels.push(slot as i64, tokens[slot], distribution_rows[slot], None);
        }
        labels
    }

    fn push(
        &mut self,
        slot: i64,
        token: i64,
        distribution_row: i64,
        vocabulary: Option<&DraftVocabulary>,
    ) {
        let token = vocabulary.map_or(token, |vocabulary| vocabulary.draft_id(token));
        if token < 0 {
            self.misses.push(slot);
        } else {
            self.slots.push(slot);
            self.tokens.push(token);
            self.distribution_rows.push(distribution_row);
        }
    }

    /// Shape of a block.
    pub fn block(&self) -> BlockShape {
        self.block
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Slots with a loss, ascending.
    pub fn slots(&self) -> &[i64] {
        &self.slots
    }

    /// Supervised slots that carry no loss because the draft's vocabulary lacks their token.
    pub fn misses(&self) -> &[i64] {
        &self.misses
    }

    /// For each slot that carries loss, the position whose hidden state predicts its token.
    pub fn distribution_rows(&self) -> &[i64] {
        &self.distribution_rows
    }

    /// Index ranges of [`Self::slots`] with at most `rows` slots each (but at least one block),
    /// split between blocks, so that weights that depend on a whole block can be computed per
    /// chunk.
    pub fn chunks(&self, rows: usize) -> Vec<Range<usize>> {
        let count = self.slots.len();
        let block_of = |index: usize| self.slots[index] / self.block.rows as i64;
        let between_blocks = |&end: &usize| end == count || block_of(end - 1) != block_of(end);
        let mut chunks = Vec::new();
        let mut start = 0;
        while start < count {
            let limit = (start + rows.max(1)).min(count);
            let end = (start + 1..=limit)
                .rev()
                .find(between_blocks)
                .or_else(|| (limit..=count).find(between_blocks))
                .expect("the last block ends with the slots");
            chunks.push(start..end);
            start = end;
        }
        chunks
    }

    /// The target's rows of all slots with a loss, `[M]` int64.
    pub fn distribution_rows_on(&self, device: Device) -> Tensor {
        upload(&self.distribution_rows, device)
    }

    /// For every slot, supervised or not, the data's token before the one that it predicts, as a
    /// target id. Empty for labels from [`Self::from_slots`].
    pub fn previous(&self) -> &[i64] {
        &self.previous
    }

    /// Labels of the slots with a loss, in the draft's vocabulary.
    pub fn tokens(&self) -> &[i64] {
        &self.tokens
    }

    /// Number of blocks with a supervised slot, and of supervised slots by position in the block,
    /// both including misses.
    pub(super) fn supervised_counts(&self) -> (f64, Vec<f64>) {
        let mut by_place = vec![0.0; self.block.rows];
        let mut blocks = vec![false; self.blocks];
        for &slot in self.slots.iter().chain(&self.misses) {
            by_place[slot as usize % self.block.rows] += 1.0;
            blocks[slot as usize / self.block.rows] = true;
        }
        let supervised = blocks.into_iter().filter(|&supervised| supervised).count();
        (supervised as f64, by_place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: LabelledRow<'static> = LabelledRow {
        input_ids: &[10, 11, 12, 13, 20, 21, 22],
        loss_mask: &[false, true, true, true, true, false, true],
        document_starts: &[0, 4, 7],
    };

    #[test]
    fn a_slot_is_labelled_by_its_own_position_within_its_document() {
        let labels = BlockLabels::new(ROW, &[1, 4], BlockShape::fill_in(4), None);
        // block 0 at 1: positions 2 and 3; position 4 is another document's
        // block 1 at 4: position 5 is masked, 6 counts, 7 does not exist
        assert_eq!(labels.slots, [1, 2, 6]);
        assert_eq!(labels.tokens, [12, 13, 22]);
        assert_eq!(labels.distribution_rows, [1, 2, 5]);
        assert_eq!(labels.previous, [11, 11, 12, 13, 20, 20, 21, 22]);
    }

    #[test]
    fn where_the_anchors_row_predicts_every_row_has_the_token_behind_it() {
        let block = BlockShape { rows: 3, first_predicting: 0 };
        let labels = BlockLabels::new(ROW, &[0, 4], block, None);
        // block 0 at 0: positions 1, 2 and 3; block 1 at 4: 5 is masked, 6, and 7 does not exist
        assert_eq!(labels.slots, [0, 1, 2, 4]);
        assert_eq!(labels.tokens, [11, 12, 13, 22]);
        assert_eq!(labels.distribution_rows, [0, 1, 2, 5]);
        assert_eq!(labels.previous, [10, 11, 12, 20, 21, 22]);
    }

    #[test]
    fn a_token_outside_the_pruned_vocabulary_is_a_miss() {
        let vocabulary = DraftVocabulary::new(vec![12, 22], 30);
        let labels = BlockLabels::new(ROW, &[1, 4], BlockShape::fill_in(4), Some(&vocabulary));
        assert_eq!(labels.slots, [1, 6]);
        assert_eq!(labels.tokens, [0, 1]);
        assert_eq!(labels.misses, [2]);
        assert_eq!(labels.supervised_counts(), (2.0, vec![0.0, 1.0, 2.0, 0.0]));
    }

    #[test]
    fn chunks_cover_all_slots_and_never_cut_a_block() {
        let mask = vec![true; 40];
        let labels = BlockLabels::from_slots(BlockShape::fill_in(8), &mask, &[0; 40], &[0; 40]);
        for rows in [1, 7, 8, 9, 17, 100] {
            let chunks = labels.chunks(rows);
            assert!(chunks.iter().cloned().flatten().eq(0..40), "{rows}");
            for chunk in chunks {
                assert_eq!((chunk.start % 8, chunk.end % 8), (0, 0), "{rows}");
                assert!(chunk.len() <= rows.max(8), "{rows}");
            }
        }
    }
}
