//! The thread that owns the model: batches in, one record per prompt out.
//!
//! Rows may still be on their way from the device when a batch has been computed. Then the next
//! batch, if there is one, begins before they are waited for: two batches are in flight.

use std::time::{Duration, Instant};

use bytes::Bytes;
use dflash_hidden_states::{HiddenStates, Metadata};
use dflash_target::{PackedPrompts, TokenBudget};
use dflash_tensor::catch_oom;

use crate::error::Error;
use crate::featurizer::{Features, Featurizer, ModelFacts, StateRows};
use crate::metrics::Metrics;
use crate::queue::{Batch, Job, Queue};

/// How often a busy server logs its progress.
const REPORT_EVERY: Duration = Duration::from_secs(30);

/// Runs batches until the queue closes.
pub(crate) fn run(
    model: &mut dyn Featurizer,
    queue: &Queue,
    metrics: &Metrics,
    max_batch_tokens: usize,
) {
    let mut report = Report::new();
    let budget = TokenBudget::new(max_batch_tokens);
    let mut worker = Worker { model, metrics, budget, broken: false };
    let mut before = None;
    while !worker.broken {
        let tokens = worker.budget.tokens();
        let next = match &before {
            None => queue.next_batch(tokens),
            Some(_) => queue.waiting_batch(tokens),
        };
        let Some(Batch { jobs, cancelled }) = next else {
            let Some(before) = before.take() else { return };
            worker.settle(before);
            continue;
        };
        metrics.cancelled.add(cancelled);
        if !jobs.is_empty() {
            before = worker.run_beside(before.take(), jobs);
            report.maybe(metrics, queue.waiting());
        }
    }
}

struct Worker<'a> {
    model: &'a mut dyn Featurizer,
    metrics: &'a Metrics,
    budget: TokenBudget,
    /// Whether the model cannot be used any more.
    broken: bool,
}

/// A batch that has been computed, is being computed, or has failed.
struct Begun {
    jobs: Vec<Job>,
    layer_ids: Vec<u32>,
    features: Result<Features, Error>,
}

impl Worker<'_> {
    /// Begins a batch, then finishes the previous one; returns the batch that is still in flight.
    fn run_beside(&mut self, before: Option<Begun>, jobs: Vec<Job>) -> Option<Begun> {
        let begun = self.begin(jobs);
        let alone = before.is_none();
        if let Some(before) = before {
            self.settle(before);
        }
        match &begun.features {
            Ok(Features::Coming(_)) => return Some(begun),
            // The memory of the previous batch is free now.
            Err(Error::OutOfMemory { .. }) if !alone => self.run_batch(begun.jobs),
            _ => self.settle(begun),
        }
        None
    }

    fn run_batch(&mut self, jobs: Vec<Job>) {
        let begun = self.begin(jobs);
        self.settle(begun);
    }

    fn begin(&mut self, jobs: Vec<Job>) -> Begun {
        let start = Instant::now();
        let layer_ids = needed_layers(&jobs);
        let features = features(self.model, &jobs, &layer_ids);
        self.metrics.batches.add(1);
        self.metrics.busy_nanos.add(start.elapsed().as_nanos() as u64);
        Begun { jobs, layer_ids, features }
    }

    /// Waits for a batch's rows and answers its jobs.
    fn settle(&mut self, Begun { jobs, layer_ids, features }: Begun) {
        let start = Instant::now();
        let rows = features.and_then(Features::rows);
        self.metrics.busy_nanos.add(start.elapsed().as_nanos() as u64);
        match rows {
            Ok(rows) => {
                self.budget.fitted(jobs.iter().map(|job| job.input_ids.len()).sum());
                answer(self.model.facts(), jobs, &layer_ids, rows, self.metrics);
            }
            Err(error) => self.fail(jobs, error),
        }
    }

    /// Runs a failed batch again in halves, or answers its only job.
    fn fail(&mut self, mut jobs: Vec<Job>, error: Error) {
        if error.is_lasting() {
            self.broken = true;
            tracing::error!("{error}");
            self.metrics.failed.add(jobs.len() as u64);
            // Dropping the jobs tells their clients that the server is shutting down.
            return;
        }
        let error = match error {
            Error::OutOfMemory { tokens, reason } => {
                self.metrics.out_of_memory.add(1);
                no_memory(&mut self.budget, tokens, reason)
            }
            error => error,
        };
        if jobs.len() > 1 {
            // One prompt may need more memory than is left; the others must not fail with it.
            tracing::warn!("{error}; running its {} prompts again in halves", jobs.len());
            let rest = jobs.split_off(jobs.len() / 2);
            self.run_batch(jobs);
            self.run_batch(rest);
        } else if let Some(job) = jobs.pop() {
            tracing::error!("{error}");
            self.metrics.failed.add(1);
            drop(job.reply.send(Err(error)));
        }
    }
}

/// The error for a batch that ran out of memory. If as many tokens have fit before, a single prompt
/// is not too long: the server is short of memory, and may have more later.
fn no_memory(budget: &mut TokenBudget, tokens: usize, reason: String) -> Error {
    match budget.failed(tokens) {
        true => Error::ShortOfMemory { tokens, reason },
        false => Error::OutOfMemory { tokens, reason },
    }
}

/// The rows of each job, or the error; running out of memory is an error too.
fn features(
    model: &mut dyn Featurizer,
    jobs: &[Job],
    layer_ids: &[u32],
) -> Result<Features, Error> {
    let prompts = PackedPrompts::new(jobs.iter().map(|job| job.input_ids.as_slice()));
    let tokens = prompts.input_ids.len();
    // A forward pass has no lasting side effects.
    catch_oom(|| model.features(&prompts, layer_ids))
        .unwrap_or_else(|reason| Err(Error::OutOfMemory { tokens, reason }))
}

/// All layers that some job needs, ascending.
fn needed_layers(jobs: &[Job]) -> Vec<u32> {
    let mut layer_ids: Vec<u32> = jobs.iter().flat_map(|job| job.layer_ids.clone()).collect();
    layer_ids.sort_unstable();
    layer_ids.dedup();
    layer_ids
}

/// The record of one prompt: its layers out of `rows`, which has one per entry of `layer_ids`.
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
    rows: StateRows,
    metrics: &Metrics,
) {
    for (job, rows) in jobs.into_iter().zip(rows) {
        let record = record(facts, &job, layer_ids, rows);
        metrics.prompts.add(1);
        metrics.tokens.add(job.input_ids.len() as u64);
        metrics.bytes.add(record.as_ref().map_or(0, |record| record.byte_len() as u64));
        // If the client has left, the record is dropped.
        let _ = job.reply.send(record);
    }
}

/// Logs a line now and then, to show that the server is working.
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
