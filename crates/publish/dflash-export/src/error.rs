//! Errors of an export.
#![allow(missing_docs, reason = "the messages say it")]

use std::path::PathBuf;

/// Result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Errors name the file and the key or tensor, the value found and the value expected.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Model(#[from] dflash_tensor::Error),
    #[error(transparent)]
    Text(#[from] dflash_chat::Error),
    #[error(transparent)]
    Identity(#[from] dflash_identity::Error),
    #[error(transparent)]
    Format(#[from] dflash_formats::Error),
    #[error(transparent)]
    Write(#[from] dflash_io::Error),
    #[error("{path} already exists; remove it or name another --output")]
    Exists { path: PathBuf },
    #[error("{path}: tensor {name} has shape {found:?}, expected {expected:?}")]
    Shape { path: PathBuf, name: String, found: Vec<i64>, expected: Vec<i64> },
    /// The draft cannot belong to the target.
    #[error("{draft} does not fit the target: `{key}` is {found}, the target's is {expected}")]
    Foreign { draft: PathBuf, key: &'static str, found: String, expected: String },
    #[error(
        "{draft} was made for {made_for}, and this is {target}; name its own target, or pass --allow-other-target"
    )]
    OtherTarget { draft: PathBuf, made_for: String, target: String },
    #[error("{engine} would serve this draft wrongly: {reason}")]
    Unservable { engine: &'static str, reason: String },
    #[error("tensor {name} has rows of {width}, which q8_0 cannot represent: pass --dtype bf16")]
    Q8Width { name: String, width: i64 },
    /// The export differs from its source.
    #[error("the export was discarded: read back, {what} differs: {detail}")]
    Differs { what: String, detail: String },
    #[error("interrupted")]
    Interrupted,
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}
