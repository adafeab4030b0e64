//! Errors of reports.

use std::path::PathBuf;

/// An error names the file and the remedy.
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the baseline {path}: {source}; pass the --json of an earlier evaluation")]
    ReadBaseline { path: PathBuf, source: std::io::Error },
    #[error(
        "{path} is not a report to compare with: {source}; pass the --json of an earlier \
         evaluation by this release"
    )]
    BadBaseline { path: PathBuf, source: serde_json::Error },
    #[error(
        "{path} has nothing in common with this evaluation: they share no combination of set, temperature, thinking and concurrency; measure what it measured ({there})"
    )]
    NothingInCommon { path: PathBuf, there: String },
    #[error("cannot make the directory {path}: {source}")]
    MakeDirectory { path: PathBuf, source: std::io::Error },
    #[error("{flag} {path} cannot be written: its directory does not exist; create it first")]
    NoDirectory { flag: &'static str, path: PathBuf },
    #[error(transparent)]
    Write(#[from] dflash_files::Error),
    #[error(
        "speculative decoding is not lossless: {failures} of {responses} answers differ from plain greedy decoding by more than a tie"
    )]
    NotLossless { failures: usize, responses: usize },
}
