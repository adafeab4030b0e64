//! Choices waiting for a place in the engine, first come first served, and what they get.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use dflash_decode::{NewToken, Request};
use tokio::sync::mpsc::UnboundedSender;

/// One choice to be made.
#[derive(Debug)]
pub(crate) struct Job {
    /// Which of its request's choices.
    pub(crate) index: usize,
    pub(crate) request: Request,
    /// Strings that end its text.
    pub(crate) stops: Vec<String>,
    /// Closed when the client has left.
    pub(crate) events: UnboundedSender<Result<Event, OutOfMemory>>,
    /// When the HTTP request came.
    pub(crate) since: Instant,
}

/// What a step made of a choice.
#[derive(Debug, Clone)]
pub(crate) struct Event {
    pub(crate) index: usize,
    /// New text, whole characters.
    pub(crate) text: String,
    /// New tokens of the answer, without one that ends it.
    pub(crate) tokens: Vec<NewToken>,
    /// All new tokens.
    pub(crate) count: usize,
    /// Tokens of the prompt that were copied from another sequence's cache.
    pub(crate) cached_tokens: usize,
    pub(crate) finish: Option<FinishReason>,
}

/// The answer was dropped in a pass for which there was no memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OutOfMemory;

/// Why a choice ended, in OpenAI's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FinishReason {
    Stop,
    Length,
}

impl FinishReason {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// What comes next for the engine.
#[derive(Debug)]
pub(crate) enum Next {
    Job(Box<Job>),
    /// Nothing waits.
    Nothing,
    /// Nothing will come any more.
    Closed,
}

/// The queue. Its callers bound its length: every request holds a slot.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    jobs: VecDeque<Job>,
    closed: bool,
}

impl Queue {
    /// Appends jobs; false when the queue is closed.
    pub(crate) fn push(&self, jobs: Vec<Job>) -> bool {
        let mut state = self.state();
        if state.closed {
            return false;
        }
        // Clients that left hold no slot any more: without this their jobs could pile up.
        state.jobs.retain(|job| !job.events.is_closed());
        state.jobs.extend(jobs);
        self.changed.notify_one();
        true
    }

    /// The next job whose client is still there; waits for one if `wait`.
    pub(crate) fn next(&self, wait: bool) -> Next {
        let mut state = self.state();
        loop {
            if state.closed {
                return Next::Closed;
            }
            match state.jobs.pop_front() {
                Some(job) if job.events.is_closed() => {}
                Some(job) => return Next::Job(Box::new(job)),
                None if !wait => return Next::Nothing,
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Drops what waits, which tells its clients, and ends [`Self::next`].
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.jobs.clear();
        self.changed.notify_all();
    }

    /// Jobs not yet begun.
    pub(crate) fn waiting(&self) -> usize {
        self.state().jobs.iter().filter(|job| !job.events.is_closed()).count()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
