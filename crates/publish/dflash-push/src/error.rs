//! Errors of publishing a drafter.

use std::path::PathBuf;

/// An error names the file and the remedy.
#[expect(missing_docs, reason = "the messages say what the fields are")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An error in a run's directory.
    #[error(transparent)]
    Run(#[from] dflash_run::Error),
    /// Truncated or damaged files.
    #[error(transparent)]
    Format(#[from] dflash_formats::Error),
    /// The Hub, or the connection to it.
    #[error(transparent)]
    Hub(#[from] dflash_hub::Error),
    /// The identity of the target, or a digest.
    #[error(transparent)]
    Identity(#[from] dflash_identity::Error),
    /// Something that is not a drafter.
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
    /// A file that no run wrote.
    #[error(
        "{} was not written by a training run; restore it, or remove it to publish without its information on training",
        .path.display()
    )]
    BrokenRecord { path: PathBuf },
    /// A GGUF file of another kind of model.
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
    OtherDrafter { path: PathBuf, what: &'static str, found: i64, expected: i64 },
    /// Two files with the same name.
    #[error("{} and {} would both be {name} in the repository; rename one", .first.display(), .second.display())]
    SameName { name: String, first: PathBuf, second: PathBuf },
    /// A path in a file that is published.
    #[error(
        "{}: {key} is {value}, a path of this machine, which nobody else can use; replace it, e.g. with the model's name on the Hub",
        .path.display()
    )]
    LocalPath { path: PathBuf, key: String, value: String },
    /// There is no evaluation.
    #[error(
        "{} was never evaluated; measure it with `dflash eval --target TARGET --draft {} --prompts \
         FILE`, name a report with --evaluation, or pass --allow-unevaluated to publish it with a \
         card that says so",
        .draft.display(), .draft.display()
    )]
    Unevaluated { draft: PathBuf },
    /// A choice of results that do not exist.
    #[error(
        "--results names {named}, but the results of this drafter are for {there}; name these, or none"
    )]
    NoSuchResult { named: String, there: String },
    /// A report for other weights.
    #[error(
        "{} is a report for other weights (digest {found}; these have {expected}); evaluate this \
         drafter",
        .report.display()
    )]
    OtherWeights { report: PathBuf, found: String, expected: String },
    /// A report that does not identify its weights.
    #[error(
        "{} does not say which weights it is for, because an earlier release wrote it, or the weights are in shards; evaluate the drafter again",
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
