//! What is being written aside at the moment, so that a process that has to leave at once can take
//! its half-written files with it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

static PENDING: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// A path under construction; forgotten when dropped.
#[derive(Debug)]
pub(crate) struct Pending(PathBuf);

impl Pending {
    /// Notes that `path` is about to be created.
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

/// Removes every half-written file and directory of this process.
///
/// For a process that ends without unwinding: on a panic, or when a deadline has passed. Its other
/// threads must not outlive the call by long, since what they go on writing is not seen.
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
