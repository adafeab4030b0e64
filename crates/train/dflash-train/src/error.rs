//! Errors of a training run.

use std::io::ErrorKind;
use std::path::PathBuf;

use dflash_settings::Invalid;

use crate::preflight::listed;

/// A fact of a run that no resumed run can change, and what this one has in its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// The flag, or what it is in words.
    pub key: String,
    /// As the checkpoint was trained.
    pub found: String,
    /// As this run asks.
    pub expected: String,
}

/// All of them, in one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatches(pub Vec<Mismatch>);

impl std::fmt::Display for Mismatches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (at, Mismatch { key, found, expected }) in self.0.iter().enumerate() {
            let start = if at == 0 { "it was trained with " } else { "; with " };
            write!(f, "{start}{key} {found}, this run asks for {expected}")?;
        }
        Ok(())
    }
}

/// Errors name the flag, path or step, and the remedy.
#[expect(missing_docs, reason = "the messages say what the fields are")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A model directory or a checkpoint.
    #[error(transparent)]
    Model(#[from] dflash_tensor::Error),
    /// The target's identity cannot be determined.
    #[error(transparent)]
    Identity(#[from] dflash_identity::Error),
    /// The resumed run trains for another target.
    #[error(
        "cannot resume {}: it is trained for {found}, and --target is {expected}; pass its own target, or start a new run for this one with --from-pretrained {} and another --save-path",
        .path.display(), .path.display()
    )]
    OtherTarget { path: PathBuf, found: String, expected: String },
    /// The data was made with another tokenizer.
    #[error(
        "--data-path {} was prepared with the tokenizer and chat template of {found}, and --target has those of {expected}; prepare the data for this target, or pass the one that it was prepared for",
        .path.display()
    )]
    OtherTokenizer { path: PathBuf, found: String, expected: String },
    /// A source's states are not those that the run expects.
    #[error(
        "{origin} does not provide the hidden states of --target as this run uses them: {cause}"
    )]
    OtherStates { origin: String, cause: String },
    /// The source does not say which layers its states come from.
    #[error(
        "{origin} does not say which layers its states are of, and they are assumed to be {} in this order: {} verified (0 by the embedding, the last by log-probabilities), {} not; if the assumption is right, pass --trust-layer-ids once, which the run records",
        listed(wanted),
        listed(proved),
        listed(ids)
    )]
    LayersUnsaid { origin: String, wanted: Vec<u32>, proved: Vec<u32>, ids: Vec<u32> },
    /// Rank 0 refused the source and reports why.
    #[error("rank 0 refused the source of the hidden states")]
    SourceRefused,
    /// The dataset.
    #[error(transparent)]
    Data(#[from] dflash_data::Error),
    /// The hidden states.
    #[error(transparent)]
    Hidden(#[from] dflash_hidden_states::Error),
    /// The other ranks.
    #[error(transparent)]
    Dist(#[from] dflash_dist::Error),
    /// libtorch.
    #[error(transparent)]
    Torch(#[from] dflash_torch_sys::Error),
    /// A file could not be written.
    #[error(transparent)]
    Files(#[from] dflash_io::Error),
    /// The run's directory.
    #[error(transparent)]
    Run(#[from] dflash_run::Error),
    /// An invalid setting.
    #[error(transparent)]
    Setting(#[from] Invalid),
    /// The dataset has nothing to train on.
    #[error(
        "{path} has no sample with two consecutive supervised tokens; there is nothing to train on"
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
    /// Ranks found different checkpoints to resume from.
    #[error(
        "rank {rank} sees {found} in {path}, but rank 0 sees {expected}; --save-path must be one directory that all nodes share"
    )]
    RanksDisagree { rank: usize, path: PathBuf, found: String, expected: String },
    /// The run to be resumed was made with other settings.
    #[error("cannot resume {path}: {mismatches}{also}")]
    ResumeMismatch {
        path: PathBuf,
        mismatches: Mismatches,
        /// Settings that may be changed on purpose and are changed too.
        also: String,
    },
    /// The run to be resumed was made with other settings, which may be changed explicitly.
    #[error(
        "cannot resume {path} with other settings: {changes}; use the settings that it was trained with, or pass --allow-changed {names} to continue with these"
    )]
    SettingsChanged { path: PathBuf, changes: String, names: String },
    /// A file of a checkpoint is not the one that was written.
    #[error("{} does not match this step's state.json", .path.display())]
    Altered { path: PathBuf },
    /// No step had a supervised slot.
    #[error(
        "{steps} steps had no supervised slot: {skipped} samples were skipped, and the rest have no two consecutive supervised tokens within --total-seq-len; nothing is saved"
    )]
    NothingLearned { steps: u64, skipped: u64 },
    /// The starting draft belongs to another target.
    #[error(
        "--from-pretrained {path}: its {key} is {found}, this target's draft has {expected}; it was made for another target"
    )]
    ForeignDraft { path: PathBuf, key: &'static str, found: String, expected: String },
    /// Starting weights do not match their checksum.
    #[error(
        "--from-pretrained: {} does not match its state.json, so a disk or a copy damaged it; take another checkpoint, or remove its trainer folder to start from model.safetensors",
        .path.display()
    )]
    DamagedDraft { path: PathBuf },
    /// Starting weights are not finite.
    #[error("--from-pretrained {}: {name} holds values that are not finite; take another checkpoint", .path.display())]
    BadWeights { path: PathBuf, name: String },
    /// Real decoding for validation failed.
    #[error("rank {rank} cannot measure acceptance: {source}")]
    Acceptance {
        rank: usize,
        #[source]
        source: crate::ProbeError,
    },
    /// An allocation failed, on the host or on a GPU.
    #[error("rank {rank} ran out of memory {doing}: {reason}; {remedy}")]
    OutOfMemory { rank: usize, doing: String, reason: String, remedy: String },
    /// The assembly thread died.
    #[error("a row could not be prepared, which is a bug in dflash: {reason}")]
    Assembly { reason: String },
    /// The target's states are unusable, which points to a wrong setting rather than bad samples.
    #[error(
        "{count} consecutive samples could not be used; the last one, sample {sample}: {reason}"
    )]
    Unusable { count: u32, sample: u32, reason: String },
    /// A rank failed and told the others why.
    #[error("another rank failed, and the run ends with it: {report}")]
    AnotherRank { report: String },
    /// Loss or gradient is not finite.
    #[error(
        "loss or gradient of {count} consecutive steps is not finite (last: step {step}); {remedy}"
    )]
    NonFinite { count: u64, step: u64, remedy: String },
    /// The final weights are worthless.
    #[error("the run has diverged: at step {step} {sign}; {remedy}")]
    Diverged { step: u64, sign: String, remedy: String },
}

impl Error {
    /// Whether it only reports that the run was told to stop.
    pub fn is_interruption(&self) -> bool {
        matches!(self, Self::Hidden(dflash_hidden_states::Error::Interrupted))
    }

    /// Whether the cause is a full disk or an exhausted quota.
    pub(crate) fn is_disk_full(&self) -> bool {
        let mut cause: Option<&dyn std::error::Error> = Some(self);
        while let Some(error) = cause {
            if let Some(io) = error.downcast_ref::<std::io::Error>() {
                return matches!(io.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded);
            }
            cause = error.source();
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_known_however_deep_it_is() {
        let full = |kind: ErrorKind| {
            let files = dflash_io::Error::io("write", "x")(kind.into());
            let run = dflash_run::Error::from(files);
            Error::from(run).is_disk_full()
        };
        assert!(full(ErrorKind::StorageFull));
        assert!(full(ErrorKind::QuotaExceeded));
        assert!(!full(ErrorKind::PermissionDenied));
        assert!(!Error::NothingToTrain { path: "x".into() }.is_disk_full());
    }
}
