//! The thread that owns the model: batches in, one record per prompt out.

use std::time::{Duration, Instant};

use bytes::Bytes;
use dflash_hidden::{HiddenStates, Metadata};
use dflash_model::want_of_memory;

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
    let mut budget = Budget { tokens: max_batch_tokens, most: max_batch_tokens, ran: 0 };
    while let Some(Batch { jobs, cancelled }) = queue.next_batch(budget.tokens) {
        metrics.cancelled.add(cancelled);
        if !jobs.is_empty() {
            run_batch(model, jobs, metrics, &mut budget);
            report.maybe(metrics, queue.waiting());
        }
    }
}

/// How many tokens to run at once: fewer once memory has run out, and slowly more again.
struct Budget {
    tokens: usize,
    most: usize,
    /// Tokens of the largest batch that ever ran.
    ran: usize,
}

impl Budget {
    fn fitted(&mut self, tokens: usize) {
        self.tokens = (self.tokens + self.tokens / 64 + 1).min(self.most);
        self.ran = self.ran.max(tokens);
    }

    /// What came of a batch that did not fit. One prompt that has no memory where as many tokens had
    /// some before is not too long; the server is short of memory, and may have more later.
    fn failed(&mut self, tokens: usize, reason: String) -> Error {
        self.tokens = self.tokens.min(tokens / 2).max(1);
        match tokens <= self.ran {
            true => Error::ShortOfMemory { tokens, reason },
            false => Error::OutOfMemory { tokens, reason },
        }
    }
}

fn run_batch(
    model: &mut dyn Featurizer,
    mut jobs: Vec<Job>,
    metrics: &Metrics,
    budget: &mut Budget,
) {
    let start = Instant::now();
    let layer_ids = needed_layers(&jobs);
    let features = features(model, &jobs, &layer_ids);
    metrics.batches.add(1);
    metrics.busy_nanos.add(start.elapsed().as_nanos() as u64);
    let error = match features {
        Ok(rows) => {
            budget.fitted(jobs.iter().map(|job| job.input_ids.len()).sum());
            return answer(model.facts(), jobs, &layer_ids, rows, metrics);
        }
        Err(Error::OutOfMemory { tokens, reason }) => {
            metrics.out_of_memory.add(1);
            budget.failed(tokens, reason)
        }
        Err(error) => error,
    };
    if jobs.len() > 1 {
        // One prompt may need more memory than is left; that must not fail the others.
        tracing::warn!("{error}; running its {} prompts in halves", jobs.len());
        let rest = jobs.split_off(jobs.len() / 2);
        run_batch(model, jobs, metrics, budget);
        run_batch(model, rest, metrics, budget);
    } else if let Some(job) = jobs.pop() {
        tracing::error!("{error}");
        metrics.failed.add(1);
        drop(job.reply.send(Err(error)));
    }
}

/// The rows of each job, or the error that a panic for want of memory is as well.
fn features(
    model: &mut dyn Featurizer,
    jobs: &[Job],
    layer_ids: &[u32],
) -> Result<Vec<Vec<Bytes>>, Error> {
    let prompts = PackedPrompts::new(jobs.iter().map(|job| job.input_ids.as_slice()));
    let tokens = prompts.input_ids.len();
    // A forward pass changes nothing that outlives it.
    want_of_memory(|| model.features(&prompts, layer_ids))
        .unwrap_or_else(|reason| Err(Error::OutOfMemory { tokens, reason }))
}

/// All layers that some job wants, ascending.
fn needed_layers(jobs: &[Job]) -> Vec<u32> {
    let mut layer_ids: Vec<u32> = jobs.iter().flat_map(|job| job.layer_ids.clone()).collect();
    layer_ids.sort_unstable();
    layer_ids.dedup();
    layer_ids
}

/// The record of one prompt: of `rows`, a layer each of `layer_ids`, those that it asked for.
fn record(
    facts: &ModelFacts,
    job: &Job,
    layer_ids: &[u32],
    rows: Vec<Bytes>,
) -> Result<HiddenStates, Error> {
    let Metadata { hidden_size, dtype, .. } = facts.metadata;
    let all = layer_ids.iter().zip(rows);
    let layers = all.filter(|(id, _)| job.layer_ids.contains(id)).map(|(_, rows)| rows).collect();
    let (ids, tokens) = (job.layer_ids.clone(), job.input_ids.len());
    Ok(HiddenStates::new(ids, tokens, hidden_size, dtype, layers)?)
}

fn answer(
    facts: &ModelFacts,
    jobs: Vec<Job>,
    layer_ids: &[u32],
    rows: Vec<Vec<Bytes>>,
    metrics: &Metrics,
) {
    for (job, rows) in jobs.into_iter().zip(rows) {
        let record = record(facts, &job, layer_ids, rows);
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
