//! What can go wrong with a report.

use std::path::PathBuf;

/// Errors name the path and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The directory is not a training run's.
    #[error(
        "{path} holds no run: neither metrics.jsonl nor run.json; pass the --save-path of a training run"
    )]
    NoRun {
        /// The directory.
        path: PathBuf,
    },
    /// A file cannot be read or written.
    #[error(transparent)]
    Files(#[from] dflash_files::Error),
}
