//! Target families, the DFlash draft model and its objective.
//!
//! Single-device tensor code: nothing here knows a rank, a socket or a command line. Tensors carry
//! a lower-case shape suffix: `t` context tokens, `n` slots (anchors times block size), `a`
//! anchors, `b` slots of a block, `h` hidden, `k` captured layers, `d` head dimension, `v`
//! vocabulary.
//!
//! - [`target`] runs the verifier: hidden states of chosen layers, logits, key/value cache.
//! - [`draft`] is the drafter: configuration, weights, training and decoding passes.
//! - [`attention`] lets blocks see their context and themselves without a mask over both.
//! - [`objective`] turns hidden states into loss and gradient without a full logits tensor.
//! - [`flops`] counts the arithmetic of a row.
//! - [`ops`] holds what they share.

// Cases that unit tests share with integration tests name this crate.
#[cfg(test)]
extern crate self as dflash_model;

pub mod attention;
pub mod checkpoint;
pub mod draft;
pub mod flops;
pub mod objective;
pub mod ops;
mod placement;
mod rope;
pub mod target;

mod contain;
mod error;
mod flash;
mod fused;

pub use contain::{is_want_of_memory, want_of_memory, want_of_memory_in};
pub use dflash_formats::RopeScaling;
pub use dflash_torch_sys::kernels::Kernels;
pub use error::{Error, Result};
pub use placement::{
    device_name, gpus_for, kind_name, peak_resident_mib, place, resident_mib, upload,
};

/// Memory of a tensor beside its elements: libtorch's two objects, our handle, and what their allocations
/// round up to. With 30 tokens of a small model it is a fifth of a kept cache.
pub(crate) const TENSOR_BYTES: usize = 512;
