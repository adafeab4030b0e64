//! The file formats of drafts and targets, each read and written only here.
//!
//! Nothing here needs libtorch: files are described by their tensors' types, shapes and byte
//! offsets, and `dflash-tensor` turns those into tensors.
//!
//! - [`safetensors`] reads the header of a safetensors file.
//! - [`gguf`] reads and writes GGUF files.
//! - [`draft`] is a draft's configuration in z-lab's and in speculators' layout.
//! - [`fields`] is typed access to any `config.json`.

pub mod draft;
mod error;
pub mod fields;
pub mod gguf;
mod rope;
pub mod safetensors;

pub use error::{Error, Result};
pub use rope::{RopeScaling, Wanted};
