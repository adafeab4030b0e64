//! Progress of loading a target, reported to the program for display.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Progress of one load.
#[derive(Debug, Clone, Copy)]
pub struct Loading<'a> {
    /// The target's directory.
    pub dir: &'a Path,
    /// Total stored bytes of the wanted tensors.
    pub total: u64,
    /// Bytes of the tensors processed so far.
    pub done: u64,
    /// Bytes actually read; less than `done` if this rank loads part of a tensor.
    pub read: u64,
    /// Time since the start.
    pub elapsed: Duration,
    /// Whether the load has ended, successfully or not.
    pub over: bool,
}

static OBSERVER: OnceLock<fn(Loading<'_>)> = OnceLock::new();

/// Registers `observer` for all loads of this process; it runs on the loading threads. Only the
/// first call has an effect.
pub fn on_loading(observer: fn(Loading<'_>)) {
    let _ = OBSERVER.set(observer);
}

/// A load in progress; it ends when dropped.
#[derive(Debug)]
pub(crate) struct Progress {
    dir: PathBuf,
    total: u64,
    done: u64,
    read: u64,
    begun: Instant,
    /// The tensors counted in `done`.
    dealt_with: HashSet<String>,
}

impl Progress {
    pub(crate) fn begin(dir: &Path, total: u64) -> Self {
        let (begun, dealt_with) = (Instant::now(), HashSet::new());
        let progress = Self { dir: dir.into(), total, done: 0, read: 0, begun, dealt_with };
        progress.tell(false);
        progress
    }

    /// Records `read` of tensor `name`, whose stored size is `bytes`. A tensor read in parts counts
    /// towards `done` once.
    pub(crate) fn add(&mut self, name: &str, bytes: u64, read: u64) {
        if self.dealt_with.insert(name.to_owned()) {
            self.done += bytes;
        }
        self.read += read;
        self.tell(false);
    }

    fn tell(&self, over: bool) {
        let Some(observer) = OBSERVER.get() else { return };
        let Self { dir, total, done, read, begun, dealt_with: _ } = self;
        let (total, done, read) = (*total, *done, *read);
        observer(Loading { dir, total, done, read, elapsed: begun.elapsed(), over });
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.tell(true);
    }
}
