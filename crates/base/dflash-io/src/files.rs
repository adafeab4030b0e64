//! Atomic files and directories.
//!
//! Everything that another process (or a later run) will read is written under a temporary name in
//! the same directory, fsynced, and renamed. A crash or a full disk leaves the old content or none,
//! never a mixture.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

mod leftovers;
mod lock;
mod pending;

use lock::DestinationLock;
use pending::Pending;
pub use pending::remove_pending;

/// An error with an operation and a path.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file system refused an operation on `path`.
    #[error("cannot {action} {path}: {source}{}", remedy(.source))]
    Io {
        /// The operation, as a verb.
        action: &'static str,
        /// The path as the user named it.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// Another process is making the same directory.
    #[error("{path} is being written by another process; wait until it has ended, or name another")]
    InUse {
        /// The destination.
        path: PathBuf,
    },
    /// The destination of a new directory is not empty.
    #[error("{path} exists and is not empty; name another directory or remove it")]
    Occupied {
        /// The destination.
        path: PathBuf,
    },
}

impl Error {
    /// Adds `action` and `path` to an I/O error; for `map_err`.
    pub fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }

    /// Whether the cause is a full disk or an exhausted quota.
    pub fn is_disk_full(&self) -> bool {
        matches!(self, Self::Io { source, .. } if disk_full(source))
    }
}

fn disk_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// The remedy in the message, for known kinds of errors.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        _ if disk_full(error) => "; free some space or choose a path on another disk",
        io::ErrorKind::PermissionDenied => "; check the permissions of the path",
        _ => "",
    }
}

/// A file under construction: removed when dropped, renamed into place by [`Self::commit`].
#[derive(Debug)]
pub struct PendingFile {
    aside: PathBuf,
    destination: PathBuf,
    file: File,
    committed: bool,
    _pending: Pending,
}

impl PendingFile {
    /// Starts a file that will become `destination` and replace any file there.
    ///
    /// # Errors
    /// I/O.
    pub fn create(destination: &Path) -> Result<Self, Error> {
        let aside = aside_name(destination);
        let pending = Pending::note(&aside);
        let file = File::create(&aside).map_err(Error::io("write", destination))?;
        let destination = destination.into();
        Ok(Self { aside, destination, file, committed: false, _pending: pending })
    }

    /// Writes the next bytes.
    ///
    /// # Errors
    /// I/O.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file.write_all(bytes).map_err(Error::io("write", &self.destination))
    }

    /// Fsyncs the file, then renames it into place.
    ///
    /// # Errors
    /// I/O; the file is then removed.
    pub fn commit(mut self) -> Result<(), Error> {
        let moved = self.file.sync_all().and_then(|()| fs::rename(&self.aside, &self.destination));
        moved.map_err(Error::io("write", &self.destination))?;
        self.committed = true;
        sync_parent(&self.destination)
    }
}

impl Drop for PendingFile {
    fn drop(&mut self) {
        if !self.committed {
            let _ = fs::remove_file(&self.aside);
        }
    }
}

/// Writes `path` through `fill`, so that it appears complete or not at all.
///
/// # Errors
/// Any I/O error of `fill`, or of the write, fsync or rename; the temporary file is removed.
pub fn write_atomic(
    path: &Path,
    fill: impl FnOnce(&mut BufWriter<&File>) -> io::Result<()>,
) -> Result<(), Error> {
    let pending = PendingFile::create(path)?;
    let mut out = BufWriter::new(&pending.file);
    fill(&mut out).and_then(|()| out.flush()).map_err(Error::io("write", path))?;
    drop(out);
    pending.commit()
}

/// Writes `bytes` to `path` atomically. See [`write_atomic`].
///
/// # Errors
/// As [`write_atomic`].
pub fn write_bytes(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    write_atomic(path, |out| out.write_all(bytes))
}

/// A directory under construction: removed when dropped, renamed into place by [`Self::commit`].
///
/// Only one process makes a directory at a time: it holds the lock of the destination's name from
/// before it checks the destination until the directory is in place or dropped. Leftovers of killed
/// processes are removed when the next one starts.
#[derive(Debug)]
pub struct PendingDir {
    aside: PathBuf,
    destination: PathBuf,
    replaces: bool,
    committed: bool,
    _pending: Pending,
    _lock: DestinationLock,
}

impl PendingDir {
    /// Starts a directory that will become `destination`, which must be absent or empty.
    ///
    /// # Errors
    /// [`Error::Occupied`] if `destination` is not empty, [`Error::InUse`] while another process
    /// makes it; otherwise I/O.
    pub fn create(destination: &Path) -> Result<Self, Error> {
        Self::start(destination, false)
    }

    /// Starts a directory whose commit will replace `destination` with all its contents. Until then
    /// it stays unchanged. The caller decides whether it may be deleted.
    ///
    /// # Errors
    /// [`Error::InUse`], I/O.
    pub fn create_replacing(destination: &Path) -> Result<Self, Error> {
        Self::start(destination, true)
    }

    fn start(destination: &Path, replaces: bool) -> Result<Self, Error> {
        let lock = DestinationLock::take(destination)?;
        leftovers::restore(destination)?;
        if !replaces && !is_absent_or_empty(destination)? {
            return Err(Error::Occupied { path: destination.into() });
        }
        if lock.is_exclusive {
            leftovers::sweep(destination)?;
        }
        let aside = aside_name(destination);
        if aside.exists() {
            // Left by a process that had our id and was killed.
            fs::remove_dir_all(&aside).map_err(Error::io("remove", &aside))?;
        }
        let pending = Pending::note(&aside);
        fs::create_dir(&aside).map_err(Error::io("create", &aside))?;
        Ok(Self {
            aside,
            destination: destination.into(),
            replaces,
            committed: false,
            _pending: pending,
            _lock: lock,
        })
    }

    /// Where to write until the commit.
    pub fn path(&self) -> &Path {
        &self.aside
    }

    /// The final name of the directory, which the user knows.
    pub fn destination(&self) -> &Path {
        &self.destination
    }

    /// Fsyncs every file, then renames the directory into place. The directory that it replaces
    /// keeps its name until that moment, and then has a temporary one until it is removed.
    ///
    /// # Errors
    /// I/O; the directory is then removed.
    pub fn commit(mut self) -> Result<(), Error> {
        sync_tree(&self.aside)?;
        let there = self.destination.is_dir();
        let old = match there && self.replaces {
            true => Some(self.exchange()?),
            false => {
                if there {
                    let removed = fs::remove_dir(&self.destination);
                    removed.map_err(Error::io("replace", &self.destination))?;
                }
                fs::rename(&self.aside, &self.destination)
                    .map_err(Error::io("rename into place", &self.destination))?;
                None
            }
        };
        self.committed = true;
        sync_parent(&self.destination)?;
        match old {
            Some(old) => fs::remove_dir_all(&old).map_err(Error::io("remove", &old)),
            None => Ok(()),
        }
    }

    /// Swaps the directory with another one; returns where that one is now.
    fn exchange(&self) -> Result<PathBuf, Error> {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        let (aside, destination) = (&self.aside, &self.destination);
        match renameat_with(CWD, aside, CWD, destination, RenameFlags::EXCHANGE) {
            Ok(()) => return Ok(aside.clone()),
            // A file system without this operation, such as NFS: for a moment nothing has the name,
            // and the next process that makes the directory restores what it finds.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {}
            Err(error) => return Err(Error::io("replace", destination)(error.into())),
        }
        let old = leftovers::old_name(aside);
        fs::rename(destination, &old).map_err(Error::io("replace", destination))?;
        fs::rename(aside, destination).map_err(Error::io("rename into place", destination))?;
        Ok(old)
    }
}

impl Drop for PendingDir {
    fn drop(&mut self) {
        if !self.committed {
            let _ = fs::remove_dir_all(&self.aside);
        }
    }
}

/// Removes a directory and all its contents. It is renamed first, so that the name never stands for
/// a partly removed directory, even if the removal is interrupted.
///
/// # Errors
/// I/O; the rest then has a temporary name.
pub fn remove_dir(path: &Path) -> Result<(), Error> {
    let aside = aside_name(path);
    let _pending = Pending::note(&aside);
    fs::rename(path, &aside).map_err(Error::io("remove", path))?;
    fs::remove_dir_all(&aside).map_err(Error::io("remove", &aside))
}

/// Makes `path` a symbolic link to `target`, replacing any link there: at any moment it leads to
/// the old or to the new target.
///
/// # Errors
/// I/O, for example on a file system without links.
pub fn replace_link(path: &Path, target: &Path) -> Result<(), Error> {
    let aside = aside_name(path);
    if aside.is_symlink() {
        // Left by a process that had our id and was killed.
        fs::remove_file(&aside).map_err(Error::io("remove", &aside))?;
    }
    std::os::unix::fs::symlink(target, &aside).map_err(Error::io("create the link", path))?;
    if let Err(source) = fs::rename(&aside, path) {
        let _ = fs::remove_file(&aside);
        return Err(Error::Io { action: "replace the link", path: path.into(), source });
    }
    sync_parent(path)
}

/// Whether `path` can take a new directory.
///
/// # Errors
/// I/O, also when `path` is a file.
pub fn is_absent_or_empty(path: &Path) -> Result<bool, Error> {
    match fs::read_dir(path) {
        Ok(mut entries) => Ok(entries.next().is_none()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(source) => Err(Error::Io { action: "read", path: path.into(), source }),
    }
}

/// The temporary name of `path`: hidden, in the same directory, unique to this process.
fn aside_name(path: &Path) -> PathBuf {
    static NAMES: AtomicU64 = AtomicU64::new(0);
    // Two threads may write the same file.
    let number = NAMES.fetch_add(1, Ordering::Relaxed);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}-{number}.tmp", std::process::id()))
}

fn sync_tree(dir: &Path) -> Result<(), Error> {
    for entry in fs::read_dir(dir).map_err(Error::io("read", dir))? {
        let path = entry.map_err(Error::io("read", dir))?.path();
        if path.is_dir() {
            sync_tree(&path)?;
        } else {
            File::open(&path)
                .and_then(|file| file.sync_all())
                .map_err(Error::io("fsync", &path))?;
        }
    }
    File::open(dir).and_then(|file| file.sync_all()).map_err(Error::io("fsync", dir))
}

/// Makes a rename durable.
fn sync_parent(path: &Path) -> Result<(), Error> {
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    File::open(parent).and_then(|file| file.sync_all()).map_err(Error::io("fsync", parent))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn threads_that_write_one_file_do_not_meet() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        std::thread::scope(|scope| {
            for byte in 0..4 {
                let path = &path;
                scope.spawn(move || {
                    (0..50).for_each(|_| write_bytes(path, &[byte; 1000]).unwrap());
                });
            }
        });
        let whole = fs::read(&path).unwrap();
        assert!(whole.len() == 1000 && whole.iter().all(|byte| *byte == whole[0]));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_failed_write_leaves_the_old_content() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        write_bytes(&path, b"old").unwrap();
        let failed = write_atomic(&path, |out| {
            out.write_all(b"new")?;
            Err(io::Error::from(io::ErrorKind::StorageFull))
        });
        assert!(failed.as_ref().unwrap_err().is_disk_full());
        assert!(failed.unwrap_err().to_string().contains("free some space"));
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(dir.path()), ["state"]);
    }

    #[test]
    fn a_removed_directory_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("step");
        fs::create_dir_all(path.join("deep")).unwrap();
        fs::write(path.join("deep/file"), b"1").unwrap();
        remove_dir(&path).unwrap();
        assert!(names(dir.path()).is_empty());
        assert!(remove_dir(&path).unwrap_err().to_string().starts_with("cannot remove "));
    }

    #[test]
    fn a_directory_appears_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let destination = dir.path().join("step");
        drop(PendingDir::create(&destination).unwrap());
        drop(PendingDir::create(&dir.path().join("new/deep/step")).unwrap());
        assert!(names(dir.path()).is_empty());
        let pending = PendingDir::create(&destination).unwrap();
        fs::write(pending.path().join("a"), b"1").unwrap();
        pending.commit().unwrap();
        assert_eq!(names(&destination), ["a"]);
        assert!(matches!(PendingDir::create(&destination), Err(Error::Occupied { .. })));
        let pending = PendingDir::create_replacing(&destination).unwrap();
        fs::write(pending.path().join("b"), b"2").unwrap();
        assert_eq!(names(&destination), ["a"]);
        pending.commit().unwrap();
        assert_eq!(names(&destination), ["b"]);
        assert_eq!(names(dir.path()), ["step"]);
    }

    #[test]
    fn one_process_makes_a_directory_at_a_time_and_the_next_sweeps() {
        let dir = tempfile::tempdir().unwrap();
        // A name with a dot, with neighbours of other names.
        let destination = dir.path().join("ds.v1");
        let first = PendingDir::create(&destination).unwrap();
        for second in [PendingDir::create(&destination), PendingDir::create_replacing(&destination)]
        {
            let refused = second.unwrap_err().to_string();
            assert!(refused.contains("ds.v1 is being written by another process"), "{refused}");
        }
        PendingDir::create(&dir.path().join("ds.v2")).unwrap();
        fs::write(first.path().join("a"), b"1").unwrap();
        first.commit().unwrap();
        // No process has such a number.
        let dead = u32::MAX;
        let left = [format!(".ds.v1.{dead}-0.tmp"), format!(".ds.v1.{dead}-17.tmp")];
        let others =
            [format!(".ds.{dead}-0.tmp"), ".ds.v1.tmp".to_owned(), format!("ds.v1.{dead}-0.tmp")];
        for name in left.iter().chain(&others) {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("shard"), b"1").unwrap();
        }
        let replacing = PendingDir::create_replacing(&destination).unwrap();
        fs::write(replacing.path().join("b"), b"2").unwrap();
        replacing.commit().unwrap();
        assert_eq!(names(&destination), ["b"]);
        let mut expected: Vec<String> = others.to_vec();
        expected.push("ds.v1".to_owned());
        expected.sort();
        assert_eq!(names(dir.path()), expected);
    }

    #[test]
    fn of_several_that_start_at_once_one_makes_the_directory() {
        const AT_ONCE: usize = 4;
        let dir = tempfile::tempdir().unwrap();
        let together = std::sync::Barrier::new(AT_ONCE);
        let start = |destination: &Path| {
            together.wait();
            let started = PendingDir::create(destination);
            together.wait();
            match &started {
                Ok(pending) => assert!(pending.path().is_dir(), "swept by one that came later"),
                Err(error) => assert!(matches!(error, Error::InUse { .. }), "{error}"),
            }
            usize::from(started.is_ok())
        };
        let rounds = |destination: &Path| {
            for round in 0..300 {
                let started: usize = std::thread::scope(|scope| {
                    let starts = [(); AT_ONCE].map(|()| scope.spawn(|| start(destination)));
                    starts.map(|start| start.join().unwrap()).iter().sum()
                });
                assert_eq!(started, 1, "round {round}");
            }
        };
        rounds(&dir.path().join("ds"));
        assert!(names(dir.path()).is_empty(), "{:?}", names(dir.path()));
        // Each round makes and removes the parents too.
        rounds(&dir.path().join("new/deep/ds"));
    }

    #[test]
    fn a_lock_whose_process_was_killed_is_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let destination = dir.path().join("ds.v1");
        fs::write(dir.path().join(".ds.v1.0.tmp"), "").unwrap();
        PendingDir::create(&destination).unwrap().commit().unwrap();
        assert_eq!(names(dir.path()), ["ds.v1"]);
    }

    #[test]
    fn what_a_process_that_was_killed_took_out_of_its_name_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let destination = dir.path().join("ds.v1");
        let old = dir.path().join(format!(".ds.v1.{}-0.tmp.old", u32::MAX));
        fs::create_dir(&old).unwrap();
        fs::write(old.join("a"), b"1").unwrap();
        assert!(matches!(PendingDir::create(&destination), Err(Error::Occupied { .. })));
        assert_eq!(names(&destination), ["a"]);
        fs::create_dir(&old).unwrap();
        let pending = PendingDir::create_replacing(&destination).unwrap();
        drop(pending);
        assert_eq!(
            (names(&destination), names(dir.path())),
            (vec!["a".into()], vec!["ds.v1".into()])
        );
    }
}
