//! libtorch's C++ exceptions as Rust errors.
#![allow(missing_docs, reason = "the messages say it")]

use std::net::SocketAddr;
use std::time::Duration;

/// Errors of calls to libtorch, NCCL and NVRTC. `operation` describes the call.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A C++ exception; its message without backtrace and source position.
    #[error("{operation}: {message}")]
    Torch { operation: &'static str, message: String },
    /// The address is in use, not permitted, or not local.
    #[error("listen on {address}")]
    Listen { address: SocketAddr, source: std::io::Error },
    /// A wait timed out; the work continues.
    #[error("{operation}: not done after {} s", .after.as_secs_f64())]
    StillRunning { operation: &'static str, after: Duration },
    #[error("the loaded libtorch does not say its version; dflash needs libtorch 2.11.0")]
    NoVersion,
    /// NCCL or the driver does not load; the loader's message.
    #[error("NCCL cannot be used: {reason}")]
    NoNccl { reason: String },
    /// NVRTC does not load; the loader's message.
    #[error("NVRTC cannot be used: {reason}")]
    NoNvrtc { reason: String },
    /// NVRTC rejected our kernels or the GPU's architecture.
    #[error("compile the kernels for the GPU: {message}")]
    Compile { message: String },
    /// NCCL or the driver rejected a call; its message.
    #[error("{operation} between GPUs: {message}")]
    Nccl { operation: &'static str, message: String },
    /// NCCL reports that a peer died or the network failed.
    #[error("{operation} between GPUs: a peer or the network failed: {message}")]
    NcclPeer { operation: &'static str, message: String },
    /// The group was abandoned before or during the call.
    #[error("{operation} between GPUs: {reason}")]
    NcclGivenUp { operation: &'static str, reason: String },
}
