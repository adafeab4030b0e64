//! How far the loading of a target is, told to the program, which shows it.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Where a load is.
#[derive(Debug, Clone, Copy)]
pub struct Loading<'a> {
    /// The target's directory.
    pub dir: &'a Path,
    /// Stored bytes of the tensors that are wanted.
    pub total: u64,
    /// Of these the bytes of the tensors that have been dealt with.
    pub done: u64,
    /// Bytes that were read for that: fewer, where this rank has a part of a tensor.
    pub read: u64,
    /// Time since the begin.
    pub elapsed: Duration,
    /// Whether it is over, well or not.
    pub over: bool,
}

static OBSERVER: OnceLock<fn(Loading<'_>)> = OnceLock::new();

/// From now on `observer` hears of all loads of this process, on the threads that load. Only the first
/// that is given here does.
pub fn on_loading(observer: fn(Loading<'_>)) {
    let _ = OBSERVER.set(observer);
}

/// A load under way; over when dropped.
#[derive(Debug)]
pub(crate) struct Progress {
    dir: PathBuf,
    total: u64,
    done: u64,
    read: u64,
    begun: Instant,
    /// The tensors in `done`.
    dealt_with: HashSet<String>,
}

impl Progress {
    pub(crate) fn begin(dir: &Path, total: u64) -> Self {
        let (begun, dealt_with) = (Instant::now(), HashSet::new());
        let progress = Self { dir: dir.into(), total, done: 0, read: 0, begun, dealt_with };
        progress.tell(false);
        progress
    }

    /// So many bytes of tensor `name` were read, which has `bytes` in all: it is dealt with once, also
    /// where it comes in parts.
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
