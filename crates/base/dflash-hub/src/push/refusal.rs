//! Why a push failed, at the Hub or on the way to it.

use std::path::PathBuf;

/// A reason, with what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// 401.
    #[error(
        "the Hub does not accept the token of {origin}; make one with write access in the Hub's \
             settings, under Access Tokens ({said})"
    )]
    BadToken {
        /// Where the token comes from.
        origin: String,
        /// The Hub's words.
        said: String,
    },
    /// 403.
    #[error(
        "the token of {origin} is not allowed to do that; it needs write access to the repository and its \
         owner ({said})"
    )]
    Forbidden {
        /// Where the token comes from.
        origin: String,
        /// The Hub's words.
        said: String,
    },
    /// 402, 413, 507, or another status with a message about storage.
    #[error("the owner's storage on the Hub is full, or the file too large for it ({said})")]
    Quota {
        /// The Hub's words.
        said: String,
    },
    /// The Hub does not accept the repository's name.
    #[error("the name cannot be used: {0}")]
    Name(String),
    /// The name belongs to a repository that is not a model.
    #[error(
        "the name is taken by a repository that is not a model, or that you cannot see; choose \
         another --repo"
    )]
    OtherKind,
    /// A public repository for a private push.
    #[error(
        "it exists and is public, but --private was given; make it private in its settings on the Hub, or do not pass --private"
    )]
    Public,
    /// No such branch.
    #[error("it has no branch {0}; create it on the Hub, or do not pass --revision")]
    NoRevision(String),
    /// The repository's own `.gitignore` excludes a file.
    #[error("its .gitignore excludes {0}; change that file on the Hub")]
    Ignored(String),
    /// Another status.
    #[error("{doing}: the Hub answers {status} ({said})")]
    Status {
        /// What was being done.
        doing: &'static str,
        /// The status.
        status: u16,
        /// The Hub's words.
        said: String,
    },
    /// No answer.
    #[error(
        "{doing}: {why}; the same command continues from here, and does not send again what the Hub has"
    )]
    Unreachable {
        /// What was being done.
        doing: &'static str,
        /// What happened.
        why: String,
    },
    /// The commit was sent but its answer was lost.
    #[error(
        "the commit got no answer ({0}) and may have been made; run the same command again: it commits only what is missing"
    )]
    LostCommit(String),
    /// An answer that violates the protocol.
    #[error("{doing}: the server does not speak the Hub's protocol: {what}")]
    Protocol {
        /// What was being done.
        doing: &'static str,
        /// What is wrong.
        what: String,
    },
    /// A local file cannot be read.
    #[error("cannot read {}: {source}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// A local file changed after its digest was taken.
    #[error("{} has changed meanwhile; start again when nothing writes to it", .0.display())]
    Changed(PathBuf),
    /// The address of the Hub.
    #[error("HF_ENDPOINT is not a valid address: {0}")]
    Endpoint(String),
}

impl Refusal {
    /// Whether the push may have been published anyway.
    pub(crate) fn leaves_doubt(&self) -> bool {
        matches!(self, Self::LostCommit(_))
    }
}
