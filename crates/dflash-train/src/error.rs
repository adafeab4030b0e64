//! What can go wrong with a training run.

use std::path::PathBuf;

use dflash_settings::Invalid;

/// Errors name the flag, path or step, and the remedy.
#[expect(missing_docs, reason = "the messages say what the fields are")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A model directory or a checkpoint.
    #[error(transparent)]
    Model(#[from] dflash_model::Error),
    /// The dataset.
    #[error(transparent)]
    Data(#[from] dflash_data::Error),
    /// The hidden states.
    #[error(transparent)]
    Hidden(#[from] dflash_hidden::Error),
    /// The other ranks.
    #[error(transparent)]
    Dist(#[from] dflash_dist::Error),
    /// libtorch.
    #[error(transparent)]
    Torch(#[from] dflash_torch_sys::Error),
    /// A file could not be written.
    #[error(transparent)]
    Files(#[from] dflash_files::Error),
    /// The run's directory.
    #[error(transparent)]
    Run(#[from] dflash_run::Error),
    /// A setting that cannot be honoured.
    #[error(transparent)]
    Setting(#[from] Invalid),
    /// The dataset has nothing to train on.
    #[error(
        "{path} has no sample with two supervised tokens in a row; there is nothing to train on"
    )]
    NothingToTrain { path: PathBuf },
    /// A sample cannot be read.
    #[error("cannot read sample {sample} of {}", .path.display())]
    Sample {
        path: PathBuf,
        sample: u32,
        #[source]
        source: dflash_data::Error,
    },
    /// A token of the dataset is not a row of the target's embedding.
    #[error(
        "{path}: sample {sample} has token {token}, but the target's embedding has {rows} rows; prepare the data with this target's tokenizer"
    )]
    ForeignToken { path: PathBuf, sample: u32, token: i64, rows: i64 },
    /// Ranks found different checkpoints to resume.
    #[error(
        "rank {rank} finds {found} in {path}, but rank 0 finds {expected}; --save-path must be one directory that all nodes share"
    )]
    RanksDisagree { rank: usize, path: PathBuf, found: String, expected: String },
    /// The run to be resumed was made with other settings.
    #[error(
        "cannot resume {path}: it was trained with {key} {found}, this run asks for {expected}"
    )]
    ResumeMismatch { path: PathBuf, key: &'static str, found: String, expected: String },
    /// A file of a checkpoint is not the one that was written.
    #[error("{} is not what this step's state.json describes", .path.display())]
    Altered { path: PathBuf },
    /// Not one step had a slot to learn from.
    #[error(
        "{steps} steps had nothing to learn from: {skipped} samples were left out, and the rest have no two supervised tokens in a row within --total-seq-len; the weights in {} are untrained",
        .checkpoint.display()
    )]
    NothingLearned { steps: u64, skipped: u64, checkpoint: PathBuf },
    /// The draft to start from belongs to another target.
    #[error(
        "--from-pretrained {path}: its {key} is {found}, this target's draft has {expected}; it was made for another target"
    )]
    ForeignDraft { path: PathBuf, key: &'static str, found: String, expected: String },
    /// Weights to start from are not finite.
    #[error("--from-pretrained {}: {name} holds values that are not finite; take another checkpoint", .path.display())]
    BadWeights { path: PathBuf, name: String },
    /// Real decoding for validation failed.
    #[error("rank {rank} cannot measure acceptance: {source}")]
    Acceptance {
        rank: usize,
        #[source]
        source: crate::ProbeError,
    },
    /// Loss or gradient are not finite.
    #[error(
        "loss or gradient of {count} steps in a row is not finite (last: step {step}); lower --lr or raise --max-bad-steps, and --resume"
    )]
    NonFinite { count: u64, step: u64 },
}

impl Error {
    /// Whether it says no more than that the run was told to stop.
    pub fn is_interruption(&self) -> bool {
        matches!(self, Self::Hidden(dflash_hidden::Error::Interrupted))
    }
}
