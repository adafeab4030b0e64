//! Files that a stock vLLM writes: read and removed only where the user allows it.
//!
//! A server names files of this machine, and may be faulty or malicious. So only regular files
//! directly inside the directory that the user named are touched, and only files with the requested
//! tokens are removed.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::retry::Failure;
use crate::tensor_file::{TensorFile, open_regular};
use crate::text::clean;

/// Bytes for a file's header.
const HEADER_ROOM: u64 = 64 << 10;

/// The file of one prompt and its lock, not read yet. Dropping removes both if they are the right
/// ones.
#[derive(Debug)]
pub(crate) struct SharedFiles {
    pub(crate) data: PathBuf,
    pub(crate) lock: PathBuf,
    prompt: Vec<i64>,
    /// Maximum number of bytes of its rows.
    most: u64,
}

impl Drop for SharedFiles {
    fn drop(&mut self) {
        // Otherwise shared memory would fill up. A file that does not exist was never written.
        let Ok(file) = self.open() else { return };
        if let Ok(inode) = self.inode_of_prompt(file)
            && fs::symlink_metadata(&self.data).is_ok_and(|now| (now.dev(), now.ino()) == inode)
        {
            let _ = fs::remove_file(&self.data);
            if fs::symlink_metadata(&self.lock).is_ok_and(|lock| lock.is_file() && lock.len() == 0)
            {
                let _ = fs::remove_file(&self.lock);
            }
        }
    }
}

impl SharedFiles {
    /// The file that the server at `url` names `named`, which must be in `dir`.
    pub(crate) fn new(
        named: &Path,
        dir: &Path,
        url: &str,
        prompt: &[i64],
        largest_row: usize,
    ) -> Result<Self, Failure> {
        let real = fs::canonicalize(dir);
        let bad_dir = |source| Failure::Fatal(Error::BadStorage { dir: dir.into(), source });
        let real = real.map_err(bad_dir)?;
        let name = named.file_name().and_then(|name| name.to_str()).filter(|name| is_usual(name));
        let parent = named.parent().and_then(|parent| fs::canonicalize(parent).ok());
        let (Some(name), true) = (name, parent.is_some_and(|parent| parent == real)) else {
            let path = clean(&named.to_string_lossy(), 300);
            let (url, dir) = (url.to_owned(), dir.to_owned());
            return Err(Failure::Doubtful(Error::OutsideStorage { url, path, dir }));
        };
        let most = (prompt.len() * (largest_row + size_of::<i64>())) as u64 + HEADER_ROOM;
        let (data, lock) = (real.join(name), real.join(format!("{name}.lock")));
        Ok(Self { data, lock, prompt: prompt.to_vec(), most })
    }

    /// The file, if it is one that may be read.
    pub(crate) fn open(&self) -> Result<TensorFile<File>, Error> {
        let fault = |source| Error::SharedFile { path: self.data.clone(), source };
        let file = open_regular(&self.data, false).map_err(fault)?;
        let got = file.metadata().map_err(fault)?.len();
        if got > self.most {
            let (tokens, path) = (self.prompt.len(), self.data.clone());
            let expected = format!("at most {} for {tokens} tokens", self.most);
            return Err(Error::FileSize { path, got, expected });
        }
        TensorFile::open(&self.data, file, got)
    }

    /// The file's inode, if it holds the prompt and nothing else.
    fn inode_of_prompt(&self, mut file: TensorFile<File>) -> Result<(u64, u64), Error> {
        let (tokens, ids) = file.token_ids(self.prompt.len())?;
        if tokens != self.prompt.len() || ids != self.prompt || file.rows() != Some(tokens) {
            let reason = "it holds another prompt".into();
            return Err(Error::BadFile { path: self.data.clone(), reason });
        }
        let kind = file.into_inner().metadata();
        kind.map(|kind| (kind.dev(), kind.ino()))
            .map_err(|source| Error::SharedFile { path: self.data.clone(), source })
    }

    /// Whether the data has been written; an error if it is not a regular file.
    pub(crate) fn has_data(&self) -> io::Result<bool> {
        match fs::symlink_metadata(&self.data) {
            Ok(kind) if kind.is_file() => Ok(true),
            Ok(_) => Err(io::Error::other("it is not a regular file")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// `cmpl-0123abcd-0.safetensors` and the like.
fn is_usual(name: &str) -> bool {
    name.len() < 250
        && name.ends_with(".safetensors")
        && !name.starts_with('.')
        && !name.contains(char::is_control)
}
