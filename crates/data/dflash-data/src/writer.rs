//! Writing a prepared dataset.
//!
//! Rows are collected in a batch, batches go to a shard, shards to a directory that gets its name
//! only when it is complete. Memory is bounded by one batch. The column types are those of
//! speculators' datasets, so that the two can be concatenated.

mod metadata;

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::builder::{Int32Builder, Int64Builder, ListBuilder};
use arrow_array::{ArrayRef, RecordBatch};
use arrow_ipc::writer::StreamWriter;
use arrow_schema::{ArrowError, Schema};
use dflash_io::PendingDir;

use crate::Sample;
use crate::counts::{self, TokenCounts};
use crate::digest::Digest;
use crate::error::Error;

/// Rows of a batch, as Hugging Face writes them.
const BATCH_ROWS: usize = 1000;
/// Tokens after which a batch is written even if it has fewer rows: 12 MB of columns.
const BATCH_TOKENS: usize = 1 << 20;
/// Bytes that a token takes in the two list columns.
const BYTES_PER_TOKEN: u64 = 12;

/// How to lay out a dataset.
#[derive(Debug, Clone, Copy)]
pub struct WriterOptions {
    /// Start a new shard when one has this many bytes. Default 500 MB, as in Hugging Face's
    /// `datasets`.
    pub shard_bytes: u64,
    /// Replace an existing dataset, but nothing else, at the destination.
    pub overwrite: bool,
}

impl Default for WriterOptions {
    fn default() -> Self {
        Self { shard_bytes: 500_000_000, overwrite: false }
    }
}

/// What was written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
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

/// A dataset under construction. Dropped before [`Self::finish`], it leaves nothing behind.
pub struct DatasetWriter {
    pending: PendingDir,
    options: WriterOptions,
    schema: Arc<Schema>,
    batch: Batch,
    shard: Option<Shard>,
    finished_shards: Vec<PathBuf>,
    counts: TokenCounts,
    digest: Digest,
    summary: WriteSummary,
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
    /// [`dflash_io::Error::Occupied`] when `dir` is not empty; with `overwrite`,
    /// [`Error::ForeignFile`] when it holds anything but a dataset; otherwise I/O.
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
            summary: WriteSummary::default(),
        })
    }

    /// Appends a row.
    ///
    /// # Errors
    /// [`Error::MaskLength`], [`Error::TokenId`], or I/O when a batch is full and written.
    pub fn push(&mut self, sample: &Sample) -> Result<(), Error> {
        self.check(sample)?;
        let (ids, mask) = (&sample.input_ids, &sample.loss_mask);
        ids.iter().for_each(|&id| self.digest.word(id as u64));
        mask.iter().for_each(|&supervised| self.digest.word(u64::from(supervised)));
        self.digest.word(ids.len() as u64);
        self.batch.input_ids.append_value(ids.iter().map(|&id| Some(id as i32)));
        self.batch.loss_mask.append_value(mask.iter().map(|&m| Some(i64::from(m))));
        self.batch.seq_len.append_value(ids.len() as i64);
        self.batch.rows += 1;
        self.batch.tokens += ids.len();
        self.counts.add(sample);
        self.summary.rows += 1;
        self.summary.tokens += ids.len() as u64;
        self.summary.supervised_tokens += mask.iter().filter(|&&m| m).count() as u64;
        if self.batch.rows >= BATCH_ROWS || self.batch.tokens >= BATCH_TOKENS {
            self.write_batch()?;
        }
        Ok(())
    }

    fn check(&self, sample: &Sample) -> Result<(), Error> {
        let row = self.summary.rows as usize;
        let (input_ids, loss_mask) = (sample.input_ids.len(), sample.loss_mask.len());
        if input_ids != loss_mask {
            let path = self.pending.destination().into();
            return Err(Error::MaskLength { path, row, input_ids, loss_mask });
        }
        match sample.input_ids.iter().find(|&&id| !(0..=i64::from(i32::MAX)).contains(&id)) {
            Some(&id) => Err(Error::TokenId { row, id }),
            None => Ok(()),
        }
    }

    /// Rows and tokens so far; shards and fingerprint are known only at the end.
    pub fn so_far(&self) -> &WriteSummary {
        &self.summary
    }

    /// Puts another file beside the shards.
    ///
    /// # Errors
    /// I/O.
    pub fn add_file(&self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        let path = self.pending.path().join(name);
        fs::write(&path, bytes).map_err(|source| write_error(&path, source))
    }

    /// Writes the remaining rows, the metadata and the token counts, and renames the directory into
    /// place.
    ///
    /// # Errors
    /// I/O; then nothing is left behind.
    pub fn finish(mut self) -> Result<WriteSummary, Error> {
        self.write_batch()?;
        if self.finished_shards.is_empty() {
            // A dataset without rows still needs a schema.
            self.open_shard()?;
        }
        self.finish_shard()?;
        let names = self.name_shards()?;
        let fingerprint = self.digest.hex();
        let counts = std::mem::take(&mut self.counts).into_sorted();
        self.add_file("dataset_info.json", metadata::dataset_info().as_bytes())?;
        self.add_file("state.json", metadata::state(&names, &fingerprint).as_bytes())?;
        self.add_file(counts::FILE, &counts::to_json(&counts))?;
        self.add_file("token_freq.pt", &counts::to_torch(&counts))?;
        self.pending.commit()?;
        Ok(WriteSummary { shards: names.len(), fingerprint, ..self.summary })
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
        let columns = RecordBatch::try_new(Arc::clone(&self.schema), columns);
        let shard = self.open_shard()?;
        columns
            .and_then(|columns| shard.writer.write(&columns))
            .map_err(|error| encode_error(&shard.path, error))?;
        shard.bytes += batch.tokens as u64 * BYTES_PER_TOKEN;
        Ok(())
    }

    fn open_shard(&mut self) -> Result<&mut Shard, Error> {
        // The final name contains the number of shards, which is not known yet.
        let path = self.pending.path().join(format!("part-{:05}", self.finished_shards.len()));
        match &mut self.shard {
            Some(shard) => Ok(shard),
            none => Ok(none.insert(Shard::create(path, &self.schema)?)),
        }
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
                .map_err(dflash_io::Error::io("rename", path))?;
            names.push(name);
        }
        Ok(names)
    }
}

impl Shard {
    fn create(path: PathBuf, schema: &Schema) -> Result<Self, Error> {
        let file = File::create(&path).map_err(|source| write_error(&path, source))?;
        let writer = StreamWriter::try_new(BufWriter::new(file), schema)
            .map_err(|error| encode_error(&path, error))?;
        Ok(Self { path, writer, bytes: 0 })
    }
}

/// Whether every file of `dir` belongs to a dataset.
fn check_replaceable(dir: &Path) -> Result<(), Error> {
    const OURS: [&str; 5] =
        ["dataset_info.json", "state.json", counts::FILE, "token_freq.pt", "dflash_prepare.json"];
    if dflash_io::is_absent_or_empty(dir)? {
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
    dflash_io::Error::io("write", path)(source).into()
}

fn encode_error(path: &Path, error: ArrowError) -> Error {
    match error {
        ArrowError::IoError(_, source) => write_error(path, source),
        source => Error::Encode { path: path.into(), source },
    }
}
