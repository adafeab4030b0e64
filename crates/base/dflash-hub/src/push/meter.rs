//! Progress of an upload.

use std::sync::{Arc, Mutex, PoisonError};

use dflash_io::{Progress, Unit};

/// Bytes on their way to the Hub.
#[derive(Debug, Clone)]
pub(crate) struct Meter(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    progress: Option<Progress>,
    /// Bytes that have arrived.
    sent: u64,
    /// Bytes that were already there.
    skipped: u64,
    /// Bytes of the current request, which a retry sends again.
    current: u64,
    /// Counts every transfer, so that a stalled connection is noticed.
    moves: u64,
}

impl Meter {
    pub(crate) fn start(repository: &str, total: u64) -> Self {
        let title = format!("uploading to {repository}");
        let progress = (total > 0).then(|| Progress::new(title, Unit::Bytes, total));
        Self(Arc::new(Mutex::new(State { progress, sent: 0, skipped: 0, current: 0, moves: 0 })))
    }

    /// A request begins, or is retried.
    pub(crate) fn begin(&self) {
        self.change(|state| state.current = 0);
    }

    /// `bytes` of it were sent.
    pub(crate) fn add(&self, bytes: u64) {
        self.change(|state| state.current += bytes);
    }

    /// All of it arrived.
    pub(crate) fn end(&self) {
        self.change(|state| state.sent += std::mem::take(&mut state.current));
    }

    /// `bytes` need not be sent.
    pub(crate) fn skip(&self, bytes: u64) {
        self.change(|state| state.skipped += bytes);
    }

    pub(crate) fn moves(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).moves
    }

    /// Ends the bar; returns the bytes sent.
    pub(crate) fn finish(&self) -> u64 {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.progress = None;
        state.sent
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut state);
        state.moves += 1;
        let done = state.sent + state.skipped + state.current;
        if let Some(progress) = &mut state.progress {
            progress.update(done, "");
        }
    }
}
