//! What targets and drafts are computed with: weights from checkpoints, operations on tensors, devices.
//!
//! Single-device tensor code: nothing here knows a rank, a socket or a command line. Tensors carry
//! a lower-case shape suffix: `t` context tokens, `n` slots (anchors times block size), `a`
//! anchors, `b` slots of a block, `h` hidden, `k` auxiliary layers, `d` head dimension, `v`
//! vocabulary.
//!
//! - [`checkpoint`] reads and writes safetensors, [`weights`] a directory of them.
//! - [`ops`] are the elementwise steps and attention out of libtorch's operations; [`fused`] and
//!   [`flash`] are the same by our kernels and by libtorch's flash kernels.
//! - [`rope`] reads rotary embeddings from configurations, [`attention_span`] says how far back tokens see.

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

/// Memory of a tensor beside its elements: libtorch's two objects, our handle, and what their allocations
/// round up to. With 30 tokens of a small model it is a fifth of a kept cache.
pub const TENSOR_BYTES: usize = 512;
