//! The file formats that drafts and targets come in, each read and written in this one place.
//!
//! Nothing here needs libtorch: a file says which tensors it has, of what type and shape and where
//! their bytes lie, and `dflash-tensor` makes tensors of them.
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
