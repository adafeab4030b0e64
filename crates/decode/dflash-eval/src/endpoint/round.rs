//! One server's answers to one set in one mode, made part by part.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::{Answer, SetPart, Verification, Whole};
use dflash_chat::{Message, Role};
use dflash_io::{Progress, say};
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use super::attempts::Attempts;
use super::chat::{Manner, Reply, ask};
use super::counters::Counters;
use super::server::Server;
use crate::Error;

/// Number of consecutive failed rows after which no more are sent.
const GIVEN_UP: usize = 8;
/// Sent before the measurement: first requests allocate memory and fill caches.
const WARM_UP: &str = "Count from one to ten.";
const WARM_UP_TOKENS: usize = 32;

/// A question and its follow-up questions.
#[derive(Debug, Clone)]
pub(crate) struct Dialogue {
    pub(crate) messages: Vec<Message>,
    pub(crate) later: Vec<Message>,
}

/// A server's answers to a set.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// By row and turn; possibly none.
    pub(crate) answers: Vec<Answer>,
    pub(crate) whole: Whole,
    /// Rows that are too long for the server.
    pub(crate) skipped: usize,
    /// Rows that were not answered completely, and why the latest was not.
    pub(crate) failed: usize,
    pub(crate) fault: Option<Error>,
}

/// The progress of all servers.
pub(crate) struct Shown {
    progress: Progress,
    rows: u64,
}

impl Shown {
    pub(crate) fn new(progress: Progress) -> Self {
        Self { progress, rows: 0 }
    }

    fn advance(&mut self, answers: usize) {
        self.rows += 1;
        self.progress.update(self.rows, format!("{answers} answers"));
    }
}

/// The answers of one server.
pub(crate) struct Round {
    work: Arc<Work>,
    concurrency: usize,
    parts: Vec<SetPart>,
    /// The server's counts for each part, if they were only read per part.
    counted: Vec<Verification>,
    /// Number of requests that the server reports as served.
    served: f64,
}

impl Round {
    pub(crate) fn new(
        server: &Server,
        manner: Manner,
        concurrency: usize,
        dialogues: Arc<Vec<Dialogue>>,
        shown: Arc<Mutex<Shown>>,
    ) -> Self {
        let work = Work {
            server: server.clone(),
            manner,
            alone: concurrency == 1 && server.counts,
            dialogues,
            shown,
            skipped: AtomicUsize::new(0),
            failed: AtomicUsize::new(0),
            in_a_row: AtomicUsize::new(0),
            uncounted: AtomicUsize::new(0),
            requests: AtomicUsize::new(0),
            last_fault: Mutex::default(),
            answers: Mutex::default(),
        };
        let (parts, counted) = (Vec::new(), Vec::new());
        Self { work: Arc::new(work), concurrency, parts, counted, served: 0.0 }
    }

    /// Sends the warm-up requests. A server that fails all is given up at its first failed
    /// question.
    pub(crate) async fn warm_up(&self) {
        let mut requests = JoinSet::new();
        for _ in 0..self.concurrency {
            let work = Arc::clone(&self.work);
            requests.spawn(async move { work.warm_up().await });
        }
        let mut faults = Vec::new();
        while let Some(ended) = requests.join_next().await {
            faults.extend(ended.expect("a request does not panic").err());
        }
        if let Some(fault) = faults.last() {
            let (url, failed) = (self.work.server.shown(), faults.len());
            say(format!(
                "{failed} of {} warm-up requests to {url} failed: {fault}",
                self.concurrency
            ));
        }
        if faults.len() == self.concurrency {
            self.work.in_a_row.store(GIVEN_UP - 1, Ordering::Relaxed);
        }
    }

    /// Answers `rows` with this round's concurrency; rows that fail are counted.
    pub(crate) async fn answer(&mut self, rows: Range<usize>) {
        let work = &self.work;
        let failed = work.failed.load(Ordering::Relaxed);
        let before = work.counters().await;
        let said = work.tokens().await;
        let began = Instant::now();
        let mut workers = JoinSet::new();
        let next = Arc::new(AtomicUsize::new(rows.start));
        for _ in 0..self.concurrency.min(rows.len()) {
            let (work, next) = (Arc::clone(work), Arc::clone(&next));
            workers.spawn(async move { work.run(&next, rows.end).await });
        }
        while let Some(ended) = workers.join_next().await {
            ended.expect("a worker does not panic");
        }
        let seconds = began.elapsed().as_secs_f64();
        // The time of a part in which rows failed is not that of its answers.
        if work.failed.load(Ordering::Relaxed) == failed {
            self.parts.push(SetPart { tokens: work.tokens().await - said, seconds });
        }
        if let Some((before, after)) = before.zip(work.counters().await) {
            let served = after.requests.zip(before.requests);
            self.served += served.map_or(0.0, |(after, before)| (after - before).max(0.0));
            match after.since(&before) {
                Some(counted) => self.counted.push(counted),
                None => _ = work.uncounted.fetch_add(1, Ordering::Relaxed),
            }
        }
    }

    /// The answers to `set`.
    pub(crate) async fn finish(self, set: &str) -> Outcome {
        let work = &self.work;
        let load = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
        let (url, own) = (work.server.shown(), load(&work.requests));
        let failed = load(&work.failed);
        let fault = work.last_fault.lock().await.take();
        if let Some(fault) = &fault {
            say(format!("{failed} rows of {set} were not answered completely: {fault}"));
        }
        if load(&work.uncounted) > 0 {
            say(format!(
                "the counters of {url} were reset, or could not be read, in between: acceptance is of the other answers"
            ));
        }
        if self.served as usize > own {
            let served = self.served;
            say(format!(
                "{url} served {served} requests, but {own} were sent from here: its counters include those of other clients"
            ));
        }
        let mut answers = std::mem::take(&mut *work.answers.lock().await);
        answers.sort_by_key(|answer| (answer.row, answer.turn));
        let skipped = load(&work.skipped);
        let whole = if answers.is_empty() { Whole::default() } else { self.whole() };
        Outcome { answers, whole, skipped, failed, fault }
    }

    /// Measurements over all answers.
    fn whole(self) -> Whole {
        if self.concurrency == 1 {
            return Whole::default();
        }
        let counted = Verification::sum(self.counted.iter());
        Whole {
            verification: Some(counted).filter(|counted| counted.steps > 0),
            seconds: Some(self.parts.iter().map(|part| part.seconds).sum()),
            parts: self.parts,
        }
    }
}

/// State shared by all workers.
struct Work {
    server: Server,
    manner: Manner,
    /// Whether counters can be read after each answer.
    alone: bool,
    dialogues: Arc<Vec<Dialogue>>,
    shown: Arc<Mutex<Shown>>,
    skipped: AtomicUsize,
    /// The number of rows that were not answered completely, the consecutive ones among the latest,
    /// and why the latest failed.
    failed: AtomicUsize,
    in_a_row: AtomicUsize,
    last_fault: Mutex<Option<Error>>,
    /// Answers, or parts, whose steps are missing from the counters.
    uncounted: AtomicUsize,
    requests: AtomicUsize,
    answers: Mutex<Vec<Answer>>,
}

impl Work {
    async fn warm_up(&self) -> Result<(), Error> {
        let max_tokens = WARM_UP_TOKENS.min(self.manner.max_tokens);
        let manner = Manner { max_tokens, ..self.manner };
        let mut attempts = Attempts::default();
        loop {
            match ask(&self.server, &[Message::text(Role::User, WARM_UP)], manner).await {
                Err(fault) if attempts.again(&fault).await => {}
                outcome => return outcome.map(|_| ()),
            }
        }
    }

    /// Processes one row after the other, up to `end`.
    async fn run(&self, next: &AtomicUsize, end: usize) {
        let mut counters = self.count().await;
        loop {
            let row = next.fetch_add(1, Ordering::Relaxed);
            if row >= end {
                return;
            }
            if self.in_a_row.load(Ordering::Relaxed) >= GIVEN_UP {
                self.failed.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            if let Err(fault) = self.answer(row, self.dialogues[row].clone(), &mut counters).await {
                self.failed.fetch_add(1, Ordering::Relaxed);
                self.in_a_row.fetch_add(1, Ordering::Relaxed);
                *self.last_fault.lock().await = Some(fault);
                // Counts for a failed answer belong to no answer.
                counters = self.count().await;
            }
            let made = self.answers.lock().await.len();
            self.shown.lock().await.advance(made);
        }
    }

    /// The counters, if they are read after each answer.
    async fn count(&self) -> Option<Counters> {
        if self.alone { self.counters().await } else { None }
    }

    /// The counters, if there are any.
    async fn counters(&self) -> Option<Counters> {
        if self.server.counts { self.server.settled().await.ok().flatten() } else { None }
    }

    /// Tokens of all answers so far.
    async fn tokens(&self) -> usize {
        self.answers.lock().await.iter().map(|answer| answer.tokens).sum()
    }

    /// Sends a question, with retries if the server fails.
    async fn ask(
        &self,
        messages: &[Message],
        counters: &mut Option<Counters>,
    ) -> Result<Reply, Error> {
        let mut attempts = Attempts::default();
        loop {
            match ask(&self.server, messages, self.manner).await {
                Err(fault) if attempts.again(&fault).await => {}
                outcome => return outcome,
            }
            *counters = self.count().await;
        }
    }

    /// Answers a row, turn by turn; `counters` are those before it, and then those after it.
    async fn answer(
        &self,
        row: usize,
        mut dialogue: Dialogue,
        counters: &mut Option<Counters>,
    ) -> Result<(), Error> {
        let mut turns = dialogue.later.into_iter();
        for turn in 0.. {
            let reply = match self.ask(&dialogue.messages, counters).await {
                Ok(reply) => reply,
                Err(error) if is_too_long(&error) => {
                    self.skipped.fetch_add(usize::from(turn == 0), Ordering::Relaxed);
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
            self.requests.fetch_add(1, Ordering::Relaxed);
            self.in_a_row.store(0, Ordering::Relaxed);
            let mut counted = None;
            if self.alone {
                let after = self.count().await;
                counted = after.as_ref().zip(counters.as_ref()).and_then(|(a, b)| a.since(b));
                self.uncounted.fetch_add(usize::from(counted.is_none()), Ordering::Relaxed);
                *counters = after;
            }
            let text = reply.text.clone();
            self.answers.lock().await.push(Answer {
                row,
                turn,
                prompt_tokens: reply.prompt_tokens,
                tokens: reply.tokens,
                first_token_s: reply.first_token_s,
                total_s: reply.total_s,
                cut: reply.cut,
                verification: verification(&reply, counted),
            });
            let Some(next) = turns.next() else { return Ok(()) };
            dialogue.messages.push(Message::text(Role::Assistant, text));
            dialogue.messages.push(next);
        }
        Ok(())
    }
}

/// From the counters, or from the reply itself.
fn verification(reply: &Reply, counted: Option<Verification>) -> Option<Verification> {
    counted.or_else(|| reply.verification.clone()).filter(|counts| counts.steps > 0)
}

/// Whether a server reports that prompt and answer exceed its context: vLLM, SGLang and llama.cpp
/// do so with this status and this word.
fn is_too_long(error: &Error) -> bool {
    matches!(error, Error::Refused { status: 400, text, .. } if text.contains("context"))
}
