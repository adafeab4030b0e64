//! Errors of decoding, from reading prompts to writing reports.
#![allow(missing_docs, reason = "the messages say it")]

use std::path::PathBuf;

/// Errors name the file and line (counted from 1), or the two models that do not match.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A setting that this machine does not support.
    #[error(transparent)]
    Setting(#[from] dflash_settings::Invalid),
    /// Target or draft cannot be loaded.
    #[error(transparent)]
    Model(#[from] dflash_tensor::Error),
    /// A model's identity cannot be determined.
    #[error(transparent)]
    Identity(#[from] dflash_identity::Error),
    #[error(
        "the draft {path} was made for {found}, and --target is {expected}; pass its own target, or --allow-other-target to use it on this one"
    )]
    OtherTarget { path: PathBuf, found: String, expected: String },
    /// The tokenizer or the data file cannot be read.
    #[error(transparent)]
    Text(#[from] dflash_chat::Error),
    /// A prompt set is unknown or cannot be read, or a report cannot be written or compared.
    #[error(transparent)]
    Evaluation(#[from] dflash_eval::Error),
    /// A result cannot be written.
    #[error(transparent)]
    Write(#[from] dflash_io::Error),
    /// A row of the data file is not a supported conversation, or cannot be rendered.
    #[error("{path}:{line}: {source}")]
    Row { path: PathBuf, line: usize, source: dflash_chat::Error },
    #[error("{path}:{line}: the row has no user turn to answer")]
    NoQuestion { path: PathBuf, line: usize },
    #[error(
        "{path}:{line}: a turn that is not the assistant's has no content; is the key misspelled? \
         It is content or value"
    )]
    NoContent { path: PathBuf, line: usize },
    #[error(
        "{path}:{line}: token {id} is outside the target's {rows} embedding rows; use the tokenizer of the target"
    )]
    Token { path: PathBuf, line: usize, id: i64, rows: i64 },
    #[error(
        "{path} has no prompt that leaves room for an answer within the target's {context} positions"
    )]
    NoPrompts { path: PathBuf, context: i64 },
    #[error(
        "the draft does not fit the target: {what} is {draft} in the draft and {target} in the target; pass the target that the draft was trained with"
    )]
    Mismatch { what: &'static str, draft: i64, target: i64 },
    #[error(
        "this command times packed layers, which {path} does not have; name a dense target (Llama, Mistral, Qwen2, Qwen3)"
    )]
    NotPacked { path: PathBuf },
    #[error(
        "blocks of {tokens} tokens are verified, but the target has recurrent layers, whose state can be rolled back by at most {most} tokens; propose fewer at a time"
    )]
    LongBlock { tokens: usize, most: usize },
    /// A partial result cannot be read or extended.
    #[error("cannot {action} {path}: {source}")]
    Partial { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error(
        "{path} was made with other settings or another target ({differences}); use the same settings, name another --output, or pass --overwrite to start over"
    )]
    OtherSettings { path: PathBuf, differences: String },
    #[error(
        "{path} exists, and how it was made is not known; name another --output, or pass --overwrite \
         to replace it"
    )]
    Unknown { path: PathBuf },
    #[error(
        "{path} holds the answers to {prompts} prompts already, and --limit asks for {wanted}; raise \
         it, name another --output, or pass --overwrite to start over"
    )]
    TooMany { path: PathBuf, prompts: usize, wanted: usize },
    #[error("{path}:{line}: not a line that regenerate wrote; pass --overwrite to start over")]
    Damaged { path: PathBuf, line: usize },
    #[error("{path} is in use by another run; wait for it, or name another --output")]
    InUse { path: PathBuf },
    #[error("{path} is not a regular file; name another --output")]
    NotAFile { path: PathBuf },
    #[error("the prompt is empty; give it some text")]
    EmptyPrompt,
    #[error(
        "the prompt has {tokens} tokens, which leaves no room for an answer within the target's \
         {context} positions; shorten it"
    )]
    LongPrompt { tokens: usize, context: usize },
    #[error("cannot write the answer to standard output: {source}")]
    Output { source: std::io::Error },
    #[error(
        "out of memory with {sequences} sequences ({reason}); decode fewer or shorter sequences at a time, or end other programs"
    )]
    OutOfMemory { sequences: usize, reason: String },
    #[error(
        "the target's tokenizer does not say which bytes its tokens stand for, so its answers cannot be constrained to a format"
    )]
    UnknownSpelling,
    #[error("the target has no end token, so its answers cannot be constrained to a format")]
    NoEndToken,
    /// A grammar was rejected; the reason comes from its parser.
    #[error("{reason}")]
    Grammar { reason: String },
    /// The user stopped the run.
    #[error("interrupted")]
    Interrupted,
}

impl Error {
    /// Whether an existing output made with other settings is in the way.
    pub(crate) fn is_other_output(&self) -> bool {
        matches!(
            self,
            Self::OtherSettings { .. }
                | Self::Unknown { .. }
                | Self::TooMany { .. }
                | Self::Damaged { .. }
        )
    }
}
