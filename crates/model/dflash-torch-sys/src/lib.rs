//! libtorch features that tch does not expose: the c10d store, the gloo process group, the library
//! version, and loading CUDA and NCCL at run time.
//!
//! [`flash`] is variable-length attention on GPUs, [`staging`] overlaps copies with GPU work,
//! [`mapped`] reads tensors from mapped files, [`trace`] is the fake GPU that records its work.
//!
//! All `unsafe` code that touches libtorch is here and in `dflash-kernels`. The C++ under `cpp/`
//! catches every exception, and this crate returns it as [`Error`]. A Rust panic never reaches a
//! C++ frame, since nothing here calls back.
//!
//! libtorch's wheel ships c10d's headers but not gloo's. `cpp/gloo_declarations` declares the few
//! gloo names that `ProcessGroupGloo.hpp` mentions; objects of those types are only created and
//! used inside libtorch.
#![allow(unsafe_code, reason = "calls into libtorch through a C interface")]

mod cuda;
mod error;
mod fake_cuda;
pub mod ffi;
pub mod flash;
mod group;
mod interval;
mod level;
pub mod mapped;
mod nccl;
mod precision;
pub mod staging;
mod store;
mod timed;
pub mod trace;
mod version;

pub use cuda::{
    CudaLibrary, current_stream, free_device_bytes, function, libtorch_dir, load_cuda,
    open_library, opened_cuda, peak_device_bytes,
};
pub use error::Error;
pub use group::{Bind, GlooConfig, ProcessGroup, ReduceOp, Work};
pub use interval::{Begun, Interval};
pub use level::{LibraryLevels, library_levels};
pub use nccl::{
    ID_BYTES, NcclGroup, NcclWatch, NcclWork, find_nccl, nccl_id, nccl_takes_host_memory,
};
pub use precision::{multiply_in_bf16, with_products};
pub use store::Store;
pub use version::libtorch_version;
