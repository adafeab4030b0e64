//! Prepared datasets: row schema, shards, packing, anchors and resumable order.
//!
//! A prepared dataset is a directory in the layout of Hugging Face's `save_to_disk`: Arrow IPC
//! stream files with the columns `input_ids`, `loss_mask` and `seq_len`. [`DatasetWriter`] writes
//! one that `datasets.load_from_disk` and speculators' trainer can read; [`Dataset`] reads ours and
//! theirs. Order, packing and anchors of an epoch are here too, because they must not depend on the
//! number of processes: [`epoch_order`], [`pack_rows`], [`sample_anchors`].

mod anchors;
mod counts;
mod dataset;
mod digest;
mod error;
mod origin;
mod packing;
mod random;
mod vocabulary;
mod writer;

pub use anchors::{AnchorOptions, anchor_candidates, sample_anchors};
pub use dataset::Dataset;
pub use error::Error;
pub use origin::PreparedFor;
pub use packing::{PackedRow, count_truncated, epoch_order, pack_rows, split_index};
pub use vocabulary::select_vocabulary;
pub use writer::{DatasetWriter, WriteSummary, WriterOptions};

/// One entry of a prepared dataset. Both columns have the same length.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sample {
    /// Token ids of the whole sequence.
    pub input_ids: Vec<i64>,
    /// Whether the token at each position is supervised.
    pub loss_mask: Vec<bool>,
}
