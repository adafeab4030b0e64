//! Building blocks of targets and drafts: weights from checkpoints, tensor operations, devices.
//!
//! Single-device tensor code: nothing here knows a rank, a socket or a command line. Tensors carry
//! a lower-case shape suffix: `t` context tokens, `n` slots (anchors times block size), `a`
//! anchors, `b` slots of a block, `h` hidden, `k` auxiliary layers, `d` head dimension, `v`
//! vocabulary.
//!
//! - [`checkpoint`] reads and writes safetensors files, [`weights`] a directory of them.
//! - [`ops`] has elementwise operations and attention in libtorch operations; [`fused`] and
//!   [`flash`] compute the same with our kernels and with libtorch's flash kernels.
//! - [`rope`] reads rotary embeddings from configurations; [`attention_span`] has spans and masks.

pub mod attention_span;
pub mod checkpoint;
mod contain;
mod error;
pub mod flash;
pub mod fused;
mod loading;
mod logits;
pub mod ops;
mod placement;
pub mod rope;
pub mod weights;

pub use contain::{catch_oom, catch_oom_in, is_oom};
pub use dflash_kernels::kernels::Kernels;
pub use error::{Error, Result};
pub use loading::{Loading, on_loading};
pub use logits::LogitTransform;
pub use placement::{
    DeviceKind, device_name, gpus_for, kind_name, peak_resident_mib, place, resident_mib, upload,
};
pub use weights::Weights;

/// Overhead of a tensor in bytes: libtorch's two objects, our handle, and allocation rounding. At
/// 30 tokens of a small model it is a fifth of a cache.
pub const TENSOR_BYTES: usize = 512;
