//! Errors between a name and its prompts.

use std::path::PathBuf;

/// An error names the set, or the file and line, and the remedy.
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "--prompts {word}: no such file, and not the name of a set ({names}, all); NAME=FILE gives \
         a file a name"
    )]
    Unknown { word: String, names: String },
    #[error("--prompts: two sets are called {name}; rename one with NAME=FILE")]
    Twice { name: String },
    #[error("{path}:{line}: a row of {set} has {field}; this one has only {found}")]
    NoField { path: PathBuf, line: usize, set: String, field: &'static str, found: String },
    #[error("cannot read {path}: {source}")]
    Parquet { path: PathBuf, source: parquet::errors::ParquetError },
    #[error("cannot read {path}: {source}")]
    Open { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Text(#[from] dflash_text::Error),
    #[error(transparent)]
    Hub(#[from] dflash_hub::Error),
}
