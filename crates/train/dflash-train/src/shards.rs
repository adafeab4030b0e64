//! Divides the flat buffer of master weights and optimizer state among ranks (ZeRO stage 1).
//!
//! Shares are contiguous, ascending and together cover the whole buffer. A run that does not split
//! its state has one share, and every rank has a copy of it. Exchanges go in pieces of bounded
//! size, because shares may differ in length while a gather needs equal ones.
//!
//! Gradients are all-reduced whole even when the state is split, not reduce-scattered: the
//! all-reduce overlaps the backward pass bucket by bucket, the global norm is available, and a
//! split run gives the same numbers as an unsplit one. Rank 0 computes the norm and broadcasts it,
//! because different thread counts change the last bits and all ranks must clip alike.

use std::ops::Range;

use dflash_dist::Communicator;
use dflash_draft::DraftLayout;
use dflash_tensor::checkpoint::pieces;
use tch::{Device, Tensor};

use crate::Error;
use crate::optimizer::Groups;

/// Elements per rank in one exchange: about 16 MiB, far above a collective's fixed cost.
const PIECE: i64 = 4 << 20;

/// Shares of equal length begin at multiples of this many elements, a cache line of float32.
const ALIGNMENT: i64 = 16;

/// A rank among those of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rank {
    /// From 0.
    pub(crate) rank: usize,
    /// How many ranks there are.
    pub(crate) world_size: usize,
}

impl Rank {
    /// The rank of this process.
    pub(crate) fn of(communicator: &dyn Communicator) -> Self {
        Self { rank: communicator.rank(), world_size: communicator.world_size() }
    }
}

/// The shares of all ranks, and the index of this rank's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shards {
    ranges: Vec<Range<i64>>,
    own: usize,
}

impl Shards {
    /// Every rank holds everything.
    pub(crate) fn whole(elements: i64) -> Self {
        Self { ranges: std::iter::once(0..elements).collect(), own: 0 }
    }

    /// Shares of equal length, cut anywhere.
    pub(crate) fn even(elements: i64, Rank { rank, world_size }: Rank) -> Self {
        let ranks = world_size as i64;
        let lines = (elements + ALIGNMENT - 1) / ALIGNMENT;
        let bound = |rank: i64| (rank * lines / ranks * ALIGNMENT).min(elements);
        Self { ranges: (0..ranks).map(|rank| bound(rank)..bound(rank + 1)).collect(), own: rank }
    }

    /// Shares of whole parameters, as equal as possible.
    pub(crate) fn by_parameter(layout: &DraftLayout, Rank { rank, world_size }: Rank) -> Self {
        let elements = layout.elements();
        let offsets = layout.parameters().iter().map(|parameter| parameter.offset);
        let bounds: Vec<i64> = offsets.chain([elements]).collect();
        let nearest = |ideal: i64| {
            *bounds.iter().min_by_key(|bound| (*bound - ideal).abs()).expect("0 is a bound")
        };
        let ranks = world_size as i64;
        let cut = |rank: i64| nearest(rank * elements / ranks);
        Self { ranges: (0..ranks).map(|rank| cut(rank)..cut(rank + 1)).collect(), own: rank }
    }

    /// This rank's share.
    pub(crate) fn own(&self) -> Range<i64> {
        self.ranges[self.own].clone()
    }

    /// A view of this rank's share of a flat buffer.
    pub(crate) fn view(&self, flat: &Tensor) -> Tensor {
        let own = self.own();
        flat.narrow(0, own.start, own.end - own.start)
    }

    /// The shares of a buffer that holds only the norms, concatenated.
    pub(crate) fn of_norms(&self, layout: &DraftLayout) -> Self {
        let mut end = 0;
        let norms = |range| {
            let start = end;
            end += Groups::of(layout.parameters(), range).norm_elements();
            start..end
        };
        Self { ranges: self.ranges.iter().map(norms).collect(), own: self.own }
    }

    /// Whether ranks hold different shares.
    pub(crate) fn is_split(&self) -> bool {
        self.ranges.len() > 1
    }

    /// Elements of all shares.
    pub(crate) fn elements(&self) -> i64 {
        self.ranges.last().map_or(0, |range| range.end)
    }

    /// Fills the other ranks' shares of `flat`; this rank's share must be final. All ranks call it.
    pub(crate) fn fill(&self, communicator: &dyn Communicator, flat: &Tensor) -> Result<(), Error> {
        if !self.is_split() {
            return Ok(());
        }
        let own = self.view(flat);
        let length = |range: &Range<i64>| range.end - range.start;
        let device = device_of(&own, communicator);
        let longest = self.ranges.iter().map(length).max().unwrap_or(0);
        for begin in (0..longest).step_by(PIECE as usize) {
            let size = PIECE.min(longest - begin);
            let part = |range: &Range<i64>| (length(range) - begin).clamp(0, size);
            let input = Tensor::zeros([size], (own.kind(), device));
            let mine = part(&self.ranges[self.own]);
            if mine > 0 {
                input.narrow(0, 0, mine).copy_(&own.narrow(0, begin, mine));
            }
            let mut output = Tensor::empty([size * self.ranges.len() as i64], (own.kind(), device));
            communicator.all_gather(&mut output, &input)?;
            for (rank, range) in self.ranges.iter().enumerate().filter(|(_, r)| part(r) > 0) {
                if rank != self.own {
                    let piece = output.narrow(0, rank as i64 * size, part(range));
                    flat.narrow(0, range.start + begin, part(range)).copy_(&piece);
                }
            }
        }
        Ok(())
    }

    /// Passes all ranks' shares, from the first element to the last, to `take`; `own` is this
    /// rank's share. Each piece is broadcast by its owner, so a rank needs memory for only one. All
    /// ranks call it.
    pub(crate) fn stream(
        &self,
        communicator: &dyn Communicator,
        own: &Tensor,
        take: &mut dyn FnMut(&Tensor),
    ) -> Result<(), Error> {
        if !self.is_split() {
            take(own);
            return Ok(());
        }
        let device = device_of(own, communicator);
        for (rank, range) in self.ranges.iter().enumerate() {
            for piece in pieces(0..range.end - range.start) {
                let size = piece.end - piece.start;
                let mut part = if rank == self.own {
                    own.narrow(0, piece.start, size).to_device(device)
                } else {
                    Tensor::empty([size], (own.kind(), device))
                };
                communicator.broadcast(&mut part, rank)?;
                take(&part);
            }
        }
        Ok(())
    }
}

/// The device on which pieces of `share` are exchanged.
fn device_of(share: &Tensor, communicator: &dyn Communicator) -> Device {
    let device = share.device();
    if communicator.takes(device) { device } else { Device::Cpu }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(shards: &[Shards], elements: i64) {
        let ranges: Vec<_> = shards.iter().map(Shards::own).collect();
        assert_eq!((ranges[0].start, ranges[ranges.len() - 1].end), (0, elements));
        assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start), "{ranges:?}");
    }

    #[test]
    fn even_shares_are_the_whole_and_alike() {
        for (elements, ranks) in [(160, 2), (176, 3), (16, 4), (1_000_000, 7)] {
            let shards: Vec<_> = (0..ranks)
                .map(|rank| Shards::even(elements, Rank { rank, world_size: ranks }))
                .collect();
            check(&shards, elements);
            let lengths: Vec<i64> = shards.iter().map(|s| s.own().end - s.own().start).collect();
            let (least, most) = (lengths.iter().min().unwrap(), lengths.iter().max().unwrap());
            assert!(most - least <= ALIGNMENT, "{lengths:?}");
        }
    }

    #[test]
    fn one_rank_alone_exchanges_nothing() {
        let shards = Shards::even(64, Rank { rank: 0, world_size: 1 });
        assert!(!shards.is_split());
        assert_eq!(shards, Shards::whole(64));
    }
}
