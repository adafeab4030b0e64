//! Reading a prepared dataset, ours or one that Hugging Face's `save_to_disk` wrote.
//!
//! Opening reads only the list offsets: where every row is and how long it is. A row is then
//! four positioned reads of exactly its bytes, so memory stays bounded whatever the size of the
//! dataset, and threads share one reader without locks. (Mapping the files would do as well, but
//! needs `unsafe`.)

mod column;
mod stream;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::Value;

use crate::Sample;
use crate::counts::{self, TokenCounts};
use crate::digest::Digest;
use crate::error::Error;
use crate::origin::{PreparedFor, preparation};
use stream::{Columns, scan_shard};

/// A prepared dataset on disk.
#[derive(Debug)]
pub struct Dataset {
    dir: PathBuf,
    shards: Vec<Shard>,
    batches: Vec<Batch>,
    lengths: Vec<u32>,
    fingerprint: String,
    /// The result of [`Self::content`].
    content: OnceLock<String>,
}

/// Maximum number of tokens that a digest of the content reads, which takes about a second. In
/// larger datasets it reads rows with about as many tokens, evenly spread.
const DIGESTED_TOKENS: u64 = 1 << 26;

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    file: File,
}

/// One record batch.
#[derive(Debug)]
struct Batch {
    shard: usize,
    first_row: usize,
    columns: Columns,
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
            content: OnceLock::new(),
        };
        for path in shard_paths(dir, &state)? {
            dataset.open_shard(path)?;
        }
        let mut digest = Digest::default();
        digest.bytes(state["_fingerprint"].as_str().unwrap_or_default().as_bytes());
        dataset.lengths.iter().for_each(|&length| digest.word(u64::from(length)));
        dataset.fingerprint = digest.hex();
        Ok(dataset)
    }

    fn open_shard(&mut self, path: PathBuf) -> Result<(), Error> {
        let file =
            File::open(&path).map_err(|source| Error::Read { path: path.clone(), source })?;
        let shard = Shard { path, file };
        for columns in scan_shard(&shard)? {
            let first_row = self.lengths.len();
            self.lengths.extend(row_lengths(&shard, &columns, first_row)?);
            self.batches.push(Batch { shard: self.shards.len(), first_row, columns });
        }
        self.shards.push(shard);
        Ok(())
    }

    /// Samples in the dataset.
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// Whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Tokens of each sample.
    pub fn lengths(&self) -> &[u32] {
        &self.lengths
    }

    /// Reads one sample.
    ///
    /// # Errors
    /// [`Error::RowRange`], [`Error::Read`] (the file changed under us).
    pub fn get(&self, index: usize) -> Result<Sample, Error> {
        if index >= self.len() {
            return Err(Error::RowRange { row: index, rows: self.len() });
        }
        // If several batches have the same first row, only the last one has rows.
        let after = self.batches.partition_point(|batch| batch.first_row <= index);
        let Batch { shard, first_row, columns } = &self.batches[after - 1];
        let (shard, row) = (&self.shards[*shard], index - first_row);
        Ok(Sample {
            input_ids: columns.input_ids.read_row(shard, row)?,
            loss_mask: columns.loss_mask.read_row(shard, row)?.iter().map(|&v| v != 0).collect(),
        })
    }

    /// 16 hexadecimal digits: a hash of the samples' lengths and of the content hash that the
    /// writer recorded. It reads no samples, so it does not notice later changes.
    pub fn fingerprint(&self) -> String {
        self.fingerprint.clone()
    }

    /// 16 hexadecimal digits: a hash of the samples' tokens and masks as the files hold them now,
    /// independent of the shards. Datasets of more than 67 million tokens are sampled: as many
    /// tokens, in evenly spread rows. Computed once, on first use.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub fn content(&self) -> Result<&str, Error> {
        if let Some(content) = self.content.get() {
            return Ok(content);
        }
        let content = self.digest_of_rows(DIGESTED_TOKENS)?;
        Ok(self.content.get_or_init(|| content))
    }

    /// The digest of every row, or of evenly spread rows with about `most_tokens` tokens.
    fn digest_of_rows(&self, most_tokens: u64) -> Result<String, Error> {
        let tokens: u64 = self.lengths.iter().map(|&length| u64::from(length)).sum();
        let stride = tokens.div_ceil(most_tokens).max(1) as usize;
        let mut digest = Digest::default();
        digest.word(self.len() as u64);
        for row in (0..self.len()).step_by(stride) {
            let Sample { input_ids, loss_mask } = self.get(row)?;
            digest.word(input_ids.len() as u64);
            for (id, supervised) in input_ids.into_iter().zip(loss_mask) {
                digest.word((id as u64) << 1 | u64::from(supervised));
            }
        }
        Ok(digest.hex())
    }

    /// The target that the samples were made for, if it is recorded.
    ///
    /// # Errors
    /// [`Error::Json`] if the record is damaged, [`Error::Read`].
    pub fn prepared_for(&self) -> Result<Option<PreparedFor>, Error> {
        PreparedFor::read(&self.dir)
    }

    /// Everything that is recorded about how the samples were made: `dflash_prepare.json`, which
    /// docs/formats.md describes.
    ///
    /// # Errors
    /// [`Error::Json`] if the record is damaged, [`Error::Read`].
    pub fn preparation(&self) -> Result<Option<serde_json::Value>, Error> {
        preparation(&self.dir)
    }

    /// How often each token is supervised, ascending by id: as the writer counted, or, if that is
    /// not recorded (`datasets` does not keep our file), by reading every sample.
    ///
    /// # Errors
    /// [`Error::Json`] if the record is damaged, [`Error::Read`].
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

/// Lengths of the batch's rows, which must agree between the columns. `first_row` is for messages.
fn row_lengths(shard: &Shard, columns: &Columns, first_row: usize) -> Result<Vec<u32>, Error> {
    let input_ids = columns.input_ids.lengths(shard, columns.rows)?;
    let loss_mask = columns.loss_mask.lengths(shard, columns.rows)?;
    match (0..columns.rows).find(|&row| input_ids[row] != loss_mask[row]) {
        Some(row) => Err(Error::MaskLength {
            path: shard.path.clone(),
            row: first_row + row,
            input_ids: input_ids[row] as usize,
            loss_mask: loss_mask[row] as usize,
        }),
        None => Ok(input_ids),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DatasetWriter, WriterOptions};

    #[test]
    fn the_digest_sees_tokens_and_masks_and_not_shards() {
        let dir = tempfile::tempdir().unwrap();
        let written = |name: &str, shard_bytes: u64, changed: Option<(usize, i64, bool)>| {
            let path = dir.path().join(name);
            let options = WriterOptions { shard_bytes, ..WriterOptions::default() };
            let mut writer = DatasetWriter::create(&path, options).unwrap();
            for row in 0..9 {
                let mut sample = Sample { input_ids: vec![row; 4], loss_mask: vec![true; 4] };
                if let Some((_, id, mask)) = changed.filter(|(at, ..)| *at == row as usize) {
                    (sample.input_ids[3], sample.loss_mask[3]) = (id, mask);
                }
                writer.push(&sample).unwrap();
            }
            writer.finish().unwrap();
            Dataset::open(&path).unwrap()
        };
        let whole = written("whole", 1 << 30, None);
        let content = whole.content().unwrap();
        assert_eq!(written("shards", 1, None).content().unwrap(), content);
        assert_ne!(written("token", 1 << 30, Some((7, 6, true))).content().unwrap(), content);
        assert_ne!(written("mask", 1 << 30, Some((7, 7, false))).content().unwrap(), content);
        // A bound of a third of the tokens takes each third row, the first included.
        let sampled = whole.digest_of_rows(12).unwrap();
        let of = |name: &str, row| {
            written(name, 1 << 30, Some((row, 60, true))).digest_of_rows(12).unwrap()
        };
        assert_eq!(of("between", 7), sampled);
        assert_ne!(of("taken", 6), sampled);
    }
}
