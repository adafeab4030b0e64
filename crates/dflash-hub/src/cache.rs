//! The cache that all clients of the Hub share, one repository's part of it:
//!
//! ```text
//! models--OWNER--NAME/blobs/ETAG                the contents, each once
//! models--OWNER--NAME/snapshots/COMMIT/FILE     links to them
//! models--OWNER--NAME/refs/REVISION             the commit that a branch or tag stood for
//! .locks/models--OWNER--NAME/ETAG.lock          held while a content is fetched
//! ```

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::error::Reason;

/// A repository's part of the cache.
#[derive(Debug)]
pub(crate) struct Cache {
    repository: PathBuf,
    locks: PathBuf,
}

impl Cache {
    /// The part of `KIND/OWNER/NAME`, with the kind in the plural.
    pub(crate) fn of(root: &Path, repository: &str) -> Self {
        let folder = repository.replace('/', "--");
        Self { repository: root.join(&folder), locks: root.join(".locks").join(folder) }
    }

    /// The directory of a commit's files.
    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.repository.join("snapshots").join(commit)
    }

    /// The commit that `revision` stood for when it was last asked for.
    pub(crate) fn commit_of(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_owned());
        }
        let commit = fs::read_to_string(self.reference(revision)).ok()?.trim().to_owned();
        is_commit(&commit).then_some(commit)
    }

    /// Keeps what `revision` stands for.
    pub(crate) fn note(&self, revision: &str, commit: &str) -> Result<(), Reason> {
        let path = self.reference(revision);
        let written = with_folder(&path).and_then(|()| fs::write(&path, commit));
        written.map_err(|error| fault(&path, &error))
    }

    fn reference(&self, revision: &str) -> PathBuf {
        self.repository.join("refs").join(revision)
    }

    /// Where the content `etag` is, or will be.
    pub(crate) fn blob(&self, etag: &str) -> PathBuf {
        self.repository.join("blobs").join(etag)
    }

    /// An empty file to fetch the content `etag` into, and its path.
    pub(crate) fn begin(&self, etag: &str) -> Result<(File, PathBuf), Reason> {
        let path = self.repository.join("blobs").join(format!("{etag}.incomplete"));
        let file = with_folder(&path).and_then(|()| File::create(&path));
        file.map(|file| (file, path.clone())).map_err(|error| fault(&path, &error))
    }

    /// The right to fetch the content `etag`, until it is dropped; `None` while another has it.
    pub(crate) fn try_lock(&self, etag: &str) -> Result<Option<File>, Reason> {
        let path = self.locks.join(format!("{etag}.lock"));
        let file = with_folder(&path).and_then(|()| File::create(&path));
        let file = file.map_err(|error| fault(&path, &error))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(fault(&path, &error)),
        }
    }

    /// Makes the content `etag` the commit's `file`.
    pub(crate) fn link(&self, commit: &str, file: &str, etag: &str) -> Result<(), Reason> {
        let path = self.snapshot(commit).join(file);
        // From the file's folder up to the repository's.
        let up = "../".repeat(2 + file.matches('/').count());
        let linked = with_folder(&path).and_then(|()| {
            // A link to a content that is gone is in the way.
            let _ = fs::remove_file(&path);
            symlink(format!("{up}blobs/{etag}"), &path)
        });
        match linked {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(fault(&path, &error)),
            _ => Ok(()),
        }
    }
}

/// Whether a revision is a commit's full hash.
pub(crate) fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn with_folder(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)
}

/// A cache that cannot be written.
pub(crate) fn fault(path: &Path, error: &io::Error) -> Reason {
    Reason::Client(format!("cannot write {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_in_folders_links_to_its_content() {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache::of(root.path(), "datasets/some/data");
        let commit = "1".repeat(40);
        let (_, path) = cache.begin("abc").unwrap();
        fs::write(&path, "words").unwrap();
        fs::rename(&path, cache.blob("abc")).unwrap();
        for file in ["README.md", "default/train/0000.parquet"] {
            cache.link(&commit, file, "gone").unwrap();
            cache.link(&commit, file, "abc").unwrap();
            let read = fs::read_to_string(cache.snapshot(&commit).join(file));
            assert_eq!(read.unwrap(), "words", "{file}");
        }
        cache.note("refs/pr/1", &commit).unwrap();
        assert_eq!(cache.commit_of("refs/pr/1"), Some(commit.clone()));
        assert_eq!(cache.commit_of(&commit), Some(commit));
        assert_eq!(cache.commit_of("main"), None);
        assert!(root.path().join("datasets--some--data/refs/refs/pr/1").is_file());
    }

    #[test]
    fn a_content_is_fetched_by_one_at_a_time() {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache::of(root.path(), "models/some/target");
        let held = cache.try_lock("abc").unwrap();
        assert!(held.is_some() && cache.try_lock("abc").unwrap().is_none());
        assert!(cache.try_lock("other").unwrap().is_some());
        drop(held);
        assert!(cache.try_lock("abc").unwrap().is_some());
    }
}
