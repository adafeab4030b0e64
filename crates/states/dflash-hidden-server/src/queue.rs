//! Prompts waiting for the model, first come first served.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use dflash_hidden_states::HiddenStates;
use tokio::sync::oneshot;

use crate::error::Error;

/// One validated prompt.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) input_ids: Vec<i64>,
    /// Ascending, all of them available.
    pub(crate) layer_ids: Vec<u32>,
    /// Closed when the client has left.
    pub(crate) reply: oneshot::Sender<Result<HiddenStates, Error>>,
}

/// The jobs of one forward pass, and how many jobs were dropped on the way.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) jobs: Vec<Job>,
    pub(crate) cancelled: u64,
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
    /// Appends a job; returns it if the queue is closed.
    pub(crate) fn push(&self, job: Job) -> Result<(), Job> {
        let mut state = self.state();
        if state.closed {
            return Err(job);
        }
        // Clients that left hold no slot, so without this their jobs could pile up.
        if state.jobs.len() == state.jobs.capacity() {
            state.jobs.retain(|job| !job.reply.is_closed());
        }
        state.jobs.push_back(job);
        self.changed.notify_one();
        Ok(())
    }

    /// Waits for work: jobs in order until the next one would exceed `max_tokens`, at least one.
    /// Jobs whose client has left are dropped. `None` once the queue is closed.
    pub(crate) fn next_batch(&self, max_tokens: usize) -> Option<Batch> {
        let mut state = self.state();
        while state.jobs.is_empty() && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        (!state.closed).then(|| state.batch(max_tokens))
    }

    /// As [`Self::next_batch`], from the jobs that wait already; `None` if there are none.
    pub(crate) fn waiting_batch(&self, max_tokens: usize) -> Option<Batch> {
        let mut state = self.state();
        (!state.jobs.is_empty()).then(|| state.batch(max_tokens))
    }

    /// Drops all waiting jobs, which notifies their clients, and ends [`Self::next_batch`].
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.jobs.clear();
        self.changed.notify_all();
    }

    /// Jobs not yet started.
    pub(crate) fn waiting(&self) -> usize {
        self.state().jobs.len()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn batch(&mut self, max_tokens: usize) -> Batch {
        let mut batch = Batch { jobs: Vec::new(), cancelled: 0 };
        let mut tokens = 0;
        while let Some(job) = self.jobs.pop_front() {
            if job.reply.is_closed() {
                batch.cancelled += 1;
                continue;
            }
            tokens += job.input_ids.len();
            if tokens > max_tokens && !batch.jobs.is_empty() {
                self.jobs.push_front(job);
                break;
            }
            batch.jobs.push(job);
        }
        batch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Reply = oneshot::Receiver<Result<HiddenStates, Error>>;

    fn push(queue: &Queue, tokens: usize) -> Reply {
        let (reply, receiver) = oneshot::channel();
        queue.push(Job { input_ids: vec![0; tokens], layer_ids: vec![1], reply }).unwrap();
        receiver
    }

    fn lengths(batch: &Batch) -> Vec<usize> {
        batch.jobs.iter().map(|job| job.input_ids.len()).collect()
    }

    #[test]
    fn batches_take_what_fits_in_order() {
        let queue = Queue::default();
        let _replies: Vec<Reply> = [30, 50, 40, 500, 10].map(|tokens| push(&queue, tokens)).into();
        let batches: Vec<_> = (0..4).map(|_| lengths(&queue.next_batch(100).unwrap())).collect();
        assert_eq!(batches, [vec![30, 50], vec![40], vec![500], vec![10]]);
        assert_eq!(queue.waiting(), 0);
    }

    #[test]
    fn jobs_of_clients_that_left_are_dropped() {
        let queue = Queue::default();
        let kept = push(&queue, 3);
        drop(push(&queue, 4));
        let batch = queue.next_batch(100).unwrap();
        assert_eq!((lengths(&batch), batch.cancelled), (vec![3], 1));
        drop(kept);
        for _ in 0..10_000 {
            drop(push(&queue, 1));
        }
        assert!(queue.waiting() < 100, "{} are left", queue.waiting());
    }

    #[test]
    fn closing_wakes_the_model_and_tells_the_clients() {
        let queue = std::sync::Arc::new(Queue::default());
        let waiting = std::sync::Arc::clone(&queue);
        let model = std::thread::spawn(move || {
            let first = waiting.next_batch(1).map(|batch| lengths(&batch));
            (first, waiting.next_batch(1).is_none())
        });
        let _first = push(&queue, 1);
        while queue.waiting() > 0 {
            std::thread::yield_now();
        }
        queue.close();
        assert_eq!(model.join().unwrap(), (Some(vec![1]), true));
        let (reply, mut receiver) = oneshot::channel();
        let late = Job { input_ids: vec![1], layer_ids: vec![1], reply };
        assert!(queue.push(late).is_err());
        assert!(receiver.try_recv().is_err());
    }
}
