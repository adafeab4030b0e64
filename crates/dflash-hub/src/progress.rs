//! How far a download is, on stderr; silent when nothing is left to fetch.

use std::sync::{Mutex, PoisonError};

use dflash_console::{Progress, Unit, say};
use indicatif::DecimalBytes;

/// Follows the files of one download.
#[derive(Debug)]
pub(crate) struct Meter {
    label: String,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    files: usize,
    bytes: u64,
    whole: usize,
    fetched: u64,
    waits: bool,
    progress: Option<Progress>,
}

impl State {
    fn show(&mut self, label: &str) {
        if self.bytes == 0 {
            return;
        }
        let message = format!("{} of {} files", self.whole, self.files);
        let (fetched, bytes) = (self.fetched.min(self.bytes), self.bytes);
        let start = || Progress::new(format!("fetching {label}"), Unit::Bytes, bytes);
        self.progress.get_or_insert_with(start).update(fetched, message);
    }
}

impl Meter {
    pub(crate) fn start(label: String) -> Self {
        Self { label, state: Mutex::default() }
    }

    /// So much will come.
    pub(crate) fn expect(&self, files: usize, bytes: u64) {
        self.change(|state| (state.files, state.bytes) = (files, bytes));
    }

    /// `bytes` of a file came.
    pub(crate) fn add(&self, bytes: u64) {
        self.change(|state| state.fetched += bytes);
    }

    /// A file is there.
    pub(crate) fn whole(&self) {
        self.change(|state| state.whole += 1);
    }

    /// Says once that another process is fetching it.
    pub(crate) fn wait_for_another(&self) {
        self.change(|state| {
            if !std::mem::replace(&mut state.waits, true) {
                say(format!("waiting for another process that fetches {}", self.label));
            }
        });
    }

    pub(crate) fn finish(self) {
        let Self { label, state } = self;
        let mut state = state.into_inner().unwrap_or_else(PoisonError::into_inner);
        state.progress = None;
        if state.bytes > 0 {
            say(format!("fetched {label}: {}", DecimalBytes(state.bytes)));
        }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut state);
        state.show(&self.label);
    }
}
