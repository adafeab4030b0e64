//! What a process has of parallel projections, and the sum that makes its products those of all.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use tch::Tensor;

/// Sums over the processes that have the parts of one layer.
pub trait Sum: Debug + Send + Sync {
    /// Layer `number`, counted from 0, runs next.
    fn at(&self, number: usize);

    /// Writes over `partial` [T, ..] the sum of all processes' partial results. One that fails leaves the
    /// numbers as they are: a pass has no way to say so.
    fn sum(&self, partial: &Tensor);
}

/// A process's part of every parallel projection.
#[derive(Debug, Clone)]
pub(crate) struct Shard {
    part: i64,
    of: i64,
    sums: Option<Arc<dyn Sum>>,
}

impl Shard {
    /// All of everything.
    pub(crate) const WHOLE: Self = Self { part: 0, of: 1, sums: None };

    /// Part `part` of `of`.
    pub(crate) fn new(part: usize, of: usize, sums: Option<Arc<dyn Sum>>) -> Self {
        Self { part: part as i64, of: of as i64, sums }
    }

    /// How much of `whole` is this process's, which the grid's check has found divisible.
    pub(crate) fn share(&self, whole: i64) -> i64 {
        assert_eq!(whole % self.of, 0, "{whole} heads or columns for {} processes", self.of);
        whole / self.of
    }

    /// Which of `whole` are this process's.
    pub(crate) fn own(&self, whole: i64) -> Range<i64> {
        let own = self.share(whole);
        self.start(own)..self.start(own) + own
    }

    /// Which of so many key heads this process's query heads read: its share, or where the processes
    /// are more than the heads, the one that it has in common with others.
    pub(crate) fn own_keys(&self, heads: i64) -> Range<i64> {
        if self.of <= heads {
            return self.own(heads);
        }
        assert_eq!(self.of % heads, 0, "{heads} key heads for {} processes", self.of);
        let head = self.part / self.holders(heads);
        head..head + 1
    }

    /// How many processes have each of so many key heads.
    pub(crate) fn holders(&self, heads: i64) -> i64 {
        (self.of / heads).max(1)
    }

    /// This process's rows of `x`, which are its share of each of so many that lie end to end there.
    pub(crate) fn own_rows(&self, x: &Tensor, parts: &[i64]) -> Tensor {
        if !self.is_parallel() {
            return x.shallow_clone();
        }
        let mut begin = 0;
        let own = parts.iter().map(|&whole| {
            let Range { start, end } = self.own(whole);
            let rows = x.narrow(0, begin + start, end - start);
            begin += whole;
            rows
        });
        Tensor::cat(&own.collect::<Vec<_>>(), 0)
    }

    /// Where this process's share of so many begins.
    pub(crate) fn start(&self, own: i64) -> i64 {
        self.part * own
    }

    /// What all have of which this process's share is `own`.
    pub(crate) fn whole(&self, own: i64) -> i64 {
        self.of * own
    }

    /// Whether other processes have parts too.
    pub(crate) fn is_parallel(&self) -> bool {
        self.of > 1
    }

    /// The sum over all processes of `partial` [T, ..], which is written over.
    pub(crate) fn summed(&self, partial: Tensor) -> Tensor {
        if let Some(sums) = &self.sums {
            sums.sum(&partial);
        }
        partial
    }
}
