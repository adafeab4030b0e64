//! What can go wrong with a training run.

use std::path::PathBuf;

use dflash_settings::Invalid;

/// Errors name the flag, path or step, and what would do.
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
    NothingToTrain {
        /// The dataset.
        path: PathBuf,
    },
    /// A sample cannot be read.
    #[error("cannot read sample {sample} of {}", .path.display())]
    Sample {
        /// The dataset.
        path: PathBuf,
        /// Its row.
        sample: u32,
        /// What the dataset says.
        #[source]
        source: dflash_data::Error,
    },
    /// A token of the dataset is not a row of the target's embedding.
    #[error(
        "{path}: sample {sample} has token {token}, but the target's embedding has {rows} rows; prepare the data with this target's tokenizer"
    )]
    ForeignToken {
        /// The dataset.
        path: PathBuf,
        /// Its row.
        sample: u32,
        /// The token.
        token: i64,
        /// Rows of the embedding.
        rows: i64,
    },
    /// Ranks found different checkpoints to resume.
    #[error(
        "rank {rank} finds {found} in {path}, but rank 0 finds {expected}; --save-path must be one directory that all nodes share"
    )]
    RanksDisagree {
        /// The rank that differs.
        rank: usize,
        /// The save path.
        path: PathBuf,
        /// Its last checkpoint.
        found: String,
        /// Rank 0's.
        expected: String,
    },
    /// The run to be resumed was made with other settings.
    #[error(
        "cannot resume {path}: it was trained with {key} {found}, this run asks for {expected}"
    )]
    ResumeMismatch {
        /// The checkpoint.
        path: PathBuf,
        /// The setting.
        key: &'static str,
        /// Its value in the checkpoint.
        found: String,
        /// Its value now.
        expected: String,
    },
    /// A file of a checkpoint is not the one that was written.
    #[error("{} is not what this step's state.json describes", .path.display())]
    Altered {
        /// The file.
        path: PathBuf,
    },
    /// Not one step had a slot to learn from.
    #[error(
        "{steps} steps had nothing to learn from: {skipped} samples were left out, and the rest have no two supervised tokens in a row within --total-seq-len; the weights in {} are untrained",
        .checkpoint.display()
    )]
    NothingLearned {
        /// Steps taken.
        steps: u64,
        /// Samples left out.
        skipped: u64,
        /// What was saved.
        checkpoint: PathBuf,
    },
    /// The draft to start from belongs to another target.
    #[error(
        "--from-pretrained {path}: its {key} is {found}, this target's draft has {expected}; it was made for another target"
    )]
    ForeignDraft {
        /// The checkpoint.
        path: PathBuf,
        /// What differs.
        key: &'static str,
        /// Its value in the checkpoint.
        found: String,
        /// Its value in this run.
        expected: String,
    },
    /// Weights to start from are infinite or no numbers.
    #[error("--from-pretrained {}: {name} holds values that are not finite; take another checkpoint", .path.display())]
    BadWeights {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// The draft to start from proposes tokens of another vocabulary.
    #[error(
        "--from-pretrained {}: its pruned vocabulary is for a target with {found} tokens, this one has {expected}", .path.display()
    )]
    ForeignVocabulary {
        /// The checkpoint.
        path: PathBuf,
        /// Rows of its target's embedding.
        found: usize,
        /// Rows of this target's.
        expected: usize,
    },
    /// Real decoding for validation failed.
    #[error("rank {rank} cannot measure acceptance: {source}")]
    Acceptance {
        /// The rank.
        rank: usize,
        /// What its decoder says.
        #[source]
        source: crate::ProbeError,
    },
    /// Loss or gradient stopped being numbers.
    #[error(
        "loss or gradient of {count} steps in a row is not finite (last: step {step}); lower --lr or raise --max-bad-steps, and --resume"
    )]
    NonFinite {
        /// Steps in a row.
        count: u64,
        /// The last of them.
        step: u64,
    },
}
