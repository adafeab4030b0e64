//! CPU kernels, compiled for several instruction-set levels, and GPU kernels with a CPU emulation.
//!
//! [`kernels`] has the trainer's elementwise CPU loops, [`gpu`] their GPU counterparts, [`decode`]
//! the few-row decoding passes, [`optimizer`] libtorch's fused AdamW.
//!
//! Calls that libtorch or NVRTC rejects return an error of `dflash-torch-sys`; this crate has no
//! error type.
#![allow(unsafe_code, reason = "calls of C++ loops and of the driver of GPUs")]

pub mod decode;
pub mod gpu;
pub mod kernels;
mod level;
pub mod optimizer;

pub use dflash_cpu::CpuLevel;
pub use level::{at_cpu_level, cpu_level, cpu_multiplies_bf16};
