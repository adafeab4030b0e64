//! What can go wrong with a run's directory.

use std::path::PathBuf;

/// Errors name the path and the remedy.
#[expect(missing_docs, reason = "the messages say what the fields are")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read or written.
    #[error(transparent)]
    Files(#[from] dflash_files::Error),
    /// A file does not parse.
    #[error("{path}: {source}")]
    Json {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    /// The directory holds something that no run wrote.
    #[error("{path} holds {found}, which no training run wrote; name another --save-path")]
    Foreign { path: PathBuf, found: String },
    /// The directory holds an earlier run.
    #[error(
        "{path} holds checkpoints of an earlier run (last: step {step}); pass --resume to continue it or name another --save-path"
    )]
    EarlierRun { path: PathBuf, step: u64 },
    /// Another process trains into the directory.
    #[error(
        "another run is writing to {path}; wait until it has ended, or name another --save-path"
    )]
    InUse { path: PathBuf },
    /// A checkpoint that is not as it was written.
    #[error(
        "cannot resume {}, which is damaged; remove it to go on from {}",
        .path.display(),
        .before.map_or_else(|| "the start".to_owned(), |step| format!("step {step}"))
    )]
    DamagedCheckpoint {
        path: PathBuf,
        before: Option<u64>,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A run has saved nothing yet.
    #[error("{path} holds no complete checkpoint; wait for the run's first, or name a draft")]
    NoCheckpoint { path: PathBuf },
    /// Nothing was validated.
    #[error(
        "{path} has no best checkpoint, because no checkpoint was validated (--eval-every); name {}",
        .path.join("latest").display()
    )]
    NoBest { path: PathBuf },
    /// Something of the user's is where a link should be.
    #[error("{path} is not a link that this run made; move it away")]
    NotALink { path: PathBuf },
    /// A checkpoint lacks a file.
    #[error("{path} is missing")]
    Missing { path: PathBuf },
}
