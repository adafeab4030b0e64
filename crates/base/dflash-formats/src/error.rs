//! Errors in model files.
#![allow(missing_docs, reason = "the messages say it")]

use std::path::{Path, PathBuf};

/// Result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Errors name the file and the key or tensor, the value found and the value expected.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    /// A model directory lacks a file that every model has.
    #[error("{dir} has no {file}; pass the directory of a model, or of one checkpoint (step-...)")]
    MissingFile { dir: PathBuf, file: String },
    /// A JSON file does not parse; the source has the line.
    #[error("{path}: {source}")]
    Json { path: PathBuf, source: serde_json::Error },
    /// An unsupported value in a configuration or in a file's metadata.
    #[error("{path}: `{key}` is {found}, but {expected}")]
    Config { path: PathBuf, key: String, found: String, expected: String },
    /// A tensor file that violates its format.
    #[error("{path} is not a readable {format} file: {reason}; fetch or write it again")]
    Damaged { path: PathBuf, format: &'static str, reason: String },
    #[error("{path} has no tensor {name}")]
    MissingTensor { path: PathBuf, name: String },
    #[error(
        "{path}: tensor {name} has ggml's type {found}; F32 (0), F16 (1), Q8_0 (8), I64 (27) and BF16 (30) can be read"
    )]
    TensorType { path: PathBuf, name: String, found: u32 },
    /// A file could not be written.
    #[error(transparent)]
    Write(#[from] dflash_io::Error),
}

impl Error {
    /// Creates the error for a `key` of the configuration in `path`.
    pub fn config(path: &Path, key: &str, found: impl ToString, expected: &str) -> Self {
        let (found, expected) = (found.to_string(), expected.into());
        Self::Config { path: path.into(), key: key.into(), found, expected }
    }

    pub(crate) fn read(path: &Path) -> impl Fn(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Read { path: path.clone(), source }
    }
}
