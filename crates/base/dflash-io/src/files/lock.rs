//! The lock for making a directory: a file next to it that one process holds at a time.
//!
//! It is named after the destination, not the process, so that there is only one point at which a
//! process finds that another was first.

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::pending::Pending;
use crate::Error;

/// How often the file may vanish before it is locked, each time released by another process.
const ATTEMPTS: usize = 1000;

/// A held lock. Dropping it removes its file, and the parents that were made for it if they are
/// empty. The kernel releases the lock of a process that is killed; the next one reuses its file.
#[derive(Debug)]
pub(crate) struct DestinationLock {
    path: PathBuf,
    _file: File,
    /// False on network file systems without locks.
    pub(crate) is_exclusive: bool,
    _pending: Pending,
    _parents: NewParents,
}

impl DestinationLock {
    /// Makes the parents of `destination` and takes its lock.
    ///
    /// # Errors
    /// [`Error::InUse`] while another process has it; I/O.
    pub(crate) fn take(destination: &Path) -> Result<Self, Error> {
        let path = lock_name(destination);
        for _ in 0..ATTEMPTS {
            let parents = NewParents::create(destination)?;
            let file = match File::options().create(true).truncate(false).write(true).open(&path) {
                Ok(file) => file,
                // The process that made the parents has released the lock and removed them.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(Error::io("create", destination)(error)),
            };
            let is_exclusive = match file.try_lock() {
                Ok(()) => true,
                Err(TryLockError::Error(_)) => false,
                Err(TryLockError::WouldBlock) => break,
            };
            if is_at(&file, &path) {
                let pending = Pending::note(&path);
                let (_file, _pending, _parents) = (file, pending, parents);
                return Ok(Self { path, _file, is_exclusive, _pending, _parents });
            }
        }
        Err(Error::InUse { path: destination.into() })
    }
}

impl Drop for DestinationLock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Whether the open `file` still has this name: its last holder may have removed it between our
/// opening and locking it.
fn is_at(file: &File, path: &Path) -> bool {
    let same = |open: &fs::Metadata, named: &fs::Metadata| {
        (open.dev(), open.ino()) == (named.dev(), named.ino())
    };
    matches!((file.metadata(), fs::metadata(path)), (Ok(open), Ok(named)) if same(&open, &named))
}

/// The temporary name of process 0, which makes no files; programs that sweep those of killed
/// processes remove this one too.
fn lock_name(destination: &Path) -> PathBuf {
    let name = destination.file_name().unwrap_or_default().to_string_lossy();
    destination.with_file_name(format!(".{name}.0.tmp"))
}

/// Parents that did not exist before, outermost first. Dropping this removes those that are empty.
#[derive(Debug)]
struct NewParents(Vec<PathBuf>);

impl NewParents {
    fn create(path: &Path) -> Result<Self, Error> {
        let above = path.ancestors().skip(1).filter(|parent| !parent.as_os_str().is_empty());
        let mut missing: Vec<PathBuf> =
            above.take_while(|parent| !parent.exists()).map(Path::to_path_buf).collect();
        missing.reverse();
        let made = Self(missing);
        if let Some(parent) = made.0.last() {
            fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
        }
        Ok(made)
    }
}

impl Drop for NewParents {
    fn drop(&mut self) {
        for parent in self.0.iter().rev() {
            // This intentionally fails if the parent is not empty.
            let _ = fs::remove_dir(parent);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use super::*;

    #[test]
    fn a_lock_that_is_let_go_and_taken_all_the_time_has_one_holder() {
        let dir = tempfile::tempdir().unwrap();
        let (holders, taken) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let take = || match DestinationLock::take(&dir.path().join("ds")) {
            Ok(lock) => {
                assert_eq!(holders.fetch_add(1, SeqCst), 0);
                taken.fetch_add(1, SeqCst);
                std::thread::yield_now();
                holders.fetch_sub(1, SeqCst);
                drop(lock);
            }
            Err(error) => assert!(matches!(error, Error::InUse { .. }), "{error}"),
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..3000).for_each(|_| take()));
            }
        });
        assert!(taken.into_inner() > 0);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
