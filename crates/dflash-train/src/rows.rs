//! Packed rows with their hidden states, in order and fetched ahead.

use std::sync::Arc;

use dflash_data::{Dataset, PackedRow, Sample};
use dflash_hidden::{Counters, Fetched, HiddenStates, Request, SourceConfig, Stream, StreamConfig};
use dflash_model::draft::DraftConfig;
use dflash_model::target::TargetConfig;

use crate::Error;
use crate::config::TrainConfig;
use crate::order::PlannedRow;
use crate::trainer::StepExtras;

/// One row with its hidden states; what was left out is counted.
pub(crate) struct LoadedRow {
    pub(crate) epoch: u64,
    pub(crate) row: PackedRow,
    pub(crate) states: Vec<HiddenStates>,
    pub(crate) skipped: usize,
}

impl LoadedRow {
    pub(crate) fn count(&self, extras: &mut StepExtras) {
        extras.tokens += self.row.input_ids.len() as f64;
        extras.rows += 1.0;
        extras.skipped += self.skipped as f64;
    }
}

/// This rank's rows in order, with their hidden states as they come.
pub(crate) struct Rows {
    /// `None` where the run was told to stop before a server was ready.
    stream: Option<Stream>,
    planned: Box<dyn Iterator<Item = PlannedRow>>,
    source: RowSource,
}

/// Where rows and their hidden states come from.
#[derive(Clone)]
pub(crate) struct RowSource {
    pub(crate) dataset: Arc<Dataset>,
    pub(crate) stream: StreamConfig,
    /// Tokens of a packed row.
    pub(crate) total_seq_len: usize,
    /// Rows of the target's embedding.
    pub(crate) embedding_rows: i64,
}

impl RowSource {
    /// Starts to fetch the rows of `planned` in their order.
    pub(crate) fn start(
        &self,
        planned: impl Iterator<Item = PlannedRow> + Clone + Send + 'static,
    ) -> Result<Rows, Error> {
        let wanted = requests(planned.clone(), Arc::clone(&self.dataset), self.total_seq_len);
        let stream = match Stream::start(self.stream.clone(), wanted) {
            Err(dflash_hidden::Error::Interrupted) => None,
            stream => Some(stream?),
        };
        Ok(Rows { stream, planned: Box::new(planned), source: self.clone() })
    }
}

impl Rows {
    /// What happened to this rank's requests so far.
    pub(crate) fn counters(&self) -> Counters {
        self.stream.as_ref().map(Stream::counters).unwrap_or_default()
    }

    /// The next row; `None` at the end.
    pub(crate) fn next(&mut self) -> Result<Option<LoadedRow>, Error> {
        let Some(planned) = self.planned.next() else { return Ok(None) };
        // The ranks hear of it in the step, and end together.
        let Some(stream) = &mut self.stream else {
            return Err(dflash_hidden::Error::Interrupted.into());
        };
        let fetched = match stream.next_row() {
            Some(fetched) => fetched?,
            // The feeder stops at a sample that it cannot read; reading it here says why.
            None => {
                for &sample in &planned.samples {
                    self.sample(sample)?;
                }
                return Ok(None);
            }
        };
        let mut samples = Vec::with_capacity(fetched.len());
        let mut states = Vec::with_capacity(fetched.len());
        let asked = fetched.len();
        for Fetched { sample, states: found } in fetched {
            if let Some(found) = found {
                samples.push((sample as u32, self.sample(sample as u32)?));
                states.push(found);
            }
        }
        let skipped = asked - samples.len();
        let row = PackedRow::from_samples(&samples, self.source.total_seq_len);
        Ok(Some(LoadedRow { epoch: planned.epoch, row, states, skipped }))
    }

    /// Reads a sample and checks that the target knows its tokens.
    fn sample(&self, index: u32) -> Result<Sample, Error> {
        let sample = self.source.dataset.get(index as usize)?;
        match sample
            .input_ids
            .iter()
            .find(|&&token| token < 0 || token >= self.source.embedding_rows)
        {
            None => Ok(sample),
            Some(&token) => Err(Error::ForeignToken {
                path: self.source.dataset.dir().into(),
                sample: index,
                token,
                rows: self.source.embedding_rows,
            }),
        }
    }
}

/// What the server is asked for: the samples of each row, cut to the row's length.
fn requests(
    planned: impl Iterator<Item = PlannedRow> + Send + 'static,
    dataset: Arc<Dataset>,
    total_seq_len: usize,
) -> impl Iterator<Item = Vec<Request>> + Send + 'static {
    planned.map_while(move |row| {
        row.samples
            .iter()
            .map(|&sample| {
                let mut input_ids = dataset.get(sample as usize).ok()?.input_ids;
                input_ids.truncate(total_seq_len);
                Some(Request { sample: sample.into(), input_ids })
            })
            .collect()
    })
}

/// How a run's hidden states are asked for; `teacher` is a layer besides the draft's own.
pub(crate) fn stream_config(
    config: &TrainConfig,
    target: &TargetConfig,
    draft: &DraftConfig,
    teacher: Option<u32>,
) -> StreamConfig {
    let hidden = &config.hidden;
    let source = SourceConfig {
        endpoints: hidden.endpoints.clone(),
        offline_dir: hidden.offline_dir.clone(),
    };
    let mut layer_ids = draft.target_layer_ids.clone();
    layer_ids.extend(teacher.filter(|layer| !draft.target_layer_ids.contains(layer)));
    StreamConfig {
        vocab_size: Some(target.vocab_size as usize),
        num_hidden_layers: Some(target.num_hidden_layers as u32),
        on_missing: hidden.on_missing,
        on_generate: hidden.on_generate,
        window_bytes: hidden.window_bytes,
        max_in_flight: hidden.max_in_flight,
        stop: Arc::clone(&config.stop),
        ..StreamConfig::new(source, layer_ids, target.hidden_size as usize)
    }
}
