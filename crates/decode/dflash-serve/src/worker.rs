//! The thread that owns the models: jobs in, text out.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dflash_chat::ChatTokenizer;
use dflash_decode::{Engine, Finish, Models, NewToken, Output, Request, SequenceId, TextStream};

use crate::blocks::BlockReport;
use crate::metrics::Metrics;
use crate::queue::{Dropped, Event, FinishReason, Job, Party, Queue, Share, gives_way};

/// Summing up all caches takes a noticeable part of a small target's step.
const MEASURE_EVERY: Duration = Duration::from_millis(20);

/// Decodes the jobs of the queue until it closes.
pub(crate) fn run(models: &Models, engine: Engine<'_>, queue: &Queue, metrics: &Metrics) {
    let live = HashMap::new();
    Worker { models, engine, queue, metrics, live, measured: None }.run();
}

struct Worker<'a> {
    models: &'a Models,
    engine: Engine<'a>,
    queue: &'a Queue,
    metrics: &'a Metrics,
    live: HashMap<SequenceId, Live<'a>>,
    /// When the cache metrics were last updated.
    measured: Option<Instant>,
}

/// A choice in progress.
struct Live<'a> {
    job: Job,
    /// Whether it was preempted.
    rests: bool,
    text: TextStream<'a>,
    /// The prompt, while it has yet to be returned before the answer.
    echo: Option<Arc<[i64]>>,
    stop_ids: Vec<i64>,
    begun: Instant,
    first: Option<Instant>,
    prompt_tokens: usize,
    tokens: usize,
}

impl<'a> Worker<'a> {
    fn run(mut self) {
        loop {
            self.drop_those_left();
            // Before it may wait without work.
            self.measure();
            if !self.admit() {
                return;
            }
            match self.engine.step() {
                Ok(outputs) => outputs.into_iter().for_each(|output| self.hand_out(output)),
                Err(error) => self.drop_all(&error),
            }
        }
    }

    /// Updates the cache metrics: now and then, and always before it may wait.
    fn measure(&mut self) {
        let is_due = self.measured.is_none_or(|last| last.elapsed() > MEASURE_EVERY);
        if is_due || self.engine.is_empty() {
            let (live, kept) = self.engine.cache_bytes();
            self.metrics.caches(self.engine.len(), live, kept);
            self.metrics.resting(self.live.len() - self.engine.len());
            self.measured = Some(Instant::now());
        }
    }

    /// Fills the engine fairly; waits if there is no work. False once the queue is closed.
    fn admit(&mut self) -> bool {
        loop {
            if self.queue.is_closed() {
                return false;
            }
            let places = self.places();
            let holders: Vec<Party> = places.iter().map(|(_, party)| *party).collect();
            let resting = self.first_resting(&holders);
            let Some(next) = self.queue.next(&holders) else {
                match resting {
                    Some((_, id)) if self.engine.has_room() => self.wake(id),
                    None if self.live.is_empty() => drop(self.queue.wait()),
                    _ => return true,
                }
                continue;
            };
            if self.engine.has_room() {
                match resting {
                    Some((share, id)) if share <= Share::of(next, &holders) => self.wake(id),
                    _ => self.begin_next(next),
                }
                continue;
            }
            // Preempted sequences keep their caches: there are at most as many of them as places.
            let has_rest = self.live.len() < 2 * self.engine.len();
            match gives_way(next, &holders).filter(|_| has_rest) {
                Some(at) => {
                    self.rest(places[at].0);
                    self.begin_next(next);
                }
                None => return true,
            }
        }
    }

    /// The holders of places, in the order in which they began.
    fn places(&self) -> Vec<(SequenceId, Party)> {
        let having = self.live.iter().filter(|(_, live)| !live.rests);
        let mut places: Vec<_> = having.map(|(&id, live)| (id, live.job.party)).collect();
        places.sort_unstable_by_key(|(id, _)| *id);
        places
    }

    /// The preempted sequence whose turn comes first.
    fn first_resting(&self, holders: &[Party]) -> Option<(Share, SequenceId)> {
        let resting = self.live.iter().filter(|(_, live)| live.rests);
        resting.map(|(&id, live)| (Share::of(live.job.party, holders), id)).min()
    }

    fn rest(&mut self, id: SequenceId) {
        self.engine.rest(id);
        if let Some(live) = self.live.get_mut(&id) {
            live.rests = true;
        }
    }

    fn wake(&mut self, id: SequenceId) {
        self.engine.wake(id);
        if let Some(live) = self.live.get_mut(&id) {
            live.rests = false;
        }
    }

    fn begin_next(&mut self, party: Party) {
        if let Some(job) = self.queue.take(party) {
            self.begin(job);
        }
    }

    fn begin(&mut self, mut job: Job) {
        let begun = Instant::now();
        self.metrics.queued(begun - job.since);
        let text = TextStream::new(&self.models.tokenizer, std::mem::take(&mut job.stops));
        let text = text.showing(std::mem::take(&mut job.shown));
        let (stop_ids, prompt_tokens) = (job.request.stop_ids.clone(), job.prompt.len());
        // Its memory for the answer is released with the sequence.
        let grammar = job.request.grammar.take();
        let request = Request { prompt: job.prompt.to_vec(), grammar, ..job.request.clone() };
        let id = self.engine.add(request);
        let prompt = std::mem::take(&mut job.prompt);
        let echo = job.echo.then_some(prompt);
        let live = Live {
            job,
            rests: false,
            text,
            echo,
            stop_ids,
            begun,
            first: None,
            prompt_tokens,
            tokens: 0,
        };
        self.live.insert(id, live);
    }

    /// Frees the places of clients that have left.
    fn drop_those_left(&mut self) {
        let left: Vec<SequenceId> = self
            .live
            .iter()
            .filter(|(_, live)| live.job.events.is_closed())
            .map(|(&id, _)| id)
            .collect();
        for id in left {
            self.end(id, "abort");
        }
    }

    /// The engine has dropped its sequences: their clients are notified, and others are served.
    fn drop_all(&mut self, error: &dflash_decode::Error) {
        tracing::error!("{error}");
        let dropped: Vec<SequenceId> = self.live.keys().copied().collect();
        for id in dropped {
            let _ = self.live[&id].job.events.send(Err(Dropped::OutOfMemory));
            self.end(id, "error");
        }
    }

    fn hand_out(&mut self, output: Output) {
        let Some(live) = self.live.get_mut(&output.id) else { return };
        if let Some(block) = &output.block {
            self.metrics.block(block);
        }
        if live.first.is_none() {
            let now = Instant::now();
            live.first = Some(now);
            self.metrics.first_token(now - live.job.since);
            self.metrics.prompt(live.prompt_tokens, output.cached_tokens);
        }
        let id = output.id;
        if output.finish == Some(Finish::Grammar) {
            let _ = live.job.events.send(Err(Dropped::Grammar));
            return self.end(id, "error");
        }
        let event = live.event(output, &self.models.tokenizer);
        self.metrics.generated(event.count);
        let events = live.job.events.clone();
        // Counted before its client is notified.
        if let Some(finish) = event.finish {
            self.end(id, finish.name());
        }
        // A disconnected client is noticed at the next step.
        let _ = events.send(Ok(event));
    }

    fn end(&mut self, id: SequenceId, reason: &str) {
        self.engine.remove(id);
        if let Some(live) = self.live.remove(&id) {
            let now = Instant::now();
            let decoding = live.first.map(|first| now - first);
            self.metrics.ended(
                reason,
                now - live.job.since,
                now - live.begun,
                decoding,
                live.tokens,
            );
        }
    }
}

impl Live<'_> {
    /// The text of new tokens, up to a stop.
    fn event(&mut self, output: Output, tokenizer: &ChatTokenizer) -> Event {
        let mut event = Event {
            index: self.job.index,
            text: String::new(),
            tokens: Vec::new(),
            count: 0,
            cached_tokens: output.cached_tokens,
            block: None,
            finish: output.finish.map(|finish| match finish {
                Finish::Length => FinishReason::Length,
                Finish::Stop | Finish::Grammar => FinishReason::Stop,
            }),
        };
        if let Some(prompt) = self.echo.take() {
            event.text = tokenizer.decode(&prompt, false).unwrap_or_default();
            if self.job.request.prompt_logprobs {
                // The first token has none.
                let logprobs = std::iter::once(None).chain(output.prompt.into_iter().map(Some));
                let told = prompt.iter().zip(logprobs);
                event.tokens = told.map(|(&id, logprob)| NewToken { id, logprob }).collect();
            }
        }
        if self.job.reports_blocks {
            event.block = Some(BlockReport::of(output.block.as_ref(), tokenizer));
        }
        for token in output.tokens {
            event.count += 1;
            if let Some(block) = &mut event.block {
                block.add_token();
            }
            if self.stop_ids.contains(&token.id) {
                break;
            }
            // If the tokenizer cannot decode a token, its text is left out.
            event.add(&self.text.push(token.id).unwrap_or_default());
            event.tokens.push(token);
            if self.text.has_stopped() {
                event.finish = Some(FinishReason::Stop);
                break;
            }
        }
        if event.finish.is_some() {
            event.add(&self.text.finish().unwrap_or_default());
        }
        self.tokens += event.count;
        event
    }
}
