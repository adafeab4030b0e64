//! What can go wrong between a file of prompts and a report.

use std::path::PathBuf;

/// Errors name the file and line, or the two models that do not fit.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A setting that this machine cannot honour.
    #[error(transparent)]
    Setting(#[from] dflash_settings::Invalid),
    /// Target or draft cannot be loaded.
    #[error(transparent)]
    Model(#[from] dflash_model::Error),
    /// The tokenizer or the data file cannot be read.
    #[error(transparent)]
    Text(#[from] dflash_text::Error),
    /// A result cannot be written.
    #[error(transparent)]
    Write(#[from] dflash_files::Error),
    /// A row of the data file is not a conversation we understand, or cannot be rendered.
    #[error("{path}:{line}: {source}")]
    Row {
        /// The data file.
        path: PathBuf,
        /// 1-based line.
        line: usize,
        /// What is wrong with the row.
        #[source]
        source: dflash_text::Error,
    },
    /// A row has nothing to answer.
    #[error("{path}:{line}: the row has no user turn to answer")]
    NoQuestion {
        /// The data file.
        path: PathBuf,
        /// 1-based line.
        line: usize,
    },
    /// A token id of a row is outside the target's embedding.
    #[error(
        "{path}:{line}: token {id} is outside the target's {rows} embedding rows; use the tokenizer of the target"
    )]
    Token {
        /// The data file.
        path: PathBuf,
        /// 1-based line.
        line: usize,
        /// The token.
        id: i64,
        /// Rows of the embedding.
        rows: i64,
    },
    /// The data file holds no row that can be used.
    #[error(
        "{path} holds no prompt that leaves room for an answer within the target's {context} positions"
    )]
    NoPrompts {
        /// The data file.
        path: PathBuf,
        /// The target's context length.
        context: i64,
    },
    /// Draft and target were not made for each other.
    #[error(
        "the draft does not fit the target: {what} is {draft} in the draft and {target} in the target; pass the target that the draft was trained with"
    )]
    Mismatch {
        /// The dimension.
        what: &'static str,
        /// The draft's.
        draft: i64,
        /// The target's.
        target: i64,
    },
    /// A partial result cannot be read or extended.
    #[error("cannot {action} {path}: {source}")]
    Partial {
        /// The operation.
        action: &'static str,
        /// The partial file.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: std::io::Error,
    },
    /// Speculative and plain greedy decoding gave different texts.
    #[error(
        "speculative decoding is not lossless: {failures} of {responses} answers differ from plain greedy decoding by more than a tie"
    )]
    NotLossless {
        /// Answers that differ.
        failures: usize,
        /// Answers compared.
        responses: usize,
    },
    /// The user stopped the run.
    #[error("interrupted")]
    Interrupted,
}
