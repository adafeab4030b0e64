//! Writing a prepared dataset.
//!
//! Rows gather in a batch, batches go to a shard, shards to a directory that appears under its
//! name only when it is whole. Memory is bounded by one batch. The column types are those of
//! speculators' datasets, so that the two can be concatenated.

mod metadata;

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, Int32Builder, Int64Builder, ListBuilder, RecordBatch};
use arrow::datatypes::Schema;
use arrow::error::ArrowError;
use arrow::ipc::writer::StreamWriter;
use dflash_files::PendingDir;

use crate::Sample;
use crate::counts::{self, TokenCounts};
use crate::digest::Digest;
use crate::error::Error;

/// Rows of a batch, as Hugging Face writes them.
const BATCH_ROWS: usize = 1000;
/// Tokens after which a batch is written even when it has fewer rows: 12 MB of columns.
const BATCH_TOKENS: usize = 1 << 20;
/// Bytes that a token takes in the two list columns.
const BYTES_PER_TOKEN: u64 = 12;

/// How to lay out a dataset.
#[derive(Debug, Clone, Copy)]
pub struct WriterOptions {
    /// Start a new shard when one has this many bytes. Default 500 MB, as Hugging Face has.
    pub shard_bytes: u64,
    /// Replace an existing dataset at the destination; anything else there is left alone.
    pub overwrite: bool,
}

impl Default for WriterOptions {
    fn default() -> Self {
        Self { shard_bytes: 500_000_000, overwrite: false }
    }
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriteSummary {
    /// Rows.
    pub rows: u64,
    /// Tokens of all rows.
    pub tokens: u64,
    /// Tokens under the loss mask.
    pub supervised_tokens: u64,
    /// Shard files.
    pub shards: usize,
    /// Hash of the content.
    pub fingerprint: String,
}

/// A dataset under construction. Dropped before [`Self::finish`], it leaves nothing.
pub struct DatasetWriter {
    pending: PendingDir,
    options: WriterOptions,
    schema: Arc<Schema>,
    batch: Batch,
    shard: Option<Shard>,
    finished_shards: Vec<PathBuf>,
    counts: TokenCounts,
    digest: Digest,
    rows: u64,
    tokens: u64,
    supervised_tokens: u64,
}

#[derive(Debug, Default)]
struct Batch {
    input_ids: ListBuilder<Int32Builder>,
    loss_mask: ListBuilder<Int64Builder>,
    seq_len: Int64Builder,
    rows: usize,
    tokens: usize,
}

struct Shard {
    path: PathBuf,
    writer: StreamWriter<BufWriter<File>>,
    bytes: u64,
}

impl DatasetWriter {
    /// Starts a dataset that will appear at `dir`.
    ///
    /// # Errors
    /// [`dflash_files::Error::Occupied`] when `dir` holds something (unless it is a dataset and
    /// `overwrite` is set; [`Error::ForeignFile`] when it holds other files), otherwise I/O.
    pub fn create(dir: &Path, options: WriterOptions) -> Result<Self, Error> {
        let pending = if options.overwrite {
            check_replaceable(dir)?;
            PendingDir::create_replacing(dir)?
        } else {
            PendingDir::create(dir)?
        };
        Ok(Self {
            pending,
            options,
            schema: Arc::new(metadata::schema()),
            batch: Batch::default(),
            shard: None,
            finished_shards: Vec::new(),
            counts: TokenCounts::default(),
            digest: Digest::default(),
            rows: 0,
            tokens: 0,
            supervised_tokens: 0,
        })
    }

    /// Appends a row.
    ///
    /// # Errors
    /// [`Error::MaskLength`], [`Error::TokenId`], or I/O when a batch is full and written.
    pub fn push(&mut self, sample: &Sample) -> Result<(), Error> {
        self.check(sample)?;
        for &id in &sample.input_ids {
            self.digest.word(id as u64);
            self.batch.input_ids.values().append_value(id as i32);
        }
        for &supervised in &sample.loss_mask {
            self.digest.word(u64::from(supervised));
            self.batch.loss_mask.values().append_value(i64::from(supervised));
        }
        self.batch.input_ids.append(true);
        self.batch.loss_mask.append(true);
        let length = sample.input_ids.len();
        self.batch.seq_len.append_value(length as i64);
        self.digest.word(length as u64);
        self.counts.add(sample);
        self.batch.rows += 1;
        self.batch.tokens += length;
        self.rows += 1;
        self.tokens += length as u64;
        self.supervised_tokens += sample.loss_mask.iter().filter(|&&m| m).count() as u64;
        if self.batch.rows >= BATCH_ROWS || self.batch.tokens >= BATCH_TOKENS {
            self.write_batch()?;
        }
        Ok(())
    }

    fn check(&self, sample: &Sample) -> Result<(), Error> {
        let row = self.rows as usize;
        let (input_ids, loss_mask) = (sample.input_ids.len(), sample.loss_mask.len());
        if input_ids != loss_mask {
            let path = self.pending.path().into();
            return Err(Error::MaskLength { path, row, input_ids, loss_mask });
        }
        match sample.input_ids.iter().find(|&&id| !(0..=i64::from(i32::MAX)).contains(&id)) {
            Some(&id) => Err(Error::TokenId { row, id }),
            None => Ok(()),
        }
    }

    /// Rows so far.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Tokens so far.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Supervised tokens so far.
    pub fn supervised_tokens(&self) -> u64 {
        self.supervised_tokens
    }

    /// Puts a file of the caller's beside the shards.
    ///
    /// # Errors
    /// I/O.
    pub fn add_file(&self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        let path = self.pending.path().join(name);
        fs::write(&path, bytes).map_err(|source| write_error(&path, source))
    }

    /// Writes what is left, the metadata and the token counts, and puts the directory in place.
    ///
    /// # Errors
    /// I/O; nothing is left then.
    pub fn finish(mut self) -> Result<WriteSummary, Error> {
        self.write_batch()?;
        if self.finished_shards.is_empty() && self.shard.is_none() {
            // A dataset without rows still needs a schema.
            self.shard = Some(self.start_shard()?);
        }
        self.finish_shard()?;
        let names = self.name_shards()?;
        let fingerprint = self.digest.hex();
        let counts = std::mem::take(&mut self.counts).into_sorted();
        self.add_file("dataset_info.json", metadata::dataset_info().as_bytes())?;
        self.add_file("state.json", metadata::state(&names, &fingerprint).as_bytes())?;
        self.add_file(counts::FILE, &counts::to_json(&counts))?;
        self.add_file("token_freq.pt", &counts::to_torch(&counts))?;
        let summary = WriteSummary {
            rows: self.rows,
            tokens: self.tokens,
            supervised_tokens: self.supervised_tokens,
            shards: names.len(),
            fingerprint,
        };
        self.pending.commit()?;
        Ok(summary)
    }

    fn write_batch(&mut self) -> Result<(), Error> {
        if self.batch.rows == 0 {
            return Ok(());
        }
        if self.shard.as_ref().is_some_and(|shard| shard.bytes >= self.options.shard_bytes) {
            self.finish_shard()?;
        }
        let mut batch = std::mem::take(&mut self.batch);
        let columns: Vec<ArrayRef> = vec![
            Arc::new(batch.input_ids.finish()),
            Arc::new(batch.loss_mask.finish()),
            Arc::new(batch.seq_len.finish()),
        ];
        let mut shard = match self.shard.take() {
            Some(shard) => shard,
            None => self.start_shard()?,
        };
        RecordBatch::try_new(Arc::clone(&self.schema), columns)
            .and_then(|columns| shard.writer.write(&columns))
            .map_err(|error| encode_error(&shard.path, error))?;
        shard.bytes += batch.tokens as u64 * BYTES_PER_TOKEN;
        self.shard = Some(shard);
        Ok(())
    }

    fn start_shard(&self) -> Result<Shard, Error> {
        // The final name holds the number of shards, which nobody knows yet.
        let path = self.pending.path().join(format!("part-{:05}", self.finished_shards.len()));
        let file = File::create(&path).map_err(|source| write_error(&path, source))?;
        let writer = StreamWriter::try_new(BufWriter::new(file), &self.schema)
            .map_err(|error| encode_error(&path, error))?;
        Ok(Shard { path, writer, bytes: 0 })
    }

    fn finish_shard(&mut self) -> Result<(), Error> {
        let Some(mut shard) = self.shard.take() else { return Ok(()) };
        shard.writer.finish().map_err(|error| encode_error(&shard.path, error))?;
        shard.writer.get_mut().flush().map_err(|source| write_error(&shard.path, source))?;
        self.finished_shards.push(shard.path);
        Ok(())
    }

    fn name_shards(&self) -> Result<Vec<String>, Error> {
        let total = self.finished_shards.len();
        let mut names = Vec::with_capacity(total);
        for (index, path) in self.finished_shards.iter().enumerate() {
            let name = format!("data-{index:05}-of-{total:05}.arrow");
            fs::rename(path, path.with_file_name(&name))
                .map_err(dflash_files::Error::io("rename", path))?;
            names.push(name);
        }
        Ok(names)
    }
}

/// Whether every file of `dir` is one that a dataset has.
fn check_replaceable(dir: &Path) -> Result<(), Error> {
    const OURS: [&str; 5] =
        ["dataset_info.json", "state.json", counts::FILE, "token_freq.pt", "dflash_prepare.json"];
    if dflash_files::is_absent_or_empty(dir)? {
        return Ok(());
    }
    let read = |source| Error::Read { path: dir.into(), source };
    for entry in fs::read_dir(dir).map_err(read)? {
        let entry = entry.map_err(read)?;
        let file = entry.file_name().to_string_lossy().into_owned();
        let is_ours = OURS.contains(&file.as_str()) || file.ends_with(".arrow");
        if !is_ours || entry.path().is_dir() {
            return Err(Error::ForeignFile { path: dir.into(), file });
        }
    }
    Ok(())
}

fn write_error(path: &Path, source: std::io::Error) -> Error {
    dflash_files::Error::io("write", path)(source).into()
}

fn encode_error(path: &Path, error: ArrowError) -> Error {
    match error {
        ArrowError::IoError(_, source) => write_error(path, source),
        source => Error::Encode { path: path.into(), source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dataset;

    fn sample(length: usize) -> Sample {
        Sample {
            input_ids: (0..length as i64).map(|i| i * 7 % 100).collect(),
            loss_mask: (0..length).map(|i| i % 3 > 0).collect(),
        }
    }

    fn write(dir: &Path, options: WriterOptions, lengths: &[usize]) -> Result<WriteSummary, Error> {
        let mut writer = DatasetWriter::create(dir, options)?;
        for &length in lengths {
            writer.push(&sample(length))?;
        }
        writer.finish()
    }

    #[test]
    fn rows_come_back_as_they_went_in() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("data");
        let lengths: Vec<usize> = (0..2500).map(|i| i * 13 % 50).collect();
        // 1,000 rows of 24.5 tokens are 294 KB, so every batch is a shard of its own.
        let options = WriterOptions { shard_bytes: 100_000, ..WriterOptions::default() };
        let summary = write(&dir, options, &lengths).unwrap();
        assert_eq!((summary.rows, summary.shards), (2500, 3));
        assert_eq!(summary.tokens, lengths.iter().sum::<usize>() as u64);
        assert!(dir.join("data-00002-of-00003.arrow").is_file());

        let dataset = Dataset::open(&dir).unwrap();
        assert_eq!(dataset.len(), 2500);
        for (index, &length) in lengths.iter().enumerate() {
            assert_eq!(dataset.lengths()[index] as usize, length);
            assert_eq!(dataset.get(index).unwrap(), sample(length), "row {index}");
        }
        assert!(matches!(dataset.get(2500), Err(Error::RowRange { row: 2500, rows: 2500 })));
        let counts = dataset.token_frequencies().unwrap();
        assert_eq!(counts.iter().map(|(_, n)| n).sum::<u64>(), summary.supervised_tokens);
        let json: serde_json::Value =
            serde_json::from_slice(&fs::read(dir.join("token_freq.json")).unwrap()).unwrap();
        assert_eq!(json[counts[5].0.to_string()], counts[5].1);
    }

    #[test]
    fn counts_are_read_where_they_are_stored_and_else_counted() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("data");
        write(&dir, WriterOptions::default(), &[30, 40]).unwrap();
        let frequencies = || Dataset::open(&dir).unwrap().token_frequencies();
        let stored = frequencies().unwrap();
        fs::write(dir.join(counts::FILE), r#"{"11": 2, "7": 5}"#).unwrap();
        assert_eq!(frequencies().unwrap(), [(7, 5), (11, 2)]);
        fs::write(dir.join(counts::FILE), r#"{"7": "#).unwrap();
        let refused = frequencies().unwrap_err().to_string();
        assert!(refused.contains("token_freq.json is not valid JSON"), "{refused}");
        fs::remove_file(dir.join(counts::FILE)).unwrap();
        assert_eq!(frequencies().unwrap(), stored);
    }

    #[test]
    fn the_fingerprint_is_of_the_content() {
        let root = tempfile::tempdir().unwrap();
        let fingerprint = |name: &str, shard_bytes: u64, lengths: &[usize]| {
            let dir = root.path().join(name);
            let options = WriterOptions { shard_bytes, overwrite: false };
            let written = write(&dir, options, lengths).unwrap().fingerprint;
            (written, Dataset::open(&dir).unwrap().fingerprint())
        };
        let first = fingerprint("a", 1, &[3, 4]);
        assert_eq!(first, fingerprint("b", 1 << 30, &[3, 4]));
        assert_ne!(first, fingerprint("c", 1, &[4, 3]));
    }

    #[test]
    fn an_unfinished_dataset_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("data");
        let mut writer = DatasetWriter::create(&dir, WriterOptions::default()).unwrap();
        writer.push(&sample(5)).unwrap();
        drop(writer);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn only_a_dataset_is_overwritten_and_only_when_asked() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("data");
        let replace = WriterOptions { overwrite: true, ..WriterOptions::default() };
        write(&dir, replace, &[3]).unwrap();
        let refused = write(&dir, WriterOptions::default(), &[4]).unwrap_err().to_string();
        assert!(refused.contains("exists and is not empty"), "{refused}");
        write(&dir, replace, &[4, 5]).unwrap();
        assert_eq!(Dataset::open(&dir).unwrap().lengths(), [4, 5]);
        fs::write(dir.join("thesis.tex"), "").unwrap();
        let refused = write(&dir, replace, &[6]).unwrap_err().to_string();
        assert!(refused.contains("holds thesis.tex"), "{refused}");
        assert_eq!(Dataset::open(&dir).unwrap().lengths(), [4, 5]);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    }

    #[test]
    fn impossible_rows_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let mut writer =
            DatasetWriter::create(&root.path().join("data"), WriterOptions::default()).unwrap();
        let row = |ids: &[i64]| Sample { input_ids: ids.to_vec(), loss_mask: vec![true] };
        assert!(matches!(writer.push(&row(&[1, 2])), Err(Error::MaskLength { row: 0, .. })));
        assert!(matches!(writer.push(&row(&[-1])), Err(Error::TokenId { id: -1, .. })));
        assert!(matches!(writer.push(&row(&[1 << 31])), Err(Error::TokenId { .. })));
    }

    #[test]
    fn a_damaged_directory_is_named() {
        let root = tempfile::tempdir().unwrap();
        let check = |dir: &Path, expect: &str| {
            let error = Dataset::open(dir).unwrap_err().to_string();
            assert!(error.contains(expect), "{error}");
        };
        check(&root.path().join("nowhere"), "the directory is missing");
        check(root.path(), "state.json is missing");
        let dir = root.path().join("data");
        write(&dir, WriterOptions::default(), &[30, 40]).unwrap();
        let shard = dir.join("data-00000-of-00001.arrow");
        let bytes = fs::read(&shard).unwrap();
        fs::write(&shard, &bytes[..bytes.len() / 2]).unwrap();
        check(&dir, "ends inside a record batch");
        fs::write(&shard, "no arrow").unwrap();
        check(&dir, "is not a whole Arrow stream file");
        fs::remove_file(&shard).unwrap();
        check(&dir, "cannot read");
        fs::write(dir.join("state.json"), "{").unwrap();
        check(&dir, "is not valid JSON");
    }
}
