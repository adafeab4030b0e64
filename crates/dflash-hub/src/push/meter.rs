//! How far an upload is.

use std::sync::{Arc, Mutex, PoisonError};

use dflash_console::{Progress, Unit};

/// Bytes on their way to the Hub.
#[derive(Debug, Clone)]
pub(crate) struct Meter(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    progress: Option<Progress>,
    /// Bytes sent for good.
    sent: u64,
    /// Bytes that were there.
    skipped: u64,
    /// Bytes of the request that is under way, which a repetition sends anew.
    current: u64,
    /// Counts all that moves, so that a line gone quiet is noticed.
    moves: u64,
}

impl Meter {
    pub(crate) fn start(repository: &str, total: u64) -> Self {
        let title = format!("uploading to {repository}");
        let progress = (total > 0).then(|| Progress::new(title, Unit::Bytes, total));
        Self(Arc::new(Mutex::new(State { progress, sent: 0, skipped: 0, current: 0, moves: 0 })))
    }

    /// A request begins, perhaps once more.
    pub(crate) fn begin(&self) {
        self.change(|state| state.current = 0);
    }

    /// `bytes` of it went out.
    pub(crate) fn add(&self, bytes: u64) {
        self.change(|state| state.current += bytes);
    }

    /// All of it arrived.
    pub(crate) fn end(&self) {
        self.change(|state| state.sent += std::mem::take(&mut state.current));
    }

    /// `bytes` need not go.
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
