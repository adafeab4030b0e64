//! A process's shard of parallel projections, and the sum over processes.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use tch::Tensor;

/// All-reduce over the processes that share a layer.
pub trait Sum: Debug + Send + Sync {
    /// Announces that layer `number`, counted from 0, runs next.
    fn at(&self, number: usize);

    /// Replaces `partial` [T, ..] by the sum over all processes. On failure the values are left as
    /// they are, since a pass cannot report errors.
    fn sum(&self, partial: &Tensor);
}

/// A process's shard of every parallel projection.
#[derive(Debug, Clone)]
pub(crate) struct Shard {
    part: i64,
    of: i64,
    sums: Option<Arc<dyn Sum>>,
}

impl Shard {
    /// Not sharded.
    pub(crate) const WHOLE: Self = Self { part: 0, of: 1, sums: None };

    pub(crate) fn new(part: usize, of: usize, sums: Option<Arc<dyn Sum>>) -> Self {
        Self { part: part as i64, of: of as i64, sums }
    }

    /// This process's share of `whole`, which the grid's check has found divisible.
    pub(crate) fn share(&self, whole: i64) -> i64 {
        assert_eq!(whole % self.of, 0, "{whole} heads or columns for {} processes", self.of);
        whole / self.of
    }

    /// This process's range of `whole`.
    pub(crate) fn own(&self, whole: i64) -> Range<i64> {
        let own = self.share(whole);
        self.start(own)..self.start(own) + own
    }

    /// The key heads that this process's query heads read: its share, or, with more processes than
    /// heads, one that it has in common with others.
    pub(crate) fn own_keys(&self, heads: i64) -> Range<i64> {
        if self.of <= heads {
            return self.own(heads);
        }
        assert_eq!(self.of % heads, 0, "{heads} key heads for {} processes", self.of);
        let head = self.part / self.holders(heads);
        head..head + 1
    }

    /// Number of processes that have each key head.
    pub(crate) fn holders(&self, heads: i64) -> i64 {
        (self.of / heads).max(1)
    }

    /// This process's rows of `x`, which concatenates `parts`: its share of each part.
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

    /// Start of this process's share, given its size `own`.
    pub(crate) fn start(&self, own: i64) -> i64 {
        self.part * own
    }

    /// Total size, given this process's share `own`.
    pub(crate) fn whole(&self, own: i64) -> i64 {
        self.of * own
    }

    /// Whether there are several processes.
    pub(crate) fn is_parallel(&self) -> bool {
        self.of > 1
    }

    /// All-reduces `partial` [T, ..] in place.
    pub(crate) fn summed(&self, partial: Tensor) -> Tensor {
        if let Some(sums) = &self.sums {
            sums.sum(&partial);
        }
        partial
    }
}
