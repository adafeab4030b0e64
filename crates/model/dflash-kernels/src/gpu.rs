//! The training pass's elementwise GPU kernels and their CPU emulation; see `cuda/kernels.cu`,
//! whose structs are mirrored here field by field.
//!
//! Tensors are float32 or bfloat16 with float32 arithmetic; weight gradients and partial attention
//! sums are float32. A wrong shape or layout is the caller's bug and panics. Each function is one
//! launch, or two if it returns a weight gradient. libtorch's fused RMS norm is not used: its
//! backward pass needs three more passes, for the residual, the recomputed value and the weight's
//! float32 sum. Row sums use one partial sum per block, and attention gradients are added by lists
//! that the host builds with the plan, so without atomics and in a fixed order.
//!
//! NVRTC, which comes with libtorch's CUDA wheels, compiles the source on first use; the result is
//! cached in the user's cache directory under a digest of its inputs. CUDA is neither linked nor
//! needed to build. Without NVRTC, libtorch operations are used, with one warning. Tests run the
//! same source compiled for the CPU, where each thread of a block is a fiber that runs to the next
//! barrier. Launch and emulation take the kernel's name, size and arguments from one place, so
//! tests run what a GPU gets.

mod attention;
mod heads;
mod image;
mod launch;
mod nvrtc;
mod product;

use crate::kernels::RmsWeight;
use std::ffi::c_void;
use std::ptr::null_mut;

use tch::{Kind, Tensor};

pub use attention::{
    CallResult, Gather, Gathered, MOST_PARTS, PartGradient, Places, Sums, merge, sum,
};
pub use heads::{HeadGradients, HeadNorms, HeadTurn, KeyRoom, heads, heads_backward, heads_to};
pub use launch::Runner;
use launch::{Kernel, Launch, Moves};
pub use product::add_product;

pub(crate) use image::usable;

/// Blocks that share the rows of a gradient, each with a partial weight sum: four per
/// multiprocessor of an H100.
const SHARING_BLOCKS: i64 = 528;

/// Floats of shared memory used by block sums: `kScratch` in the source.
const SCRATCH: i64 = 96;

const RMS_NORM: Kernel = Kernel { name: "rms_norm", threads: 256 };
const RMS_NORM_BACKWARD: Kernel = Kernel { name: "rms_norm_backward", threads: 256 };
const COLUMN_SUMS: Kernel = Kernel { name: "column_sums", threads: 256 };
const SWIGLU: Kernel = Kernel { name: "swiglu", threads: 256 };
const SWIGLU_BACKWARD: Kernel = Kernel { name: "swiglu_backward", threads: 256 };
const CROSS_ENTROPY: Kernel = Kernel { name: "cross_entropy", threads: 512 };
const CROSS_ENTROPY_GRADIENT: Kernel = Kernel { name: "cross_entropy_gradient", threads: 512 };

/// Pointer to a tensor's first element.
type Data = *mut c_void;

fn data(x: &Tensor) -> Data {
    x.data_ptr()
}

/// Pointer to a tensor's first element, or null.
fn optional(x: Option<&Tensor>) -> Data {
    x.map_or(null_mut(), data)
}

fn check_float(tensors: &[&Tensor]) {
    for x in tensors {
        assert!(x.kind() == Kind::Float && x.is_contiguous(), "a kernel needs contiguous float32");
    }
}

/// Checks that all are contiguous and of the first one's type.
fn check_alike(tensors: &[&Tensor]) {
    for x in tensors {
        assert!(x.is_contiguous(), "a kernel needs contiguous memory, got {:?}", x.stride());
        assert_eq!(x.kind(), tensors[0].kind(), "a kernel needs tensors of one kind");
    }
}

/// (rows, last dimension) of a contiguous tensor.
fn flat_rows(x: &Tensor) -> (i64, i64) {
    let dim = *x.size().last().expect("a row has a length");
    (if dim == 0 { 0 } else { x.numel() as i64 / dim }, dim)
}

/// Rows and row stride of a matrix whose rows are contiguous.
fn strided_rows(x: &Tensor) -> (i64, i64) {
    let (size, stride) = (x.size(), x.stride());
    assert!(size.len() == 2 && stride[1] == 1, "a kernel needs rows, got {size:?} {stride:?}");
    (size[0], stride[0])
}

fn empty(shape: &[i64], kind: Kind, like: &Tensor) -> Tensor {
    Tensor::empty(shape, (kind, like.device()))
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RmsNorm {
    x: Data,
    weight: Data,
    y: Data,
    dim: i64,
    eps: f32,
}

/// `x / rms(x) * weight` over the last dimension.
pub fn rms_norm(runner: Runner, x: &Tensor, weight: &Tensor, eps: f64) -> Tensor {
    let x = &x.contiguous();
    let y = empty(&x.size(), x.kind(), x);
    let (rows, dim) = flat_rows(x);
    assert_eq!(weight.numel() as i64, dim);
    check_alike(&[x, weight]);
    let instance = Moves::Sixteen.instance(runner, x.kind(), &[x, weight, &y], &[dim]);
    let (reads, writes) = (&[x, weight], &[&y]);
    Launch { kernel: RMS_NORM, instance, blocks: rows, shared: SCRATCH, reads, writes }.run(
        runner,
        || RmsNorm { x: data(x), weight: data(weight), y: data(&y), dim, eps: eps as f32 },
    );
    y
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RmsNormBackward {
    dy: Data,
    x: Data,
    weight: Data,
    residual: Data,
    again: Data,
    partial: Data,
    rows: i64,
    dim: i64,
    eps: f32,
}

/// Gradient of [`rms_norm`] plus `residual`, written over `dy`. The norm's output is recomputed
/// into `again`; the weight's gradient is added to `dweight`, in float32.
///
/// libtorch's `_fused_rms_norm_backward` would need three more passes: the residual sum, the
/// recomputation, and the weight's gradient, which it rounds to the weight's type before the
/// float32 sum.
pub fn rms_norm_backward(
    runner: Runner,
    dy: &mut Tensor,
    x: &Tensor,
    RmsWeight { weight, eps }: RmsWeight<'_>,
    residual: Option<&Tensor>,
    again: Option<&Tensor>,
    dweight: &Tensor,
) {
    let (rows, dim) = flat_rows(x);
    let alike: Vec<&Tensor> =
        [Some(&*dy), Some(x), residual, again].into_iter().flatten().collect();
    assert!(alike.iter().all(|t| t.size() == x.size()) && weight.numel() as i64 == dim);
    check_alike(&alike);
    check_alike(&[x, weight]);
    let blocks = rows.min(SHARING_BLOCKS);
    let partial = empty(&[blocks, dim], Kind::Float, x);
    let all: Vec<&Tensor> = alike.iter().copied().chain([weight]).collect();
    let reads: Vec<&Tensor> =
        [Some(&*dy), Some(x), Some(weight), residual].into_iter().flatten().collect();
    let writes: Vec<&Tensor> = [Some(&*dy), again, Some(&partial)].into_iter().flatten().collect();
    Launch {
        kernel: RMS_NORM_BACKWARD,
        instance: Moves::Sixteen.instance(runner, x.kind(), &all, &[dim]),
        blocks,
        shared: SCRATCH + dim,
        reads: &reads,
        writes: &writes,
    }
    .run(runner, || RmsNormBackward {
        dy: data(dy),
        x: data(x),
        weight: data(weight),
        residual: optional(residual),
        again: optional(again),
        partial: data(&partial),
        rows,
        dim,
        eps: eps as f32,
    });
    column_sums(runner, &partial, dweight, None);
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ColumnSums {
    partial: Data,
    first: Data,
    second: Data,
    blocks: i64,
    dim: i64,
    first_dim: i64,
}

/// Adds the column sums of `partial` [blocks, dim] to `first` and, for the remaining columns,
/// `second`.
fn column_sums(runner: Runner, partial: &Tensor, first: &Tensor, second: Option<&Tensor>) {
    let (blocks, dim) = flat_rows(partial);
    let totals: Vec<&Tensor> = [Some(first), second].into_iter().flatten().collect();
    check_float(&totals);
    assert_eq!(totals.iter().map(|total| total.numel() as i64).sum::<i64>(), dim);
    let reads: Vec<&Tensor> = totals.iter().copied().chain([partial]).collect();
    Launch {
        kernel: COLUMN_SUMS,
        instance: "",
        blocks: dim.unsigned_abs().div_ceil(32) as i64,
        shared: i64::from(COLUMN_SUMS.threads),
        reads: &reads,
        writes: &totals,
    }
    .run(runner, || ColumnSums {
        partial: data(partial),
        first: data(first),
        second: optional(second),
        blocks,
        dim,
        first_dim: first.numel() as i64,
    });
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Swiglu {
    gate_up: Data,
    y: Data,
    dim: i64,
}

/// `silu(gate) * up` of [N, 2I]; result [N, I].
pub fn swiglu(runner: Runner, gate_up: &Tensor) -> Tensor {
    check_alike(&[gate_up]);
    let (rows, width) = flat_rows(gate_up);
    let dim = width / 2;
    let mut size = gate_up.size();
    *size.last_mut().expect("a row has a length") = dim;
    let y = empty(&size, gate_up.kind(), gate_up);
    let instance = Moves::Sixteen.instance(runner, y.kind(), &[gate_up, &y], &[dim]);
    let (reads, writes) = (&[gate_up], &[&y]);
    Launch { kernel: SWIGLU, instance, blocks: rows, shared: 0, reads, writes }
        .run(runner, || Swiglu { gate_up: data(gate_up), y: data(&y), dim });
    y
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SwigluBackward {
    dy: Data,
    gate_up: Data,
    dim: i64,
}

/// Gradient and recomputed value of [`swiglu`], in place: `gate_up` [N, 2I] becomes its gradient,
/// `dy` [N, I] the value.
pub fn swiglu_backward(runner: Runner, dy: &mut Tensor, gate_up: &mut Tensor) {
    check_alike(&[gate_up, dy]);
    let (rows, width) = flat_rows(gate_up);
    let dim = width / 2;
    assert_eq!(dy.size(), [rows, dim]);
    let both: [&Tensor; 2] = [dy, gate_up];
    let instance = Moves::Sixteen.instance(runner, dy.kind(), &both, &[dim]);
    let (kernel, blocks) = (SWIGLU_BACKWARD, rows);
    Launch { kernel, instance, blocks, shared: 0, reads: &both, writes: &both }
        .run(runner, || SwigluBackward { dy: data(both[0]), gate_up: data(both[1]), dim });
}

#[repr(C)]
#[derive(Clone, Copy)]
struct CrossEntropyArguments {
    logits: Data,
    labels: Data,
    ce: Data,
    correct: Data,
    lse: Data,
    dim: i64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct CrossEntropyGradient {
    logits: Data,
    labels: Data,
    weight: Data,
    lse: Data,
    dim: i64,
}

/// Cross-entropy of rows of logits.
#[derive(Debug)]
pub struct CrossEntropy {
    runner: Runner,
    /// `-log softmax(logits)[label]`, `[m]` float32; NaN for a label outside the vocabulary.
    pub ce_m: Tensor,
    /// 1 where the argmax is the label, `[m]` float32.
    pub correct_m: Tensor,
    lse_m: Tensor,
}

/// Cross-entropy of `logits` [m, V] for `labels` `[m]` int64. Reads the logits once.
pub fn cross_entropy(runner: Runner, logits: &Tensor, labels: &Tensor) -> CrossEntropy {
    check_alike(&[logits]);
    let (m, dim) = flat_rows(logits);
    check_labels(labels, m);
    let row = || empty(&[m], Kind::Float, logits);
    let result = CrossEntropy { runner, ce_m: row(), correct_m: row(), lse_m: row() };
    Launch {
        kernel: CROSS_ENTROPY,
        instance: Moves::Sixteen.instance(runner, logits.kind(), &[logits], &[dim]),
        blocks: m,
        shared: SCRATCH,
        reads: &[logits, labels],
        writes: &[&result.ce_m, &result.correct_m, &result.lse_m],
    }
    .run(runner, || CrossEntropyArguments {
        logits: data(logits),
        labels: data(labels),
        ce: data(&result.ce_m),
        correct: data(&result.correct_m),
        lse: data(&result.lse_m),
        dim,
    });
    result
}

fn check_labels(labels: &Tensor, m: i64) {
    assert!(labels.numel() as i64 == m && labels.kind() == Kind::Int64 && labels.is_contiguous());
}

impl CrossEntropy {
    /// Overwrites the logits with the gradient of `sum weight * ce`: one read, one write.
    pub fn gradient(&self, logits: &mut Tensor, labels: &Tensor, weight_m: &Tensor) {
        check_alike(&[logits]);
        let (m, dim) = flat_rows(logits);
        check_labels(labels, m);
        check_float(&[weight_m]);
        assert!(weight_m.numel() as i64 == m && self.lse_m.numel() as i64 == m);
        let logits: &Tensor = logits;
        Launch {
            kernel: CROSS_ENTROPY_GRADIENT,
            instance: Moves::Sixteen.instance(self.runner, logits.kind(), &[logits], &[dim]),
            blocks: m,
            shared: 0,
            reads: &[logits, labels, weight_m, &self.lse_m],
            writes: &[logits],
        }
        .run(self.runner, || CrossEntropyGradient {
            logits: data(logits),
            labels: data(labels),
            weight: data(weight_m),
            lse: data(&self.lse_m),
            dim,
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::attention::{GATHER, GatherArguments, MERGE, MergeArguments, SUM, SumArguments};
    use super::heads::{HEADS, HEADS_BACKWARD, Heads, HeadsBackward};
    use super::*;

    /// Launchable kernel instances are those in the source, with equal struct sizes.
    #[test]
    fn names_and_structs_are_those_of_the_source() {
        let several = ["_bf16x8", "_bf16x1", "_f32x4", "_f32x1"];
        let pairs = ["_bf16x2", "_bf16x1", "_f32x2", "_f32x1"];
        let table: [(Kernel, &[&str], usize); 12] = [
            (RMS_NORM, &several, size_of::<RmsNorm>()),
            (RMS_NORM_BACKWARD, &several, size_of::<RmsNormBackward>()),
            (COLUMN_SUMS, &[""], size_of::<ColumnSums>()),
            (HEADS, &pairs, size_of::<Heads>()),
            (HEADS_BACKWARD, &pairs, size_of::<HeadsBackward>()),
            (SWIGLU, &several, size_of::<Swiglu>()),
            (SWIGLU_BACKWARD, &several, size_of::<SwigluBackward>()),
            (CROSS_ENTROPY, &several, size_of::<CrossEntropyArguments>()),
            (CROSS_ENTROPY_GRADIENT, &several, size_of::<CrossEntropyGradient>()),
            (GATHER, &["_16", "_4", "_2"], size_of::<GatherArguments>()),
            (MERGE, &several, size_of::<MergeArguments>()),
            (SUM, &several, size_of::<SumArguments>()),
        ];
        let mut here = BTreeMap::new();
        for (kernel, instances, bytes) in table {
            assert!(kernel.threads <= 512 && kernel.threads % 32 == 0, "{}", kernel.name);
            here.extend(instances.iter().map(|it| (kernel.name.to_owned() + it, bytes)));
        }
        assert_eq!(here, launch::kernels().into_iter().collect());
    }

    #[test]
    fn without_a_driver_there_are_no_kernels() {
        let driver = dflash_torch_sys::open_library(c"libcuda.so.1", libc::RTLD_NOW);
        assert!(driver.is_ok() || !usable(0));
    }
}
