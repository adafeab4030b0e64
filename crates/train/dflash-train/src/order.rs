//! Which rank trains which packed row, and when.
//!
//! The rows of all epochs form one sequence that depends only on the data and the seed. An
//! optimizer step takes the next `ranks * accumulation` rows, regardless of epoch boundaries, so
//! every row is trained exactly once per epoch at any world size, and a position in the sequence is
//! all that a resumed run needs.
//!
//! The schedule depends on the number of rows, so all epochs are packed once, before the first
//! step: a rank keeps the rows that it will train, about 8 bytes per sample and epoch divided by
//! the number of ranks.

use dflash_data::{count_truncated, epoch_order, pack_rows};
use dflash_settings::Invalid;

use crate::Error;

/// Maximum epochs: each is planned before the first step, which takes time and memory.
const MAX_EPOCHS: u64 = 100_000;

/// Determines the sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packing<'a> {
    /// Lengths in tokens of the trainable samples.
    pub(crate) lengths: &'a [u32],
    pub(crate) total_seq_len: usize,
    pub(crate) seed: u64,
}

/// Where the sequence ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Length {
    /// After this many epochs.
    Epochs(u64),
    /// With the epoch that contains the last of this many rows.
    Rows(u64),
}

/// The rows at `first`, `first + stride`, …: one rank's share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stride {
    pub(crate) first: u64,
    pub(crate) stride: u64,
}

/// Positions of the epochs in the sequence.
#[derive(Clone, Debug)]
pub(crate) struct RowOrder {
    /// First position of each epoch, and the end.
    starts: Vec<u64>,
}

/// A packed row's epoch and samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlannedRow {
    pub(crate) epoch: u64,
    /// Sample indices in the dataset.
    pub(crate) samples: Vec<u32>,
}

impl Packing<'_> {
    pub(crate) fn epoch(&self, epoch: u64) -> Vec<Vec<u32>> {
        let order = epoch_order(self.lengths.len(), self.seed, epoch);
        pack_rows(&order, self.lengths, self.total_seq_len)
    }

    pub(crate) fn cut_note(&self) -> Option<String> {
        let (all, length) = (self.lengths.len(), self.total_seq_len);
        let cut = count_truncated(self.lengths, length);
        let note = format!(
            "{cut} of {all} samples are longer than --total-seq-len {length} and are cut to it"
        );
        (cut > 0).then_some(note)
    }
}

impl Length {
    /// Refuses more than [`MAX_EPOCHS`], with `rows` rows per epoch.
    fn check(self, rows: u64) -> Result<(), Error> {
        let epochs = match self {
            Self::Epochs(epochs) => epochs,
            Self::Rows(needed) => needed.div_ceil(rows.max(1)),
        };
        if epochs <= MAX_EPOCHS {
            return Ok(());
        }
        let (key, found) = match self {
            Self::Epochs(_) => ("epochs", epochs.to_string()),
            Self::Rows(_) => ("max_steps", format!("good for {epochs} passes")),
        };
        let expected = format!("more than {MAX_EPOCHS} passes over the data must be a mistake");
        Err(Invalid::new(key, found, expected).into())
    }
}

impl RowOrder {
    /// Packs the whole sequence; returns the epochs' positions and the rows of `share`.
    pub(crate) fn plan(
        packing: Packing<'_>,
        length: Length,
        share: Stride,
    ) -> Result<(Self, Vec<PlannedRow>), Error> {
        let mut order = Self { starts: vec![0] };
        let mut planned = Vec::new();
        for epoch in 0.. {
            let start = order.rows();
            let enough = match length {
                Length::Epochs(epochs) => epoch >= epochs,
                Length::Rows(needed) => start >= needed,
            };
            // if no sample has tokens, no number of epochs is enough
            if enough || (epoch > 0 && start == 0) {
                break;
            }
            let rows = packing.epoch(epoch);
            length.check(rows.len() as u64)?;
            order.starts.push(start + rows.len() as u64);
            let own = (start..).zip(rows).filter(|(place, _)| share.has(*place));
            planned.extend(own.map(|(_, samples)| PlannedRow { epoch, samples }));
        }
        Ok((order, planned))
    }

    pub(crate) fn rows(&self) -> u64 {
        *self.starts.last().expect("there is an end")
    }

    /// The epoch of the row at `position`; at the end, the number of epochs.
    pub(crate) fn epoch_of(&self, position: u64) -> u64 {
        self.starts.partition_point(|&start| start <= position) as u64 - 1
    }

    /// Epochs completed at `position`, including the fraction of the current one.
    pub(crate) fn progress(&self, position: u64) -> f64 {
        let epoch = self.epoch_of(position) as usize;
        let Some(end) = self.starts.get(epoch + 1) else { return epoch as f64 };
        let start = self.starts[epoch];
        epoch as f64 + (position - start) as f64 / (end - start).max(1) as f64
    }
}

impl Stride {
    fn has(self, place: u64) -> bool {
        place >= self.first && (place - self.first).is_multiple_of(self.stride)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Stride = Stride { first: 0, stride: 1 };

    fn plan(length: Length, share: Stride) -> (RowOrder, Vec<PlannedRow>) {
        let lengths: Vec<u32> = (0..101).map(|i| 10 + i % 23).collect();
        let packing = Packing { lengths: &lengths, total_seq_len: 64, seed: 7 };
        RowOrder::plan(packing, length, share).unwrap()
    }

    #[test]
    fn ranks_share_the_sequence_without_loss() {
        let (order, alone) = plan(Length::Epochs(3), ALL);
        assert_eq!(alone.len() as u64, order.rows());
        let begun = 5;
        for ranks in [2, 3] {
            let share = |rank| Stride { first: begun + rank, stride: ranks };
            let shares: Vec<Vec<PlannedRow>> =
                (0..ranks).map(|rank| plan(Length::Epochs(3), share(rank)).1).collect();
            for (position, row) in alone[begun as usize..].iter().enumerate() {
                let (rank, index) = (position as u64 % ranks, position as u64 / ranks);
                assert_eq!(&shares[rank as usize][index as usize], row);
            }
            assert_eq!(shares.iter().map(Vec::len).sum::<usize>(), alone.len() - begun as usize);
        }
    }

    #[test]
    fn each_epoch_trains_each_sample_once() {
        let (order, rows) = plan(Length::Epochs(3), ALL);
        for epoch in 0..3 {
            let own = rows.iter().filter(|row| row.epoch == epoch);
            let mut samples: Vec<u32> = own.flat_map(|row| row.samples.clone()).collect();
            samples.sort_unstable();
            assert_eq!(samples, (0..101).collect::<Vec<_>>());
        }
        for (place, row) in rows.iter().enumerate() {
            assert_eq!(order.epoch_of(place as u64), row.epoch);
        }
    }

    #[test]
    fn as_many_epochs_as_the_rows_need_are_packed() {
        let (three, _) = plan(Length::Epochs(3), ALL);
        let needed = |rows| plan(Length::Rows(rows), ALL).0.starts;
        assert_eq!(needed(three.rows()), three.starts);
        assert_eq!(needed(three.starts[2] + 1), three.starts);
        assert_eq!(needed(three.starts[2]), three.starts[..3]);
        assert_eq!(needed(0), [0]);
    }

    #[test]
    fn epochs_beyond_reason_are_refused() {
        let packing = Packing { lengths: &[4, 4], total_seq_len: 4, seed: 7 };
        let refuse = |length| RowOrder::plan(packing, length, ALL).unwrap_err().to_string();
        assert!(refuse(Length::Epochs(100_001)).starts_with("--epochs is 100001, but"));
        assert!(refuse(Length::Rows(200_001)).starts_with("--max-steps is good for 100001 passes"));
        let nothing = Packing { lengths: &[0], ..packing };
        assert_eq!(RowOrder::plan(nothing, Length::Rows(9), ALL).unwrap().0.rows(), 0);
    }

    #[test]
    fn cut_samples_are_said() {
        let packing = |total_seq_len| Packing { lengths: &[9, 10, 11, 30], total_seq_len, seed: 7 };
        assert_eq!(packing(30).cut_note(), None);
        let note = packing(10).cut_note().unwrap();
        assert!(note.starts_with("2 of 4 samples are longer than --total-seq-len 10"), "{note}");
    }

    #[test]
    fn progress_counts_epochs() {
        let (order, _) = plan(Length::Epochs(3), ALL);
        assert_eq!(order.progress(0), 0.0);
        assert_eq!(order.progress(order.starts[1]), 1.0);
        assert_eq!(order.progress(order.rows()), 3.0);
    }
}
