//! Digests of content.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use sha2::{Digest as _, Sha256};

use crate::Error;

/// Hexadecimal digits of a digest. 48 bits are enough to tell models apart; this guards against
/// mistakes, not against attacks.
const DIGITS: usize = 12;

#[derive(Default)]
pub(crate) struct Digest(Sha256);

impl Digest {
    /// Adds `bytes` with their length, so that parts cannot run into each other.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    pub(crate) fn hex(self) -> String {
        hex(self.0)[..DIGITS].to_owned()
    }
}

/// A finished SHA-256 in hexadecimal digits.
pub fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// SHA-256 of a whole file in hexadecimal digits. The file is read piece by piece.
///
/// # Errors
/// The file cannot be read.
pub fn file_digest(path: &Path) -> Result<String, Error> {
    let fault = |source| Error::Read { path: path.into(), source };
    let mut file = File::open(path).map_err(fault)?;
    let (mut hash, mut piece) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut piece).map_err(fault)? {
            0 => return Ok(hex(hash)),
            read => hash.update(&piece[..read]),
        }
    }
}
