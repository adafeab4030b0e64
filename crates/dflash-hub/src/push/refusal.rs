//! Why the Hub, or the way to it, did not take a push.

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
        /// Where the token is from.
        origin: String,
        /// The Hub's words.
        said: String,
    },
    /// 403.
    #[error(
        "the token of {origin} may not do that; it needs write access to the repository and its \
         owner ({said})"
    )]
    Forbidden {
        /// Where the token is from.
        origin: String,
        /// The Hub's words.
        said: String,
    },
    /// 402, 413, 507, or another status with words about storage.
    #[error("the owner's storage on the Hub is full, or the file too large for it ({said})")]
    Quota {
        /// The Hub's words.
        said: String,
    },
    /// The Hub does not take the repository's name.
    #[error("the name cannot be used: {0}")]
    Name(String),
    /// The name is taken, and not by a model.
    #[error(
        "the name is taken by a repository that is not a model, or that you cannot see; choose \
         another --repo"
    )]
    OtherKind,
    /// A public repository for a private push.
    #[error(
        "it exists and is public, and --private was asked for; make it private in its settings on \
         the Hub, or leave out --private"
    )]
    Public,
    /// No such branch.
    #[error("it has no branch {0}; create it on the Hub, or leave out --revision")]
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
        "{doing}: {why}; the same command goes on from here, and sends nothing again that the Hub \
         has"
    )]
    Unreachable {
        /// What was being done.
        doing: &'static str,
        /// What happened.
        why: String,
    },
    /// The commit was sent and its answer never came.
    #[error(
        "no answer came to the commit ({0}), which may have been made; run the same command again: \
         it commits only what is not there"
    )]
    LostCommit(String),
    /// An answer that is not what the protocol says.
    #[error("{doing}: the server does not speak the Hub's protocol: {what}")]
    Protocol {
        /// What was being done.
        doing: &'static str,
        /// What is wrong.
        what: String,
    },
    /// A file of ours cannot be read.
    #[error("cannot read {}: {source}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// A file of ours is not what it was when its digest was taken.
    #[error("{} has changed meanwhile; start again when nothing writes to it", .0.display())]
    Changed(PathBuf),
    /// The address of the Hub.
    #[error("HF_ENDPOINT is not the address of a server: {0}")]
    Endpoint(String),
}

impl Refusal {
    /// Whether the push may have been published all the same.
    pub(crate) fn leaves_doubt(&self) -> bool {
        matches!(self, Self::LostCommit(_))
    }
}
