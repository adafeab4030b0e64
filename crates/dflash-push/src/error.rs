//! What can go wrong between a drafter's directory and the Hub.

use std::path::PathBuf;

/// Errors name the file and the remedy.
#[expect(missing_docs, reason = "the messages say what the fields are")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A run's directory.
    #[error(transparent)]
    Run(#[from] dflash_run::Error),
    /// The Hub, or the way there.
    #[error(transparent)]
    Hub(#[from] dflash_hub::Error),
    /// Whose drafter it is, or a digest.
    #[error(transparent)]
    Identity(#[from] dflash_identity::Error),
    /// Something else than a drafter.
    #[error(
        "{} is not a drafter: it has no {missing}; name a run, a checkpoint, an exported drafter or a \
         GGUF file",
        .path.display()
    )]
    NoDrafter { path: PathBuf, missing: String },
    /// A file cannot be read.
    #[error("cannot read {}: {source}", .path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// A file does not parse.
    #[error("{}: {source}", .path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    /// A run's record that says nothing.
    #[error(
        "{} is not what a run writes; put it back, or remove it to publish without what it says of the \
         training",
        .path.display()
    )]
    BrokenRecord { path: PathBuf },
    /// Weights that are not whole.
    #[error("{} is damaged: {reason}; make the checkpoint or the export again", .path.display())]
    Damaged { path: PathBuf, reason: String },
    /// A GGUF file of something else.
    #[error(
        "{} holds a model of architecture {architecture}, and a drafter's is dflash; name the \
         drafter's file",
        .path.display()
    )]
    OtherArchitecture { path: PathBuf, architecture: String },
    /// A GGUF file of another drafter.
    #[error(
        "{} is not of this drafter: its {what} is {found}, and {expected} in config.json; export it \
         again",
        .path.display()
    )]
    OtherDrafter { path: PathBuf, what: &'static str, found: u64, expected: u64 },
    /// Two files for one name.
    #[error("{} and {} would both be {name} in the repository; rename one", .first.display(), .second.display())]
    SameName { name: String, first: PathBuf, second: PathBuf },
    /// A path in a file that is published.
    #[error(
        "{}: {key} is {value}, a path of this machine, which nobody else can use; replace it, as by the \
         model's name on the Hub",
        .path.display()
    )]
    LocalPath { path: PathBuf, key: String, value: String },
    /// Nothing was measured.
    #[error(
        "{} was never evaluated; measure it with `dflash eval --target TARGET --draft {} --prompts \
         FILE`, name a report with --evaluation, or pass --allow-unevaluated to publish it with a \
         card that says so",
        .draft.display(), .draft.display()
    )]
    Unevaluated { draft: PathBuf },
    /// A choice of what is not there.
    #[error(
        "--results names {named}, but the results of this drafter are of {there}; name these, or none"
    )]
    NoSuchResult { named: String, there: String },
    /// A report of other weights.
    #[error(
        "{} is a report of other weights (digest {found}; these have {expected}); evaluate this \
         drafter",
        .report.display()
    )]
    OtherWeights { report: PathBuf, found: String, expected: String },
    /// A report that does not say what it is of.
    #[error(
        "{} does not say which weights it is of, since an earlier release wrote it, or the weights are \
         in shards; evaluate the drafter again",
        .report.display()
    )]
    UnknownWeights { report: PathBuf },
    /// A report with another target.
    #[error(
        "{} was measured on {found}, and the drafter was made for {expected}; evaluate it on its own \
         target",
        .report.display()
    )]
    OtherTarget { report: PathBuf, found: String, expected: String },
}
