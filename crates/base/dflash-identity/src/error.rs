//! Errors of reading an identity.

use std::io;
use std::path::PathBuf;

/// An error names the file.
#[expect(missing_docs, reason = "the messages say what the fields are")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of the model.
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    /// A file that is not JSON.
    #[error("{path} is not valid JSON")]
    Json { path: PathBuf, source: serde_json::Error },
    /// Weights that violate the safetensors format.
    #[error(transparent)]
    Format(#[from] dflash_formats::Error),
    /// An identity entry that was altered.
    #[error("{path}: {key} is not a target's identity; remove the key, or fetch the file again")]
    Entry { path: PathBuf, key: &'static str, source: serde_json::Error },
    /// A file could not be written.
    #[error(transparent)]
    Files(#[from] dflash_io::Error),
}
