//! A file to upload: its path in the repository, its contents here, and its digests.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use sha1::{Digest as _, Sha1};
use sha2::{Digest as _, Sha256};

use crate::error::Error;
use crate::push::refusal::Refusal;

/// Bytes of a file that the Hub needs to decide whether it is large.
const SAMPLE: usize = 512;
/// A new repository's `.gitattributes` puts these files into the large-file storage, whatever their
/// size.
const LARGE_ENDINGS: [&str; 2] = [".safetensors", ".gguf"];
/// And any file from this size on.
const LARGE: u64 = 10_000_000;

/// A file to upload.
#[derive(Debug, Clone)]
pub struct Outgoing {
    /// Its path in the repository.
    pub path: String,
    /// Its size, bytes.
    pub bytes: u64,
    /// Its digest, 64 hexadecimal digits.
    pub sha256: String,
    /// Its first bytes.
    pub(crate) sample: Vec<u8>,
    pub(crate) content: Content,
}

/// Where the contents are.
#[derive(Debug, Clone)]
pub(crate) enum Content {
    File(PathBuf),
    Memory(Vec<u8>),
}

impl Outgoing {
    /// The file `from`, which is read completely for its digest.
    ///
    /// # Errors
    /// [`Error::File`]; [`Error::Interrupted`] once `stop` is set.
    pub fn file(path: &str, from: &Path, stop: &AtomicBool) -> Result<Self, Error> {
        let fault = |source| Error::File { path: from.into(), source };
        let mut file = File::open(from).map_err(fault)?;
        let (mut digest, mut piece) = (Sha256::new(), vec![0; 1 << 20]);
        let (mut bytes, mut sample) = (0, Vec::new());
        loop {
            if stop.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            let read = file.read(&mut piece).map_err(fault)?;
            if read == 0 {
                break;
            }
            sample.extend(&piece[..read.min(SAMPLE - sample.len())]);
            digest.update(&piece[..read]);
            bytes += read as u64;
        }
        let (path, sha256) = (path.to_owned(), hex(&digest.finalize()));
        Ok(Self { path, bytes, sha256, sample, content: Content::File(from.into()) })
    }

    /// `text` as a file.
    pub fn text(path: &str, text: &str) -> Self {
        let content = text.as_bytes();
        Self {
            path: path.to_owned(),
            bytes: content.len() as u64,
            sha256: hex(&Sha256::digest(content)),
            sample: content[..content.len().min(SAMPLE)].to_vec(),
            content: Content::Memory(content.to_vec()),
        }
    }

    /// Whether a repository with the Hub's usual settings keeps it in the large-file storage; the
    /// Hub decides.
    pub fn is_large(&self) -> bool {
        self.bytes >= LARGE || LARGE_ENDINGS.iter().any(|ending| self.path.ends_with(ending))
    }

    /// All of it: only for files inside a commit.
    pub(crate) fn read(&self) -> Result<Vec<u8>, Refusal> {
        let (path, content) = match &self.content {
            Content::Memory(content) => return Ok(content.clone()),
            Content::File(path) => (path, std::fs::read(path)),
        };
        let content = content.map_err(|source| Refusal::File { path: path.clone(), source })?;
        let is_same = hex(&Sha256::digest(&content)) == self.sha256;
        if is_same { Ok(content) } else { Err(Refusal::Changed(path.clone())) }
    }

    pub(crate) fn git_id(content: &[u8]) -> String {
        let digest = Sha1::new().chain_update(format!("blob {}\0", content.len()));
        hex(&digest.chain_update(content).finalize())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_sha256sum_and_git() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "hello\n").unwrap();
        let go = AtomicBool::new(false);
        let file = Outgoing::file("config.json", &path, &go).unwrap();
        let text = Outgoing::text("config.json", "hello\n");
        let expected = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        assert_eq!((file.sha256.as_str(), text.sha256.as_str()), (expected, expected));
        assert_eq!((file.bytes, file.sample.as_slice()), (6, &b"hello\n"[..]));
        assert_eq!(Outgoing::git_id(b"hello\n"), "ce013625030ba8dba906f756967f9e9ca394464a");
        std::fs::write(&path, "other\n").unwrap();
        assert!(matches!(file.read(), Err(Refusal::Changed(_))));
        let stopped = Outgoing::file("config.json", &path, &AtomicBool::new(true));
        assert!(matches!(stopped, Err(Error::Interrupted)));
    }

    #[test]
    fn weights_are_large_whatever_their_size() {
        let check = |path: &str, bytes: u64, expect: bool| {
            let file = Outgoing { bytes, ..Outgoing::text(path, "") };
            assert_eq!(file.is_large(), expect, "{path} of {bytes}");
        };
        check("model.safetensors", 1, true);
        check("draft-q8_0.gguf", 1, true);
        check("config.json", 9_999_999, false);
        check("config.json", 10_000_000, true);
    }
}
