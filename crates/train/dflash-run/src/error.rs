//! Errors of a run's directory.

use std::path::PathBuf;

/// An error names the path and the remedy.
#[expect(missing_docs, reason = "the messages say what the fields are")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read or written.
    #[error(transparent)]
    Files(#[from] dflash_io::Error),
    /// A file does not parse.
    #[error("{path}: {source}")]
    Json {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    /// A file of evaluations has other contents.
    #[error("{} is not a report of `dflash eval`: {source}", .path.display())]
    Evaluation {
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
    /// There is no checkpoint to resume from.
    #[error(
        "there is no checkpoint in {path} to resume; omit --resume to start a run there, or pass --resume=auto, which starts one wherever there is none"
    )]
    NothingToResume { path: PathBuf },
    /// The requested step has no checkpoint.
    #[error(
        "{path} has no checkpoint of step {step} for --resume; {}",
        if .there.is_empty() { "it has none".to_owned() } else { format!("there are {}", steps(.there)) }
    )]
    NoSuchStep { path: PathBuf, step: u64, there: Vec<u64> },
    /// All checkpoints are of a run that had diverged.
    #[error(
        "all checkpoints in {path} are of a run that had diverged; start again with another --save-path and a lower --lr, or pass --resume={step} to use the last one anyway"
    )]
    OnlyDiverged { path: PathBuf, step: u64 },
    /// Another process trains into the directory.
    #[error("another run is writing to {path}; wait until it ends, or name another --save-path")]
    InUse { path: PathBuf },
    /// A damaged checkpoint.
    #[error(
        "cannot resume {}, which is damaged; remove it to continue from {}",
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
        "{path} has no best checkpoint, because no checkpoint was validated (--validation-ratio); name {}",
        .path.join("latest").display()
    )]
    NoBest { path: PathBuf },
    /// One of the user's files has a link's name.
    #[error("{path} is not a link made by this run; move it away")]
    NotALink { path: PathBuf },
    /// A checkpoint lacks a file.
    #[error("{path} is missing")]
    Missing { path: PathBuf },
}

/// Step numbers as text.
pub(crate) fn steps(steps: &[u64]) -> String {
    let steps: Vec<String> = steps.iter().map(u64::to_string).collect();
    steps.join(", ")
}
