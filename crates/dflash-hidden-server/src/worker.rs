//! The thread that owns the model: batches in, one record per prompt out.

use std::time::{Duration, Instant};

use bytes::Bytes;
use dflash_hidden::{HiddenStates, Metadata};

use crate::error::Error;
use crate::featurizer::{Featurizer, ModelFacts, PackedPrompts};
use crate::metrics::Metrics;
use crate::queue::{Batch, Job, Queue};

/// How often a busy server says so.
const REPORT_EVERY: Duration = Duration::from_secs(30);

/// Runs batches until the queue closes.
pub(crate) fn run(
    model: &mut dyn Featurizer,
    queue: &Queue,
    metrics: &Metrics,
    max_batch_tokens: usize,
) {
    let mut report = Report::new();
    while let Some(Batch { jobs, cancelled }) = queue.next_batch(max_batch_tokens) {
        metrics.cancelled.add(cancelled);
        if !jobs.is_empty() {
            run_batch(model, jobs, metrics);
            report.maybe(metrics, queue.waiting());
        }
    }
}

fn run_batch(model: &mut dyn Featurizer, jobs: Vec<Job>, metrics: &Metrics) {
    let start = Instant::now();
    let layer_ids = needed_layers(&jobs);
    let prompts = PackedPrompts::new(jobs.iter().map(|job| job.input_ids.as_slice()));
    let features = model.features(&prompts, &layer_ids);
    metrics.batches.add(1);
    metrics.busy_nanos.add(start.elapsed().as_nanos() as u64);
    match features {
        Ok(layers) => answer(model.facts(), jobs, &Layers { layer_ids, layers }, metrics),
        Err(error) => match <[Job; 1]>::try_from(jobs) {
            Ok([job]) => {
                tracing::error!("{error}");
                metrics.failed.add(1);
                drop(job.reply.send(Err(error)));
            }
            // One prompt may need more memory than is left; that must not fail the others.
            Err(jobs) => {
                tracing::warn!("{error}; running its {} prompts one by one", jobs.len());
                jobs.into_iter().for_each(|job| run_batch(model, vec![job], metrics));
            }
        },
    }
}

/// All layers that some job wants, ascending.
fn needed_layers(jobs: &[Job]) -> Vec<u32> {
    let mut layer_ids: Vec<u32> = jobs.iter().flat_map(|job| job.layer_ids.clone()).collect();
    layer_ids.sort_unstable();
    layer_ids.dedup();
    layer_ids
}

/// The rows of a batch.
struct Layers {
    layer_ids: Vec<u32>,
    layers: Vec<Bytes>,
}

impl Layers {
    /// The rows of one prompt, which starts at row `start`. Shares the batch's memory.
    fn record(&self, facts: &ModelFacts, job: &Job, start: usize) -> Result<HiddenStates, Error> {
        let Metadata { hidden_size, dtype, .. } = facts.metadata;
        let row = hidden_size * dtype.size();
        let (begin, end) = (start * row, (start + job.input_ids.len()) * row);
        let all = self.layer_ids.iter().zip(&self.layers);
        let wanted = all.filter(|(id, _)| job.layer_ids.contains(id));
        let layers = wanted.map(|(_, bytes)| bytes.slice(begin..end)).collect();
        let (ids, tokens) = (job.layer_ids.clone(), job.input_ids.len());
        Ok(HiddenStates::new(ids, tokens, hidden_size, dtype, layers)?)
    }
}

fn answer(facts: &ModelFacts, jobs: Vec<Job>, layers: &Layers, metrics: &Metrics) {
    let mut start = 0;
    for job in jobs {
        let record = layers.record(facts, &job, start);
        start += job.input_ids.len();
        metrics.prompts.add(1);
        metrics.tokens.add(job.input_ids.len() as u64);
        metrics.bytes.add(record.as_ref().map_or(0, |record| record.byte_len() as u64));
        // A client that has left has no use for it.
        let _ = job.reply.send(record);
    }
}

/// Logs a line now and then, to show that the server is at work.
struct Report {
    last: Instant,
    prompts: u64,
    tokens: u64,
}

impl Report {
    fn new() -> Self {
        Self { last: Instant::now(), prompts: 0, tokens: 0 }
    }

    fn maybe(&mut self, metrics: &Metrics, waiting: usize) {
        let elapsed = self.last.elapsed();
        if elapsed < REPORT_EVERY {
            return;
        }
        let (prompts, tokens) = (metrics.prompts.get(), metrics.tokens.get());
        let rate = |count: u64| count as f64 / elapsed.as_secs_f64();
        tracing::info!(
            "{prompts} prompts so far; {:.1} prompts/s, {:.0} tokens/s, {waiting} waiting",
            rate(prompts - self.prompts),
            rate(tokens - self.tokens),
        );
        *self = Self { last: Instant::now(), prompts, tokens };
    }
}
