//! What can go wrong with a run's directory.

use std::path::PathBuf;

/// Errors name the path and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read or written.
    #[error(transparent)]
    Files(#[from] dflash_files::Error),
    /// A file does not parse.
    #[error("{path}: {source}")]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's answer.
        #[source]
        source: serde_json::Error,
    },
    /// The directory holds something that is not ours.
    #[error("{path} holds {found}, which no training run wrote; name another --save-path")]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// What lies there.
        found: String,
    },
    /// The directory holds an earlier run.
    #[error(
        "{path} holds checkpoints of an earlier run (last: step {step}); pass --resume to continue it or name another --save-path"
    )]
    EarlierRun {
        /// The directory.
        path: PathBuf,
        /// Its last complete step.
        step: u64,
    },
    /// Another process trains into the directory.
    #[error(
        "another run is writing to {path}; wait until it has ended, or name another --save-path"
    )]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// A checkpoint that is not as it was written.
    #[error(
        "cannot resume {}, which is damaged; remove it to go on from {}",
        .path.display(),
        .before.map_or_else(|| "the start".to_owned(), |step| format!("step {step}"))
    )]
    DamagedCheckpoint {
        /// Its directory.
        path: PathBuf,
        /// The complete checkpoint before it.
        before: Option<u64>,
        /// What is wrong with it.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A checkpoint lacks a file.
    #[error("{path} is missing")]
    Missing {
        /// The file.
        path: PathBuf,
    },
}
