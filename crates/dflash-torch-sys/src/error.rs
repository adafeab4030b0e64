//! Errors of libtorch's C++ as values.

use std::net::SocketAddr;
use std::time::Duration;

/// What a call into libtorch can answer besides a result.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The C++ threw; the message is its own, without backtrace and source position.
    #[error("{operation}: {message}")]
    Torch {
        /// What was called, in words.
        operation: &'static str,
        /// The exception's text.
        message: String,
    },
    /// An address is taken, may not be used or is not this machine's.
    #[error("listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A wait ended before the work did; the work goes on.
    #[error("{operation}: not done after {after:?}")]
    StillRunning {
        /// What was waited for.
        operation: &'static str,
        /// How long.
        after: Duration,
    },
    /// The library's build report holds no version.
    #[error("the loaded libtorch does not say its version; dflash needs libtorch 2.11.0")]
    NoVersion,
    /// The library of GPU collectives, or the driver that it needs, does not load.
    #[error("NCCL cannot be used: {reason}")]
    NoNccl {
        /// The loader's message.
        reason: String,
    },
    /// NCCL or the driver refused a call.
    #[error("{operation} between GPUs: {message}")]
    Nccl {
        /// What was called, in words.
        operation: &'static str,
        /// The library's own text.
        message: String,
    },
}
