//! Prepared datasets: row schema, shards, packing, anchors and resumable order.
#![allow(missing_docs, clippy::unimplemented, unused_variables)]
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path} is not a prepared dataset")]
    NotADataset { path: PathBuf },
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sample {
    pub input_ids: Vec<i64>,
    pub loss_mask: Vec<bool>,
}

#[derive(Debug)]
pub struct Dataset;
impl Dataset {
    pub fn open(dir: &Path) -> Result<Self, Error> {
        unimplemented!()
    }
    pub fn len(&self) -> usize {
        unimplemented!()
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    pub fn lengths(&self) -> &[u32] {
        unimplemented!()
    }
    pub fn get(&self, index: usize) -> Result<Sample, Error> {
        unimplemented!()
    }
    pub fn fingerprint(&self) -> String {
        unimplemented!()
    }
    pub fn token_frequencies(&self) -> Result<Vec<(i64, u64)>, Error> {
        unimplemented!()
    }
}

#[derive(Debug, Clone, Default)]
pub struct WriterOptions {
    pub shard_bytes: u64,
}
#[derive(Debug, Clone)]
pub struct WriteSummary {
    pub rows: u64,
    pub tokens: u64,
    pub supervised_tokens: u64,
    pub shards: usize,
    pub fingerprint: String,
}
#[derive(Debug)]
pub struct DatasetWriter;
impl DatasetWriter {
    pub fn create(dir: &Path, options: WriterOptions) -> Result<Self, Error> {
        unimplemented!()
    }
    pub fn push(&mut self, sample: &Sample) -> Result<(), Error> {
        unimplemented!()
    }
    pub fn finish(self) -> Result<WriteSummary, Error> {
        unimplemented!()
    }
}

pub fn epoch_order(len: usize, seed: u64, epoch: u64) -> Vec<u32> {
    unimplemented!()
}
pub fn pack_rows(order: &[u32], lengths: &[u32], total_seq_len: usize) -> Vec<Vec<u32>> {
    unimplemented!()
}
/// Documents longer than `total_seq_len`, which packing cuts.
pub fn count_truncated(lengths: &[u32], total_seq_len: usize) -> usize {
    unimplemented!()
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedRow {
    pub input_ids: Vec<i64>,
    pub loss_mask: Vec<bool>,
    pub document_starts: Vec<usize>,
    pub samples: Vec<u32>,
}
impl PackedRow {
    pub fn from_samples(samples: &[(u32, Sample)], total_seq_len: usize) -> Self {
        unimplemented!()
    }
    pub fn position_ids(&self) -> Vec<i64> {
        unimplemented!()
    }
    pub fn document_ids(&self) -> Vec<i64> {
        unimplemented!()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnchorOptions {
    pub per_document: usize,
    pub per_row: usize,
    pub seed: u64,
    pub epoch: u64,
}
pub fn sample_anchors(row: &PackedRow, options: &AnchorOptions) -> Vec<usize> {
    unimplemented!()
}
pub fn select_vocabulary(
    frequencies: &[(i64, u64)],
    draft_vocab_size: usize,
    target_vocab_size: usize,
) -> Vec<i64> {
    unimplemented!()
}
