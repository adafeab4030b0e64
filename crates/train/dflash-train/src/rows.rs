//! Packed rows with their hidden states, in order and prefetched.
//!
//! The stream's feeder thread reads each sample once and packs each row once. The packed row
//! travels with the requests for its hidden states and comes out with them, without the samples
//! that have none. A read error is delivered in place of its row. The step loop takes rows from a
//! trait, so that tests can run it on rows in memory.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use dflash_data::{Dataset, PackedRow, Sample};
use dflash_hidden_states::{
    Counters, FetchedRow, HiddenStates, Probe, Request, Stream, StreamConfig, WantedRow, probe,
};
use dflash_target::TargetIo;
use dflash_torch_sys::Interval;
use dflash_torch_sys::staging::{Upload, upload_to};
use tch::Device;

use crate::Error;
use crate::order::PlannedRow;
use crate::states::ComputedStates;

/// Maximum length of a probe in tokens: enough to be significant, and a cheap request.
pub(crate) const PROBE_TOKENS: usize = 64;

/// A source of samples: a dataset, or synthetic documents for `plan`.
pub(crate) trait Samples: Send + Sync {
    fn sample(&self, index: u32) -> Result<Sample, Error>;
}

/// A source of rows: a stream, a target in this process, or a test's memory.
pub(crate) trait RowSource {
    /// Starts loading `planned` in order.
    fn start(&self, planned: Vec<PlannedRow>) -> Result<Loading, Error>;

    /// How fetched rows are copied to `device`.
    fn upload(&self, device: Device) -> Result<Box<dyn Upload>, Error> {
        Ok(upload_to(device)?)
    }

    /// Samples for checking the source before the first step: one from every server or one stored;
    /// empty if rows are not fetched.
    fn probes(&self) -> Result<Vec<Probe>, Error> {
        Ok(Vec::new())
    }

    /// The same from another sample, the most varied of the first ones, for when [`Self::probes`]
    /// fail: a text of one repeated word may be misleading.
    fn second_probes(&self) -> Result<Vec<Probe>, Error> {
        Ok(Vec::new())
    }

    /// The parts of the target that the draft uses, if the source holds them in the run's type.
    fn head(&self) -> Option<TargetIo> {
        None
    }
}

/// Rows being loaded.
pub(crate) enum Loading {
    /// Fetched while the step computes.
    Fetched(Box<dyn RowStream>),
    /// Computed by this process, alternately with the step.
    Computed(Box<dyn ComputedRows>),
}

/// Rows that a target in this process computes on request.
pub(crate) trait ComputedRows {
    /// The next row; `None` at the end.
    fn next(&mut self) -> Result<Option<ComputedRow>, Error>;

    fn counters(&self) -> Counters;
}

/// Rows that are being fetched.
pub(crate) trait RowStream: Send {
    /// The next row; `None` at the end.
    fn next(&mut self) -> Result<Option<LoadedRow>, Error>;

    fn counters(&self) -> Counters;

    /// A flag that makes a pending [`Self::next`] on another thread return an interruption.
    fn closer(&self) -> Arc<AtomicBool>;
}

/// A row with its hidden states; samples left out are counted.
#[derive(Debug)]
pub(crate) struct LoadedRow {
    pub(crate) epoch: u64,
    /// Without the samples that have no hidden states.
    pub(crate) row: PackedRow,
    /// One per document of the row.
    pub(crate) states: Vec<HiddenStates>,
    pub(crate) skipped: usize,
}

/// A row with states computed in this process.
#[derive(Debug)]
pub(crate) struct ComputedRow {
    pub(crate) epoch: u64,
    /// Without the samples that have no hidden states.
    pub(crate) row: PackedRow,
    pub(crate) states: ComputedStates,
    pub(crate) skipped: usize,
    /// Time that the states took.
    pub(crate) target: TargetTime,
}

/// Time of a target's pass over a row.
#[derive(Debug)]
pub(crate) struct TargetTime {
    /// Time on the device.
    pub(crate) device: Interval,
    /// Time on the host, which on a GPU only launches the work.
    pub(crate) host: Duration,
}

/// A dataset's samples, checked to contain only the target's tokens.
#[derive(Debug)]
pub(crate) struct TargetSamples {
    pub(crate) dataset: Arc<Dataset>,
    /// A second dataset, whose samples are numbered after the first's.
    pub(crate) behind: Option<Arc<Dataset>>,
    /// Rows of the target's embedding.
    pub(crate) embedding_rows: i64,
}

/// Rows whose hidden states are fetched by a stream.
#[derive(Clone)]
pub(crate) struct StreamedRows {
    pub(crate) samples: Arc<dyn Samples>,
    pub(crate) total_seq_len: usize,
    pub(crate) stream: StreamConfig,
    /// Number of samples, from the first on, that may serve as a probe.
    pub(crate) candidates: u32,
}

/// An active stream; `None` if the run was stopped before a server was ready.
struct Streaming(Option<Stream<(u64, PackedRow), Error>>);

/// Reads the samples of a row and concatenates them.
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
        let own = index as usize;
        let (dataset, row) = match &self.behind {
            Some(behind) if own >= self.dataset.len() => (behind, own - self.dataset.len()),
            _ => (&self.dataset, own),
        };
        let path = || dataset.dir().to_path_buf();
        let sample = dataset.get(row);
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
    fn start(&self, planned: Vec<PlannedRow>) -> Result<Loading, Error> {
        let Self { samples, total_seq_len, stream, .. } = self.clone();
        let rows = planned.into_iter().map(move |PlannedRow { epoch, samples: row }| {
            let row = pack(&*samples, &row, total_seq_len)?;
            Ok(WantedRow { requests: requests(&row), row: (epoch, row) })
        });
        match Stream::start(stream, rows) {
            Err(dflash_hidden_states::Error::Interrupted) => {
                Ok(Loading::Fetched(Box::new(Streaming(None))))
            }
            stream => Ok(Loading::Fetched(Box::new(Streaming(Some(stream?))))),
        }
    }

    fn probes(&self) -> Result<Vec<Probe>, Error> {
        // Most sources have the first sample.
        for candidates in [self.candidates.min(1), self.candidates] {
            let samples: Vec<u32> = (0..candidates).collect();
            let probes = self.probes_of(&samples)?;
            if !probes.is_empty() {
                return Ok(probes);
            }
        }
        Ok(Vec::new())
    }

    fn second_probes(&self) -> Result<Vec<Probe>, Error> {
        let length = PROBE_TOKENS.min(self.total_seq_len);
        self.probes_of(&by_variety(&*self.samples, self.candidates, length)?)
    }
}

impl StreamedRows {
    /// A probe from each source for the first of `samples` that it has.
    fn probes_of(&self, samples: &[u32]) -> Result<Vec<Probe>, Error> {
        let requests = samples.iter().map(|&sample| {
            let mut input_ids = self.samples.sample(sample)?.input_ids;
            input_ids.truncate(PROBE_TOKENS.min(self.total_seq_len));
            Ok(Request { sample: sample.into(), input_ids })
        });
        let mut requests = requests.collect::<Result<Vec<_>, Error>>()?;
        requests.retain(|request| request.input_ids.len() > 1);
        Ok(probe(self.stream.clone(), &requests)?)
    }
}

/// The samples after the first and below `candidates`, ordered by the number of different tokens
/// among their first `length`, most first.
pub(crate) fn by_variety(
    samples: &dyn Samples,
    candidates: u32,
    length: usize,
) -> Result<Vec<u32>, Error> {
    let different = |index: u32| -> Result<usize, Error> {
        let input_ids = samples.sample(index)?.input_ids;
        Ok(input_ids.into_iter().take(length).collect::<HashSet<i64>>().len())
    };
    let counted = (1..candidates).map(|index| Ok((different(index)?, index)));
    let mut counted = counted.collect::<Result<Vec<_>, Error>>()?;
    counted.sort_by_key(|&(different, index)| (Reverse(different), index));
    Ok(counted.into_iter().map(|(_, index)| index).collect())
}

/// The requests for a row: its documents as packed.
fn requests(row: &PackedRow) -> Vec<Request> {
    let documents = row.documents().zip(&row.samples);
    documents
        .map(|(document, &sample)| Request {
            sample: sample.into(),
            input_ids: row.input_ids[document].to_vec(),
        })
        .collect()
}

impl RowStream for Streaming {
    fn next(&mut self) -> Result<Option<LoadedRow>, Error> {
        // The step reports the interruption to the ranks, and they end together.
        let Some(stream) = &mut self.0 else {
            return Err(dflash_hidden_states::Error::Interrupted.into());
        };
        let Some(fetched) = stream.next_row().transpose()? else { return Ok(None) };
        let FetchedRow { row: (epoch, row), samples } = fetched;
        let states = samples.into_iter().map(|fetched| fetched.states).collect();
        Ok(Some(LoadedRow::new(epoch, row, states)))
    }

    fn counters(&self) -> Counters {
        self.0.as_ref().map(Stream::counters).unwrap_or_default()
    }

    fn closer(&self) -> Arc<AtomicBool> {
        self.0.as_ref().map(Stream::closer).unwrap_or_default()
    }
}
