//! The order of an epoch and the rows that it is packed into.
//!
//! A packed row is the concatenation of whole documents, never padded. The packing depends only on
//! the order and the lengths, so every process computes the same one and takes its share of the
//! rows.

use crate::Sample;
use crate::random::{Domain, Stream};

/// A permutation of `0..len` for one epoch, the same for any number of processes.
pub fn epoch_order(len: usize, seed: u64, epoch: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..u32::try_from(len).unwrap_or(u32::MAX)).collect();
    Stream::new(Domain::Order, [seed, epoch, 0]).draw(&mut order, len);
    order
}

/// Fills rows of at most `total_seq_len` tokens with documents in the given order; a document that
/// does not fit starts the next row. A document longer than a row is cut to it (see
/// [`count_truncated`]), an empty one is skipped.
///
/// # Panics
/// When `order` names a document that `lengths` does not have.
pub fn pack_rows(order: &[u32], lengths: &[u32], total_seq_len: usize) -> Vec<Vec<u32>> {
    let mut rows: Vec<Vec<u32>> = Vec::new();
    let mut room = 0;
    for &index in order {
        let length = (lengths[index as usize] as usize).min(total_seq_len);
        if length == 0 {
            continue;
        }
        if length > room {
            rows.push(Vec::new());
            room = total_seq_len;
        }
        room -= length;
        if let Some(row) = rows.last_mut() {
            row.push(index);
        }
    }
    rows
}

/// Documents longer than a row, which packing cuts.
pub fn count_truncated(lengths: &[u32], total_seq_len: usize) -> usize {
    lengths.iter().filter(|&&length| length as usize > total_seq_len).count()
}

/// Where a dataset of `len` samples is split: training takes `0..split`, validation the rest. The
/// product is truncated, as speculators does.
pub fn split_index(len: usize, train_ratio: f64) -> usize {
    (len as f64 * train_ratio) as usize
}

/// Several documents end to end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedRow {
    /// Token ids, `[T]`.
    pub input_ids: Vec<i64>,
    /// Whether each token is supervised, `[T]`.
    pub loss_mask: Vec<bool>,
    /// Where each document starts, and the end: one entry more than documents, from 0 to `T`.
    pub document_starts: Vec<usize>,
    /// The index of each document's sample in the dataset.
    pub samples: Vec<u32>,
}

impl PackedRow {
    /// Concatenates samples, each with its index, up to `total_seq_len` tokens: the one that
    /// crosses the limit is cut, later ones are dropped.
    pub fn from_samples(samples: &[(u32, Sample)], total_seq_len: usize) -> Self {
        let mut row = Self {
            input_ids: Vec::new(),
            loss_mask: Vec::new(),
            document_starts: vec![0],
            samples: Vec::new(),
        };
        for (index, sample) in samples {
            let room = total_seq_len - row.input_ids.len();
            let kept = sample.input_ids.len().min(room);
            if kept == 0 {
                continue;
            }
            row.input_ids.extend_from_slice(&sample.input_ids[..kept]);
            row.loss_mask.extend_from_slice(&sample.loss_mask[..kept]);
            row.document_starts.push(row.input_ids.len());
            row.samples.push(*index);
        }
        row
    }

    /// Keeps the documents whose entry of `keep` is true, as if the others had never been packed.
    pub fn keep_documents(&mut self, keep: &[bool]) {
        let whole = std::mem::replace(self, Self::from_samples(&[], 0));
        for (index, document) in whole.documents().enumerate().filter(|(index, _)| keep[*index]) {
            self.input_ids.extend_from_slice(&whole.input_ids[document.clone()]);
            self.loss_mask.extend_from_slice(&whole.loss_mask[document]);
            self.document_starts.push(self.input_ids.len());
            self.samples.push(whole.samples[index]);
        }
    }

    /// The documents' ranges of positions.
    pub fn documents(&self) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        self.document_starts.windows(2).map(|pair| pair[0]..pair[1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(lengths: &[u32], total: usize, expect: &[&[u32]]) {
        let order: Vec<u32> = (0..lengths.len() as u32).collect();
        assert_eq!(pack_rows(&order, lengths, total), expect, "{lengths:?} in {total}");
    }

    #[test]
    fn packing_is_greedy_in_order_and_drops_nothing() {
        check(&[4, 4, 4], 8, &[&[0, 1], &[2]]);
        check(&[8, 1, 8], 8, &[&[0], &[1], &[2]]);
        check(&[20, 1], 8, &[&[0], &[1]]);
        check(&[3, 0, 3], 8, &[&[0, 2]]);
        check(&[], 8, &[]);
        assert_eq!(count_truncated(&[8, 9, 20], 8), 2);
    }

    #[test]
    fn the_order_is_a_permutation_of_its_own_for_each_seed_and_epoch() {
        let order = epoch_order(1000, 7, 0);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1000).collect::<Vec<_>>());
        assert_eq!(order, epoch_order(1000, 7, 0));
        assert_ne!(order, epoch_order(1000, 7, 1));
        assert_ne!(order, epoch_order(1000, 8, 0));
        // Pinned: a resumed run must repeat the order of the run that was saved.
        assert_eq!(epoch_order(8, 0, 0), [3, 0, 6, 7, 1, 5, 4, 2]);
    }

    fn sample(ids: &[i64]) -> Sample {
        Sample { input_ids: ids.to_vec(), loss_mask: ids.iter().map(|id| id % 2 == 1).collect() }
    }

    #[test]
    fn a_row_keeps_its_documents_apart() {
        let samples = [(9, sample(&[1, 2, 3])), (4, sample(&[5])), (2, sample(&[6, 7, 8]))];
        let row = PackedRow::from_samples(&samples, 6);
        assert_eq!(row.input_ids, [1, 2, 3, 5, 6, 7]);
        assert_eq!(row.loss_mask, [true, false, true, true, false, true]);
        assert_eq!(row.document_starts, [0, 3, 4, 6]);
        assert_eq!(row.samples, [9, 4, 2]);
        assert_eq!(row.documents().collect::<Vec<_>>(), [0..3, 3..4, 4..6]);
    }

    #[test]
    fn documents_that_go_leave_the_row_of_the_others() {
        let samples = [
            (0, sample(&[0, 1, 2])),
            (1, sample(&[1, 2, 3, 4])),
            (2, sample(&[0, 2, 4, 6, 8])),
            (3, sample(&[1, 3, 5, 7, 9, 10])),
        ];
        // The last document is cut to five tokens.
        let mut row = PackedRow::from_samples(&samples, 17);
        row.keep_documents(&[false, true, false, true]);
        let others = [samples[1].clone(), (3, sample(&[1, 3, 5, 7, 9]))];
        assert_eq!(row, PackedRow::from_samples(&others, 17));
        row.keep_documents(&[false; 2]);
        assert_eq!(row, PackedRow::from_samples(&[], 17));
    }
}
