//! Packed rows with their hidden states, in order and fetched ahead.
//!
//! The feeding thread of the stream reads each sample once and packs each row once; the packed row
//! travels with the requests for its hidden states and comes out beside them.

use std::sync::Arc;

use dflash_data::{Dataset, PackedRow, Sample};
use dflash_hidden::{Counters, FetchedRow, HiddenStates, Request, Stream, StreamConfig, WantedRow};

use crate::Error;
use crate::order::PlannedRow;

/// Where samples are read: a dataset, or documents that `plan` makes up.
pub(crate) trait Samples: Send + Sync {
    fn sample(&self, index: u32) -> Result<Sample, Error>;
}

/// Where rows come from: a stream, or the memory of a test.
pub(crate) trait RowSource {
    /// Begins to load `planned` in its order.
    fn start(&self, planned: Vec<PlannedRow>) -> Result<Box<dyn Rows>, Error>;
}

/// Rows that are being loaded.
pub(crate) trait Rows {
    /// The next row; `None` at the end.
    fn next(&mut self) -> Result<Option<LoadedRow>, Error>;

    fn counters(&self) -> Counters;
}

/// One row with its hidden states; what was left out is counted.
#[derive(Debug)]
pub(crate) struct LoadedRow {
    pub(crate) epoch: u64,
    /// Of the samples that have hidden states.
    pub(crate) row: PackedRow,
    /// One for each document of the row.
    pub(crate) states: Vec<HiddenStates>,
    pub(crate) skipped: usize,
}

/// A dataset's samples, all of whose tokens the target knows.
#[derive(Debug)]
pub(crate) struct TargetSamples {
    pub(crate) dataset: Arc<Dataset>,
    /// Rows of the target's embedding.
    pub(crate) embedding_rows: i64,
}

/// Rows of samples whose hidden states a stream brings.
#[derive(Clone)]
pub(crate) struct StreamedRows {
    pub(crate) samples: Arc<dyn Samples>,
    pub(crate) total_seq_len: usize,
    pub(crate) stream: StreamConfig,
}

/// A stream under way; `None` where the run was told to stop before a server was ready.
struct Streaming(Option<Stream<(u64, PackedRow), Error>>);

/// Reads the samples of a row and lays them end to end.
pub(crate) fn pack(
    samples: &dyn Samples,
    row: &[u32],
    total_seq_len: usize,
) -> Result<PackedRow, Error> {
    let read = |&index: &u32| Ok((index, samples.sample(index)?));
    let read = row.iter().map(read).collect::<Result<Vec<_>, Error>>()?;
    Ok(PackedRow::from_samples(&read, total_seq_len))
}

impl LoadedRow {
    /// `row` without the documents that have no hidden states.
    pub(crate) fn new(epoch: u64, mut row: PackedRow, states: Vec<Option<HiddenStates>>) -> Self {
        let has_states: Vec<bool> = states.iter().map(Option::is_some).collect();
        let skipped = has_states.iter().filter(|has| !**has).count();
        if skipped > 0 {
            row.keep_documents(&has_states);
        }
        Self { epoch, row, states: states.into_iter().flatten().collect(), skipped }
    }
}

impl Samples for TargetSamples {
    fn sample(&self, index: u32) -> Result<Sample, Error> {
        let path = || self.dataset.dir().to_path_buf();
        let sample = self.dataset.get(index as usize);
        let sample =
            sample.map_err(|source| Error::Sample { path: path(), sample: index, source })?;
        let known = 0..self.embedding_rows;
        match sample.input_ids.iter().find(|token| !known.contains(token)) {
            None => Ok(sample),
            Some(&token) => {
                let (path, rows) = (path(), self.embedding_rows);
                Err(Error::ForeignToken { path, sample: index, token, rows })
            }
        }
    }
}

impl RowSource for StreamedRows {
    fn start(&self, planned: Vec<PlannedRow>) -> Result<Box<dyn Rows>, Error> {
        let Self { samples, total_seq_len, stream } = self.clone();
        let rows = planned.into_iter().map(move |PlannedRow { epoch, samples: row }| {
            let row = pack(&*samples, &row, total_seq_len)?;
            Ok(WantedRow { requests: requests(&row), row: (epoch, row) })
        });
        match Stream::start(stream, rows) {
            Err(dflash_hidden::Error::Interrupted) => Ok(Box::new(Streaming(None))),
            stream => Ok(Box::new(Streaming(Some(stream?)))),
        }
    }
}

/// What the server is asked for: the documents of a row as it was packed.
fn requests(row: &PackedRow) -> Vec<Request> {
    let documents = row.documents().zip(&row.samples);
    documents
        .map(|(document, &sample)| Request {
            sample: sample.into(),
            input_ids: row.input_ids[document].to_vec(),
        })
        .collect()
}

impl Rows for Streaming {
    fn next(&mut self) -> Result<Option<LoadedRow>, Error> {
        // The ranks hear of it in the step, and end together.
        let Some(stream) = &mut self.0 else {
            return Err(dflash_hidden::Error::Interrupted.into());
        };
        let Some(fetched) = stream.next_row().transpose()? else { return Ok(None) };
        let FetchedRow { row: (epoch, row), samples } = fetched;
        let states = samples.into_iter().map(|fetched| fetched.states).collect();
        Ok(Some(LoadedRow::new(epoch, row, states)))
    }

    fn counters(&self) -> Counters {
        self.0.as_ref().map(Stream::counters).unwrap_or_default()
    }
}
