//! Files and directories that are being written, so that a process that must exit at once can
//! remove its unfinished ones.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

static PENDING: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// A path under construction; forgotten when dropped.
#[derive(Debug)]
pub(crate) struct Pending(PathBuf);

impl Pending {
    /// Records that `path` is about to be created.
    pub(crate) fn note(path: &Path) -> Self {
        list().push(path.to_owned());
        Self(path.to_owned())
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let mut list = list();
        if let Some(index) = list.iter().position(|path| *path == self.0) {
            list.swap_remove(index);
        }
    }
}

/// Removes every unfinished file and directory of this process.
///
/// For a process that ends without unwinding: on a panic, or when a deadline has passed. It must
/// exit soon after the call, because files that its other threads create later are not removed.
pub fn remove_pending() {
    for path in list().drain(..) {
        // A second attempt, because a thread may have added a file between listing and removal.
        if path.is_dir() && fs::remove_dir_all(&path).is_err() {
            let _ = fs::remove_dir_all(&path);
        } else {
            let _ = fs::remove_file(&path);
        }
    }
}

fn list() -> MutexGuard<'static, Vec<PathBuf>> {
    PENDING.lock().unwrap_or_else(PoisonError::into_inner)
}
