//! Our own kernels: compiled loops for the CPU, each for several levels of its instructions, and
//! kernels for GPUs with their emulation on the CPU.
//!
//! [`kernels`] are the trainer's elementwise loops for the CPU, [`gpu`] those for GPUs, [`decode`] the
//! decoder's passes of a few rows, [`optimizer`] AdamW as libtorch fuses it.
//!
//! A call that libtorch or its compiler for GPUs refuses is an error of `dflash-torch-sys`; this crate
//! has none of its own.
#![allow(unsafe_code, reason = "calls of C++ loops and of the driver of GPUs")]

pub mod decode;
pub mod gpu;
pub mod kernels;
mod level;
pub mod optimizer;

pub use dflash_cpu::CpuLevel;
pub use level::{at_cpu_level, cpu_level, cpu_multiplies_bf16};
