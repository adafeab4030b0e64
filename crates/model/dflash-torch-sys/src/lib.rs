//! What tch does not reach in libtorch: the c10d store and gloo process group, the
//! version of the library in use, and the loading of its CUDA half and of NCCL at run time.
//!
//! [`kernels`] are the trainer's elementwise loops for the CPU, [`gpu`] those for GPUs, [`decode`] the
//! decoder's passes of a few rows, [`flash`] the variable-length attention of GPUs, [`optimizer`] AdamW
//! as libtorch fuses it, [`staging`] copies beside the work of GPUs, [`mapped`] numbers in files.
//!
//! All `unsafe` that touches libtorch lives here. The C++ under `cpp/` catches every
//! exception and the functions of this crate return them as [`Error`]; a Rust panic never
//! reaches a C++ frame, since nothing here calls back.
//!
//! The wheel of libtorch ships c10d's headers but not gloo's. `cpp/gloo_declarations`
//! declares the few gloo names that `ProcessGroupGloo.hpp` mentions; all objects of those
//! types are made and used inside libtorch.
#![allow(unsafe_code, reason = "calls into libtorch through a C interface")]

mod cuda;
pub mod decode;
mod error;
mod ffi;
pub mod flash;
pub mod gpu;
mod group;
mod interval;
pub mod kernels;
mod level;
pub mod mapped;
mod nccl;
pub mod optimizer;
mod precision;
mod pretend;
pub mod staging;
mod store;
mod timed;
pub mod trace;
mod version;

pub use cuda::{CudaLibrary, free_device_bytes, load_cuda, opened_cuda, peak_device_bytes};
pub use dflash_cpu::CpuLevel;
pub use error::Error;
pub use group::{Bind, GlooConfig, ProcessGroup, ReduceOp, Work};
pub use interval::{Begun, Interval};
pub use level::{LibraryLevels, at_cpu_level, cpu_level, library_levels};
pub use nccl::{
    ID_BYTES, NcclGroup, NcclWatch, NcclWork, find_nccl, nccl_id, nccl_takes_host_memory,
};
pub use precision::{cpu_multiplies_bf16, multiply_in_bf16, with_products};
pub use store::Store;
pub use version::libtorch_version;
