//! What can go wrong between a name and its files.

use std::path::PathBuf;

use crate::push::Refusal;

/// Messages name the model or dataset and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A name that is neither a directory nor of the Hub's form.
    #[error(
        "the {model} {name}: no such directory, and not a name on the Hub (OWNER/NAME or \
         OWNER/NAME@REVISION)"
    )]
    NoDirectory {
        /// Target or draft.
        model: &'static str,
        /// The name as given.
        name: String,
    },
    /// The Hub or the cache has no answer.
    #[error("cannot fetch {what}{from}: {reason}; {instead}")]
    Fetch {
        /// The object.
        what: String,
        /// Where from, if not from the usual place.
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
        /// The collection as it was named.
        collection: String,
        /// Why.
        reason: Box<Refusal>,
    },
    /// Nobody has logged in.
    #[error(
        "a push needs a token with write access: set HF_TOKEN, name a file with --token-file, or log \
         in with `hf auth login` (which leaves {})",
        .file.display()
    )]
    NoToken {
        /// Where a login would have left it.
        file: PathBuf,
    },
    /// A file of a token.
    #[error("cannot read the token in {}: {source}", .path.display())]
    TokenFile {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// Something else than a token.
    #[error("{origin} holds no token of the Hub, which is one word of plain letters and digits")]
    TokenShape {
        /// The variable or file.
        origin: String,
    },
    /// A file that is to go.
    #[error("cannot read {}: {source}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// The system refuses threads for the network.
    #[error("cannot start threads for the network: {0}")]
    Threads(std::io::Error),
    /// The run was asked to stop.
    #[error("interrupted")]
    Interrupted,
}

/// Why something cannot be fetched.
#[derive(Debug, thiserror::Error)]
pub enum Reason {
    /// Offline, and the cache has never seen this revision.
    #[error("it is not in the local cache")]
    NotCached,
    /// Offline, and the cache holds other parts only.
    #[error("the local cache lacks its {0}")]
    NotCachedWhole(String),
    /// The Hub says 404, or 401 without a login.
    #[error("the Hub has no such repository, or it is private and needs a login (HF_TOKEN)")]
    UnknownRepository,
    /// The repository has no such branch, tag or commit.
    #[error("it has no revision {0}")]
    UnknownRevision(String),
    /// The Hub says 404.
    #[error("the Hub has nothing there")]
    NotThere,
    /// The Hub says 401: the login is missing or wrong.
    #[error("{}", Self::Refused)]
    NoLogin,
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
    /// A file arrived that is not the announced one.
    #[error("{file} arrived with {found} of {expected} bytes; try again")]
    WrongSize {
        /// The file.
        file: String,
        /// Its size as announced.
        expected: u64,
        /// The size of what arrived.
        found: u64,
    },
    /// Anything else, in words.
    #[error("{0}")]
    Client(String),
}
