//! Errors of a server.

use std::path::PathBuf;

/// An error names the server, or the file and line, and the remedy.
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
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
    Row { path: PathBuf, line: usize, source: dflash_text::Error },
    #[error("no prompt of {set} leaves room for an answer within the server's context")]
    NoRoom { set: String },
    #[error("cannot start the threads that talk to servers: {0}")]
    Runtime(#[source] std::io::Error),
    #[error(transparent)]
    Sets(#[from] dflash_bench_sets::Error),
    #[error(transparent)]
    Evaluation(#[from] dflash_evaluation::Error),
    /// The user stopped the run.
    #[error("interrupted")]
    Interrupted,
}
