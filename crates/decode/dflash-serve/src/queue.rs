//! Choices that wait for a place in the engine.
//!
//! Places are assigned fairly: first to the API key with the fewest, then to the request with the
//! fewest, then to the oldest request. So a request with many choices, or a client with many
//! requests, uses free places but does not block others.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use dflash_decode::{NewToken, Request};
use tokio::sync::mpsc::UnboundedSender;

use crate::blocks::BlockReport;

/// The request of a job and its client, which determine its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Party {
    /// Number of the request, ascending by arrival.
    pub(crate) request: u64,
    /// Identifies its API key, if it has one.
    pub(crate) owner: u64,
}

/// How many places a party has: all requests of its owner, and its own request. The smaller share
/// comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Share {
    pub(crate) of_owner: usize,
    pub(crate) of_request: usize,
}

impl Share {
    /// The share of `party` in the places of `holders`.
    pub(crate) fn of(party: Party, holders: &[Party]) -> Self {
        let count = |is_same: &dyn Fn(&Party) -> bool| {
            holders.iter().filter(|holder| is_same(holder)).count()
        };
        Self {
            of_owner: count(&|holder| holder.owner == party.owner),
            of_request: count(&|holder| holder.request == party.request),
        }
    }
}

/// The holder that gives its place to `next`: one of an owner with at least two more places, or of
/// another request of the same owner that has several while `next` has none. It is taken from the
/// party with the most places, and there from the latest.
pub(crate) fn gives_way(next: Party, holders: &[Party]) -> Option<usize> {
    let own = Share::of(next, holders);
    let share = |at: usize| Share::of(holders[at], holders);
    let gives = |&at: &usize| {
        let share = share(at);
        match holders[at].owner == next.owner {
            true => own.of_request == 0 && share.of_request > 1,
            false => share.of_owner >= own.of_owner + 2,
        }
    };
    (0..holders.len()).filter(gives).max_by_key(|&at| (share(at), at))
}

/// One choice to be made.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) party: Party,
    /// Its index among the request's choices.
    pub(crate) index: usize,
    /// Without its prompt, which the choices of a request share until they begin.
    pub(crate) request: Request,
    pub(crate) prompt: Arc<[i64]>,
    /// Whether the prompt is returned before the answer.
    pub(crate) echo: bool,
    /// Whether its events report blocks.
    pub(crate) reports_blocks: bool,
    /// Special tokens that belong to its text.
    pub(crate) shown: Vec<i64>,
    /// Strings that end its text.
    pub(crate) stops: Vec<String>,
    /// Closed when the client has left.
    pub(crate) events: UnboundedSender<Result<Event, Dropped>>,
    /// When the HTTP request came.
    pub(crate) since: Instant,
}

/// The result of a step for a choice.
#[derive(Debug, Clone)]
pub(crate) struct Event {
    pub(crate) index: usize,
    /// New text, whole characters.
    pub(crate) text: String,
    /// New tokens of the answer, without an end token; before the first ones the prompt's tokens,
    /// if these are returned.
    pub(crate) tokens: Vec<NewToken>,
    /// All new tokens of the answer.
    pub(crate) count: usize,
    /// Tokens of the prompt that were copied from another sequence's cache.
    pub(crate) cached_tokens: usize,
    /// The block that the text comes from, if it was requested.
    pub(crate) block: Option<BlockReport>,
    pub(crate) finish: Option<FinishReason>,
}

impl Event {
    /// Adds text that its newest token made certain.
    pub(crate) fn add(&mut self, text: &str) {
        self.text += text;
        if let Some(block) = &mut self.block {
            block.add_text(text);
        }
    }
}

/// Why an answer was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dropped {
    /// A pass ran out of memory.
    OutOfMemory,
    /// Following its grammar exceeded the limits.
    Grammar,
}

/// Why a choice ended, in OpenAI's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FinishReason {
    Stop,
    Length,
    /// With tool calls.
    ToolCalls,
}

impl FinishReason {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}

/// The queue. Its callers bound its length: every request holds a slot.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The waiting choices of each request, in order of arrival.
    requests: VecDeque<VecDeque<Job>>,
    closed: bool,
}

impl Queue {
    /// Appends the jobs of a request; false when the queue is closed.
    pub(crate) fn push(&self, jobs: Vec<Job>) -> bool {
        let mut state = self.state();
        if state.closed {
            return false;
        }
        state.forget_those_left();
        state.requests.push_back(jobs.into());
        self.changed.notify_one();
        true
    }

    /// The next party, given the current `holders`.
    pub(crate) fn next(&self, holders: &[Party]) -> Option<Party> {
        let mut state = self.state();
        state.forget_those_left();
        let parties = state.requests.iter().filter_map(|jobs| Some(jobs.front()?.party));
        parties.min_by_key(|&party| Share::of(party, holders))
    }

    /// The next job of a request, unless its client has left.
    pub(crate) fn take(&self, party: Party) -> Option<Job> {
        let mut state = self.state();
        let is_its = |jobs: &&mut VecDeque<Job>| jobs.front().is_some_and(|job| job.party == party);
        let job = state.requests.iter_mut().find(is_its)?.pop_front();
        state.requests.retain(|jobs| !jobs.is_empty());
        job
    }

    /// Waits for a job; false once the queue is closed.
    pub(crate) fn wait(&self) -> bool {
        let mut state = self.state();
        while state.requests.is_empty() && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.closed
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.state().closed
    }

    /// Drops all waiting jobs, which notifies their clients, and ends [`Self::wait`].
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.requests.clear();
        self.changed.notify_all();
    }

    /// Jobs that have not begun.
    pub(crate) fn waiting(&self) -> usize {
        let mut state = self.state();
        state.forget_those_left();
        state.requests.iter().map(VecDeque::len).sum()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Clients that left hold no slot, so without this their jobs could pile up.
    fn forget_those_left(&mut self) {
        let is_there =
            |jobs: &VecDeque<Job>| jobs.front().is_some_and(|job| !job.events.is_closed());
        self.requests.retain(is_there);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn party(request: u64, owner: u64) -> Party {
        Party { request, owner }
    }

    #[test]
    fn a_place_is_given_by_whom_has_most() {
        let check = |next: Party, holders: &[Party], expect: Option<usize>| {
            assert_eq!(gives_way(next, holders), expect, "{next:?} {holders:?}");
        };
        let many = vec![party(1, 0); 4];
        check(party(2, 0), &many, Some(3));
        // A request does not preempt itself, nor a request with a single place.
        check(party(1, 0), &many, None);
        check(party(9, 0), &[party(1, 0), party(2, 0)], None);
        check(party(3, 0), &[party(1, 0), party(2, 0), party(2, 0), party(2, 0)], Some(3));
        // Between owners only the number of places counts, over all their requests.
        let singles: Vec<Party> = (0..4).map(|request| party(request, 7)).collect();
        check(party(9, 8), &singles, Some(3));
        check(party(9, 8), &[party(1, 7)], None);
        check(party(9, 8), &[party(1, 7), party(2, 7), party(3, 8)], None);
        check(party(9, 8), &[party(1, 7), party(2, 7), party(4, 7), party(3, 8)], Some(2));
        check(party(9, 8), &[], None);
    }

    #[test]
    fn turns_go_to_whom_has_least_and_then_by_age() {
        let queue = Queue::default();
        let mut clients = Vec::new();
        let mut push = |party: Party, count: usize| {
            let (events, client) = tokio::sync::mpsc::unbounded_channel();
            clients.push(client);
            let job = |index| Job {
                party,
                index,
                request: Request::new(
                    &[],
                    &dflash_decode::Limits { max_new_tokens: 1, stop_ids: Vec::new() },
                    dflash_decode::Sampling::GREEDY,
                    0,
                ),
                prompt: [1].into(),
                echo: false,
                reports_blocks: false,
                shown: Vec::new(),
                stops: Vec::new(),
                events: events.clone(),
                since: Instant::now(),
            };
            assert!(queue.push((0..count).map(job).collect()));
        };
        push(party(1, 0), 3);
        push(party(2, 0), 2);
        push(party(3, 9), 1);
        let mut holders = Vec::new();
        let mut order = Vec::new();
        while let Some(next) = queue.next(&holders) {
            let job = queue.take(next).unwrap();
            order.push((job.party.request, job.index));
            holders.push(next);
        }
        assert_eq!(order, [(1, 0), (3, 0), (2, 0), (1, 1), (2, 1), (1, 2)]);
        push(party(4, 0), 2);
        assert_eq!(queue.waiting(), 2);
        clients.pop();
        assert_eq!((queue.waiting(), queue.next(&[])), (0, None));
        queue.close();
        assert!(!queue.wait() && queue.is_closed());
    }
}
