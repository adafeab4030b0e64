//! Reading a prepared dataset, ours or one that Hugging Face's `save_to_disk` wrote.
//!
//! Opening reads the list offsets only: where every row lies and how long it is. A row is then
//! four positioned reads of exactly its bytes, so memory stays bounded whatever the size of the
//! dataset, and threads share one reader without locks. (Mapping the files would do as well, but
//! needs `unsafe`.)

mod column;
mod stream;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::Sample;
use crate::counts::{self, TokenCounts};
use crate::digest::Digest;
use crate::error::Error;
use column::ColumnSlice;
use stream::scan_shard;

/// A prepared dataset on disk.
#[derive(Debug)]
pub struct Dataset {
    dir: PathBuf,
    shards: Vec<Shard>,
    batches: Vec<Batch>,
    lengths: Vec<u32>,
    fingerprint: String,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    file: File,
}

/// One record batch: where its two columns lie in its shard.
#[derive(Debug, Clone, Copy)]
struct Batch {
    shard: usize,
    first_row: usize,
    rows: usize,
    input_ids: ColumnSlice,
    loss_mask: ColumnSlice,
}

impl Dataset {
    /// Opens the directory `dir`: ours, or any that `save_to_disk` wrote with the columns
    /// `input_ids` (a list or large list of integers) and `loss_mask` (of integers or booleans).
    ///
    /// # Errors
    /// [`Error::NotADataset`], [`Error::SeveralSplits`], [`Error::Json`], [`Error::NoShards`],
    /// [`Error::BrokenShard`], [`Error::NoColumn`], [`Error::ColumnType`], [`Error::Nulls`],
    /// [`Error::MaskLength`], [`Error::Read`].
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let state = read_state(dir)?;
        let mut dataset = Self {
            dir: dir.into(),
            shards: Vec::new(),
            batches: Vec::new(),
            lengths: Vec::new(),
            fingerprint: String::new(),
        };
        for path in shard_paths(dir, &state)? {
            dataset.open_shard(path)?;
        }
        dataset.fingerprint = dataset.digest(state["_fingerprint"].as_str().unwrap_or_default());
        Ok(dataset)
    }

    fn open_shard(&mut self, path: PathBuf) -> Result<(), Error> {
        let file =
            File::open(&path).map_err(|source| Error::Read { path: path.clone(), source })?;
        let shard = Shard { path, file };
        for found in scan_shard(&shard)? {
            let batch = Batch {
                shard: self.shards.len(),
                first_row: self.lengths.len(),
                rows: found.rows,
                input_ids: found.input_ids,
                loss_mask: found.loss_mask,
            };
            self.read_lengths(&shard, &batch)?;
            self.batches.push(batch);
        }
        self.shards.push(shard);
        Ok(())
    }

    /// Lengths of the batch's rows, which must agree between the columns.
    fn read_lengths(&mut self, shard: &Shard, batch: &Batch) -> Result<(), Error> {
        let input_ids = batch.input_ids.lengths(shard, batch.rows)?;
        let loss_mask = batch.loss_mask.lengths(shard, batch.rows)?;
        if let Some(row) = (0..batch.rows).find(|&row| input_ids[row] != loss_mask[row]) {
            return Err(Error::MaskLength {
                path: shard.path.clone(),
                row: batch.first_row + row,
                input_ids: input_ids[row] as usize,
                loss_mask: loss_mask[row] as usize,
            });
        }
        self.lengths.extend_from_slice(&input_ids);
        Ok(())
    }

    /// Rows in the dataset.
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Tokens of each row.
    pub fn lengths(&self) -> &[u32] {
        &self.lengths
    }

    /// Reads one row.
    ///
    /// # Errors
    /// [`Error::RowRange`], [`Error::Read`] (the file changed under us).
    pub fn get(&self, index: usize) -> Result<Sample, Error> {
        let range = Error::RowRange { row: index, rows: self.len() };
        let after = self.batches.partition_point(|batch| batch.first_row <= index);
        let batch = self.batches[..after].iter().rfind(|batch| batch.rows > 0).ok_or(range)?;
        let row = index - batch.first_row;
        if row >= batch.rows {
            return Err(Error::RowRange { row: index, rows: self.len() });
        }
        let shard = &self.shards[batch.shard];
        Ok(Sample {
            input_ids: batch.input_ids.read_row(shard, row)?,
            loss_mask: batch.loss_mask.read_row(shard, row)?.into_iter().map(|v| v != 0).collect(),
        })
    }

    /// 16 hexadecimal digits that change when the content does: a hash of the rows' lengths and
    /// of the content hash that the writer recorded.
    pub fn fingerprint(&self) -> String {
        self.fingerprint.clone()
    }

    fn digest(&self, recorded: &str) -> String {
        let mut digest = Digest::default();
        digest.bytes(recorded.as_bytes());
        self.lengths.iter().for_each(|&length| digest.word(u64::from(length)));
        digest.hex()
    }

    /// How often each token is supervised, ascending by id: as its writer counted it, or, where that
    /// is not recorded (`datasets` does not keep our file), by reading every row.
    ///
    /// # Errors
    /// [`Error::Json`] where the record is damaged, [`Error::Read`].
    pub fn token_frequencies(&self) -> Result<Vec<(i64, u64)>, Error> {
        if let Some(counts) = counts::read(&self.dir.join(counts::FILE))? {
            return Ok(counts);
        }
        let mut counts = TokenCounts::default();
        for index in 0..self.len() {
            counts.add(&self.get(index)?);
        }
        Ok(counts.into_sorted())
    }
}

impl Shard {
    fn read_at(&self, offset: u64, length: usize) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; length];
        self.file
            .read_exact_at(&mut bytes, offset)
            .map_err(|source| Error::Read { path: self.path.clone(), source })?;
        Ok(bytes)
    }

    fn broken(&self, reason: impl Into<String>) -> Error {
        Error::BrokenShard { path: self.path.clone(), reason: reason.into() }
    }
}

fn read_state(dir: &Path) -> Result<Value, Error> {
    let path = dir.join("state.json");
    if dir.join("dataset_dict.json").is_file() {
        return Err(Error::SeveralSplits { path: dir.into() });
    }
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(_) if !dir.is_dir() => {
            return Err(Error::NotADataset { path: dir.into(), missing: "the directory" });
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(Error::NotADataset { path: dir.into(), missing: "state.json" });
        }
        Err(source) => return Err(Error::Read { path, source }),
    };
    serde_json::from_slice(&text).map_err(|source| Error::Json { path, source })
}

fn shard_paths(dir: &Path, state: &Value) -> Result<Vec<PathBuf>, Error> {
    let files = state["_data_files"].as_array().map(Vec::as_slice).unwrap_or_default();
    let paths: Vec<PathBuf> =
        files.iter().filter_map(|file| Some(dir.join(file["filename"].as_str()?))).collect();
    if paths.is_empty() {
        return Err(Error::NoShards { path: dir.join("state.json") });
    }
    Ok(paths)
}
