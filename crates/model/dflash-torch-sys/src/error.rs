//! Errors of libtorch's C++ as values.
#![allow(missing_docs, reason = "the messages say it")]

use std::net::SocketAddr;
use std::time::Duration;

/// What a call into libtorch can answer besides a result. An `operation` says in words what was
/// called.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The C++ threw; the message is its own, without backtrace and source position.
    #[error("{operation}: {message}")]
    Torch { operation: &'static str, message: String },
    /// The address is taken, not allowed, or not this machine's.
    #[error("listen on {address}")]
    Listen { address: SocketAddr, source: std::io::Error },
    /// A wait ended before the work did; the work goes on.
    #[error("{operation}: not done after {} s", .after.as_secs_f64())]
    StillRunning { operation: &'static str, after: Duration },
    #[error("the loaded libtorch does not say its version; dflash needs libtorch 2.11.0")]
    NoVersion,
    /// The library, or the driver that it needs, does not load; the loader's message.
    #[error("NCCL cannot be used: {reason}")]
    NoNccl { reason: String },
    /// The compiler for GPUs does not load; the loader's message.
    #[error("NVRTC cannot be used: {reason}")]
    NoNvrtc { reason: String },
    /// It refused our kernels, or the GPU's architecture.
    #[error("compile the kernels for the GPU: {message}")]
    Compile { message: String },
    /// NCCL or the driver refused a call, in its own words.
    #[error("{operation} between GPUs: {message}")]
    Nccl { operation: &'static str, message: String },
    /// NCCL says that a peer has died or that the network has failed.
    #[error("{operation} between GPUs: a peer or the network failed: {message}")]
    NcclPeer { operation: &'static str, message: String },
    /// The group was given up before or while this ran.
    #[error("{operation} between GPUs: {reason}")]
    NcclGivenUp { operation: &'static str, reason: String },
}
