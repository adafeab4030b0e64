//! Why a server does not start, or ends.

use std::io;
use std::net::SocketAddr;

/// A failure, naming the address or the model it concerns.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the variants and their fields are")]
pub enum Error {
    #[error(transparent)]
    Setting(#[from] dflash_settings::Invalid),
    #[error(transparent)]
    Torch(#[from] dflash_torch_sys::Error),
    #[error("cannot listen on host {host:?}; pass --host 127.0.0.1, or 0.0.0.0 for all interfaces")]
    BadHost { host: String, source: io::Error },
    #[error(
        "port {} is in use on {}; stop the program that listens there, or pass another --port \
         (0 picks a free one)", .address.port(), .address.ip()
    )]
    PortInUse { address: SocketAddr },
    #[error("cannot listen on {address}; pass another --host or --port")]
    Bind { address: SocketAddr, source: io::Error },
    #[error(transparent)]
    Model(#[from] dflash_model::Error),
    #[error(transparent)]
    Identity(#[from] dflash_identity::Error),
    #[error(
        "--max-model-len {asked} is more than the target's max_position_embeddings, {limit}; \
         leave it out or lower it"
    )]
    TooLongContext { asked: usize, limit: usize },
    #[error("the target failed on a batch of {tokens} tokens: {reason}")]
    Batch { tokens: usize, reason: String },
    /// Fewer tokens may fit.
    #[error("no memory for a batch of {tokens} tokens: {reason}")]
    OutOfMemory { tokens: usize, reason: String },
    /// As many have fitted before.
    #[error("no memory at present for a batch of {tokens} tokens: {reason}")]
    ShortOfMemory { tokens: usize, reason: String },
    /// A fault of the model side.
    #[error("the target's rows do not form a record")]
    Rows(#[from] dflash_hidden::Error),
    #[error("the model's thread ended unexpectedly; its message is above")]
    ModelGone,
    #[error(transparent)]
    Files(#[from] dflash_files::Error),
    #[error("cannot start the server's threads")]
    Runtime(#[source] io::Error),
    #[error("the listener on {address} failed")]
    Serve { address: SocketAddr, source: io::Error },
}
