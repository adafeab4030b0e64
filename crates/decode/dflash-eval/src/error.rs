//! Errors of an evaluation, from naming a set to writing a report.

use std::path::PathBuf;

/// An error names the set, the server, or the file and line, and the remedy.
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "--prompts {word}: no such file, and not the name of a set ({names}, all); NAME=FILE \
         gives a file a name{guess}"
    )]
    UnknownSet { word: String, names: String, guess: String },
    #[error("--prompts: two sets are called {name}; rename one with NAME=FILE")]
    SameName { name: String },
    #[error("{path}:{line}: a row of {set} has {field}; this one has only {found}")]
    NoField { path: PathBuf, line: usize, set: String, field: &'static str, found: String },
    #[error("cannot read {path}: {source}")]
    Parquet { path: PathBuf, source: parquet::errors::ParquetError },
    #[error("cannot read {path}: {source}")]
    Open { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Chat(#[from] dflash_chat::Error),
    #[error(transparent)]
    Hub(#[from] dflash_hub::Error),
    #[error("{url} is not the address of a server; pass one such as http://localhost:8000/v1")]
    BadUrl { url: String },
    #[error("{url} cannot be reached: {reason}; is the server running, and is this its address?")]
    Unreachable { url: String, reason: String },
    #[error("{url} answered {status}: {text}")]
    Refused { url: String, status: u16, text: String },
    #[error("{url} sent something that is not an OpenAI server's answer: {reason}")]
    Strange { url: String, reason: String },
    #[error("{url} gave no complete answer within {seconds} s; raise --request-timeout")]
    Slow { url: String, seconds: u64 },
    #[error("{url} lists no model; pass --endpoint-model NAME")]
    NoModel { url: String },
    #[error(
        "{path}:{line}: a row of token ids cannot be sent to a server as a conversation; remove it"
    )]
    TokenIds { path: PathBuf, line: usize },
    #[error("{path}:{line}: the row has no user turn to answer")]
    NoQuestion { path: PathBuf, line: usize },
    #[error("{path}:{line}: {source}")]
    Row { path: PathBuf, line: usize, source: dflash_chat::Error },
    #[error("no prompt of {set} leaves room for an answer within the server's context")]
    NoRoom { set: String },
    #[error("cannot start the threads that talk to servers: {0}")]
    Runtime(#[source] std::io::Error),
    /// The user stopped the run.
    #[error("interrupted")]
    Interrupted,
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
    Write(#[from] dflash_io::Error),
    #[error(
        "speculative decoding is not lossless: {failures} of {responses} answers differ from plain greedy decoding by more than a tie"
    )]
    NotLossless { failures: usize, responses: usize },
}
