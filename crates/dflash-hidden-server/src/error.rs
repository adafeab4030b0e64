//! Why a server does not start, or ends.

use std::io;
use std::net::SocketAddr;

/// A failure, naming the address or the model it concerns.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting that this machine cannot honour.
    #[error(transparent)]
    Setting(#[from] dflash_settings::Invalid),
    /// libtorch.
    #[error(transparent)]
    Torch(#[from] dflash_torch_sys::Error),
    /// A host that is not an address of this machine.
    #[error("cannot listen on host {host:?}; pass --host 127.0.0.1, or 0.0.0.0 for all interfaces")]
    BadHost {
        /// As the user wrote it.
        host: String,
        /// The resolver's reason.
        #[source]
        source: io::Error,
    },
    /// Something else listens.
    #[error(
        "port {} is in use on {}; stop the program that listens there, or pass another --port \
         (0 picks a free one)", .address.port(), .address.ip()
    )]
    PortInUse {
        /// The address.
        address: SocketAddr,
    },
    /// The operating system refused the address for another reason.
    #[error("cannot listen on {address}; pass another --host or --port")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The target cannot be loaded, or has no such layer.
    #[error(transparent)]
    Model(#[from] dflash_model::Error),
    /// More context than the target was made for.
    #[error(
        "--max-model-len {asked} is more than the target's max_position_embeddings, {limit}; \
         leave it out or lower it"
    )]
    TooLongContext {
        /// The flag's value.
        asked: usize,
        /// The model's value.
        limit: usize,
    },
    /// A batch that the model could not run.
    #[error("the target failed on a batch of {tokens} tokens: {reason}")]
    Batch {
        /// Tokens in the batch.
        tokens: usize,
        /// The model's reason.
        reason: String,
    },
    /// Rows that do not make a record; a fault of the model side.
    #[error("the target's rows do not form a record")]
    Rows(#[from] dflash_hidden::Error),
    /// The thread that owns the model ended.
    #[error("the model's thread ended unexpectedly; its message is above")]
    ModelGone,
    /// The port file cannot be written.
    #[error(transparent)]
    Files(#[from] dflash_files::Error),
    /// The operating system refused threads or sockets.
    #[error("cannot start the server's threads")]
    Runtime(#[source] io::Error),
    /// The listener failed while serving.
    #[error("the listener on {address} failed")]
    Serve {
        /// The address.
        address: SocketAddr,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
}
