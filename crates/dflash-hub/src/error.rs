//! What can go wrong between a name and its files.

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
    /// Anything else, in the client's words.
    #[error("{0}")]
    Client(String),
}
