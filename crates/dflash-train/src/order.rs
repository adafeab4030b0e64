//! Which packed row is trained when, and by whom.
//!
//! All epochs' rows form one sequence that depends on the data and the seed alone. An optimizer
//! step takes the next `ranks * accumulation` of them, wherever an epoch ends, so every row is
//! trained exactly once per epoch at any world size, and a position in the sequence is all that a
//! resumed run needs.

use dflash_data::{epoch_order, pack_rows};

/// The sequence of packed rows of all epochs.
#[derive(Clone, Debug)]
pub(crate) struct RowOrder {
    /// (dataset row, tokens) of the samples that can be trained.
    lengths: Vec<u32>,
    total_seq_len: usize,
    seed: u64,
    /// First position of each epoch, and the end.
    starts: Vec<u64>,
}

/// One packed row's place and content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlannedRow {
    pub(crate) epoch: u64,
    /// Dataset rows.
    pub(crate) samples: Vec<u32>,
}

impl RowOrder {
    pub(crate) fn new(lengths: &[u32], total_seq_len: usize, seed: u64, epochs: u64) -> Self {
        let mut order = Self { lengths: lengths.to_vec(), total_seq_len, seed, starts: vec![0] };
        for epoch in 0..epochs {
            let rows = order.pack(epoch).len() as u64;
            order.starts.push(order.starts[epoch as usize] + rows);
        }
        order
    }

    fn pack(&self, epoch: u64) -> Vec<Vec<u32>> {
        let order = epoch_order(self.lengths.len(), self.seed, epoch);
        pack_rows(&order, &self.lengths, self.total_seq_len)
    }

    /// Says how many samples do not fit into a row.
    pub(crate) fn cut_note(&self) -> Option<String> {
        let long = |length: &&u32| **length as usize > self.total_seq_len;
        let cut = self.lengths.iter().filter(long).count();
        let (all, length) = (self.lengths.len(), self.total_seq_len);
        (cut > 0).then(|| {
            format!(
                "{cut} of {all} samples are longer than --total-seq-len {length} and are cut to it"
            )
        })
    }

    /// Rows of all epochs.
    pub(crate) fn rows(&self) -> u64 {
        *self.starts.last().expect("there is an end")
    }

    /// The epoch of the row at `position`; at the end, the number of epochs.
    pub(crate) fn epoch_of(&self, position: u64) -> u64 {
        self.starts.partition_point(|&start| start <= position) as u64 - 1
    }

    /// Share of the epoch at `position` that lies before it, plus the epoch.
    pub(crate) fn progress(&self, position: u64) -> f64 {
        let epoch = self.epoch_of(position) as usize;
        let Some(end) = self.starts.get(epoch + 1) else { return epoch as f64 };
        let start = self.starts[epoch];
        epoch as f64 + (position - start) as f64 / (end - start).max(1) as f64
    }

    /// The rows at `first`, `first + stride`, ... : one rank's share.
    pub(crate) fn every(
        &self,
        first: u64,
        stride: u64,
    ) -> impl Iterator<Item = PlannedRow> + Clone + Send + use<> {
        let order = self.clone();
        let mut current: Option<(u64, Vec<Vec<u32>>)> = None;
        (0..).map(move |index| first + index * stride).map_while(move |position| {
            if position >= order.rows() {
                return None;
            }
            let epoch = order.epoch_of(position);
            if current.as_ref().is_none_or(|(held, _)| *held != epoch) {
                current = Some((epoch, order.pack(epoch)));
            }
            let (_, rows) = current.as_ref().expect("just packed");
            let samples = rows[(position - order.starts[epoch as usize]) as usize].clone();
            Some(PlannedRow { epoch, samples })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order() -> RowOrder {
        let lengths: Vec<u32> = (0..101).map(|i| 10 + i % 23).collect();
        RowOrder::new(&lengths, 64, 7, 3)
    }

    #[test]
    fn ranks_share_the_sequence_without_loss() {
        let order = order();
        let alone: Vec<PlannedRow> = order.every(0, 1).collect();
        assert_eq!(alone.len() as u64, order.rows());
        for ranks in [2, 3] {
            let shares: Vec<Vec<PlannedRow>> =
                (0..ranks).map(|rank| order.every(rank, ranks).collect()).collect();
            for (position, row) in alone.iter().enumerate() {
                let (rank, index) = (position as u64 % ranks, position as u64 / ranks);
                assert_eq!(&shares[rank as usize][index as usize], row);
            }
        }
    }

    #[test]
    fn each_epoch_trains_each_sample_once() {
        for epoch in 0..3 {
            let mut samples: Vec<u32> = order()
                .every(0, 1)
                .filter(|row| row.epoch == epoch)
                .flat_map(|row| row.samples)
                .collect();
            samples.sort_unstable();
            assert_eq!(samples, (0..101).collect::<Vec<_>>());
        }
    }

    #[test]
    fn cut_samples_are_said() {
        assert_eq!(order().cut_note(), None);
        let note = RowOrder::new(&[9, 10, 11, 30], 10, 7, 1).cut_note().unwrap();
        assert!(note.starts_with("2 of 4 samples are longer than --total-seq-len 10"), "{note}");
    }

    #[test]
    fn progress_counts_epochs() {
        let order = order();
        assert_eq!(order.progress(0), 0.0);
        assert_eq!(order.progress(order.starts[1]), 1.0);
        assert_eq!(order.progress(order.rows()), 3.0);
    }
}
