//! Errors of fetching and publishing.

use std::path::PathBuf;

use crate::push::Refusal;

/// Messages name the model or dataset and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A name that is neither a directory nor a valid name on the Hub.
    #[error(
        "the {model} {name}: no such directory, and not a name on the Hub (OWNER/NAME or \
         OWNER/NAME@REVISION){}",
        .guess.as_ref().map_or_else(String::new, |guess| format!("; did you mean {guess}?"))
    )]
    NoDirectory {
        /// Target or draft.
        model: &'static str,
        /// The name as given.
        name: String,
        /// The name on the Hub that it is probably short for.
        guess: Option<String>,
    },
    /// A path or a repository that is something else than the model it is given as.
    #[error("the {model} {name} {is}")]
    Misnamed {
        /// Target or draft.
        model: &'static str,
        /// The name as given.
        name: String,
        /// What it is.
        is: Misnamed,
    },
    /// The Hub or the cache has no answer.
    #[error("cannot fetch {what}{from}: {reason}; {instead}")]
    Fetch {
        /// The object.
        what: String,
        /// Where from, if not from the usual address.
        from: String,
        /// Why.
        reason: Reason,
        /// What works without the Hub.
        instead: &'static str,
    },
    /// A push ended before its commit.
    #[error(
        "cannot push to {repository} at {from}: {reason}{}",
        if reason.leaves_doubt() { "" } else { "; nothing was published" }
    )]
    Publish {
        /// `OWNER/NAME`.
        repository: String,
        /// The Hub's address.
        from: String,
        /// Why.
        reason: Box<Refusal>,
    },
    /// A push ended after its commit.
    #[error("{repository} is published ({url}), but not in the collection {collection}: {reason}")]
    Collection {
        /// `OWNER/NAME`.
        repository: String,
        /// Its page.
        url: String,
        /// The collection as given.
        collection: String,
        /// Why.
        reason: Box<Refusal>,
    },
    /// There is no login.
    #[error(
        "a push needs a token with write access: set HF_TOKEN, name a file with --token-file, or log \
         in with `hf auth login` (which leaves {})",
        .file.display()
    )]
    NoToken {
        /// Where a login would have stored it.
        file: PathBuf,
    },
    /// A token file that cannot be read.
    #[error("cannot read the token in {}: {source}", .path.display())]
    TokenFile {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// A value that is not a token.
    #[error("{origin} has no valid Hub token, which is one word of plain letters and digits")]
    TokenShape {
        /// The variable or file.
        origin: String,
    },
    /// A file to upload that cannot be read.
    #[error("cannot read {}: {source}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// The system cannot start threads for the network.
    #[error("cannot start threads for the network: {0}")]
    Threads(std::io::Error),
    /// The run was told to stop.
    #[error("interrupted")]
    Interrupted,
}

/// What was given as a target or a draft and is neither, and what to pass.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Misnamed {
    /// A file.
    #[error(
        "is a file, and a model is a directory (config.json, model.safetensors, tokenizer.json)"
    )]
    File,
    /// llama.cpp's form of a target.
    #[error(
        "is llama.cpp's form of a model (GGUF), which dflash does not run; pass the Hugging Face model that \
         it was made from: its directory or OWNER/NAME"
    )]
    GgufTarget,
    /// llama.cpp's form of a draft.
    #[error(
        "is llama.cpp's form of a drafter (GGUF), which only llama.cpp runs; pass the checkpoint that it was \
         exported from (a directory with config.json and model.safetensors), or make one of it with \
         `dflash export --format zlab`"
    )]
    GgufDraft,
    /// A DFlash drafter where a target is needed.
    #[error(
        "is a DFlash drafter, not a target: --target and --draft look swapped; a target is the model that the \
         drafter proposes for"
    )]
    DraftAsTarget,
    /// A drafter of another kind where a target is needed.
    #[error("is {name}, not a target; pass the model that it proposes for")]
    OtherDraftAsTarget {
        /// Its kind, with an article.
        name: String,
    },
    /// A drafter of another kind.
    #[error(
        "is {name}, and dflash reads DFlash drafters only (a config.json with dflash_config, or speculators' \
         of the algorithm dflash)"
    )]
    OtherDraft {
        /// Its kind, with an article.
        name: String,
    },
    /// A drafter of z-lab's first release.
    #[error(
        "is a DFlash drafter of an early release: its config.json has no dflash_config, which says the mask \
         token and the target's layers; fetch the drafter's present revision, or train anew"
    )]
    EarlyDraft,
    /// A whole model where a drafter is needed.
    #[error(
        "is a language model of its own ({name}), not a drafter: --target and --draft look swapped, or the \
         drafter's directory is meant"
    )]
    TargetAsDraft {
        /// Its architecture.
        name: String,
    },
}

/// Why something cannot be fetched.
#[derive(Debug, thiserror::Error)]
pub enum Reason {
    /// Offline, and the cache has never seen this revision.
    #[error("it is not in the local cache")]
    NotCached,
    /// Offline, and the cache has only other parts.
    #[error("the local cache lacks its {0}")]
    NotCachedWhole(String),
    /// The Hub says 404, or 401 without a login.
    #[error("the Hub has no such repository, or it is private and needs a login (HF_TOKEN)")]
    UnknownRepository,
    /// The repository has no such branch, tag or commit.
    #[error("it has no revision {0}")]
    UnknownRevision(String),
    /// Gated or private.
    #[error(
        "the Hub refuses access; accept the terms on the repository's page, and log in with \
         `hf auth login` or HF_TOKEN"
    )]
    Refused,
    /// No connection.
    #[error("the Hub cannot be reached ({0})")]
    Unreachable(String),
    /// The repository has no such file.
    #[error("the repository has no {0}")]
    NoFile(String),
    /// The dataset has no such split, or the Hub has not converted it.
    #[error("its Parquet conversion has no split {split} of configuration {config}")]
    NoSplit {
        /// The configuration.
        config: String,
        /// The split.
        split: String,
    },
    /// A file arrived with another size than announced.
    #[error("{file} arrived with {found} of {expected} bytes; try again")]
    WrongSize {
        /// The file.
        file: String,
        /// Its size as announced.
        expected: u64,
        /// The size of what arrived.
        found: u64,
    },
    /// Anything else, in the client's words.
    #[error("{0}")]
    Client(String),
}
