//! Fused elementwise kernels for float32 CPU tensors, compiled per instruction-set level; see
//! `cpp/kernels.cpp`.
//!
//! Each function is one sweep over memory where libtorch would need several. A wrong shape or
//! layout is the caller's bug and panics.
//!
//! [`Kernels`] selects the implementation. It is a value held by draft, target, objective and
//! optimizer, not a feature or a global, so that one test binary can compare all paths.

use std::ptr::null_mut;

use dflash_torch_sys::trace::is_fake_cuda;
use tch::{Device, Kind, Tensor};

use crate::gpu::{self, Runner};
use crate::level;

/// Weight and epsilon of an RMS norm.
#[derive(Debug, Clone, Copy)]
pub struct RmsWeight<'a> {
    /// `[dim]`.
    pub weight: &'a Tensor,
    /// Added to the mean of the squares.
    pub eps: f64,
}

type In = *const f32;
type Out = *mut f32;

unsafe extern "C" {
    fn dflash_rms_norm(level: i32, x: In, weight: In, y: Out, rows: i64, dim: i64, eps: f32);
    fn dflash_rms_norm_backward(
        level: i32,
        dy: Out,
        x: In,
        weight: In,
        residual: In,
        y: Out,
        dweight: Out,
        rows: i64,
        dim: i64,
        eps: f32,
    );
    fn dflash_head_norm_rope(
        level: i32,
        x: In,
        x_stride: i64,
        weight: In,
        cosine: In,
        sine: In,
        y: Out,
        rows: i64,
        kv_heads: i64,
        group: i64,
        dim: i64,
        eps: f32,
    );
    fn dflash_head_norm_rope_backward(
        level: i32,
        dy: In,
        x: Out,
        x_stride: i64,
        weight: In,
        cosine: In,
        sine: In,
        dweight: Out,
        rows: i64,
        kv_heads: i64,
        group: i64,
        dim: i64,
        eps: f32,
    );
    fn dflash_swiglu(level: i32, gate_up: In, y: Out, rows: i64, dim: i64);
    fn dflash_swiglu_backward(level: i32, dy: Out, gate_up: Out, rows: i64, dim: i64);
    fn dflash_softmax_cross_entropy(
        level: i32,
        logits: Out,
        labels: *const i64,
        ce: Out,
        total: Out,
        correct: Out,
        rows: i64,
        dim: i64,
    );
    fn dflash_cross_entropy_gradient(
        level: i32,
        exponentials: Out,
        labels: *const i64,
        weight: In,
        total: In,
        rows: i64,
        dim: i64,
    );
    fn dflash_merge_attention(
        level: i32,
        out: Out,
        lse: Out,
        part_out: In,
        part_lse: In,
        rows: i64,
        dim: i64,
    );
    fn dflash_adamw(
        level: i32,
        parameter: Out,
        gradient: In,
        mean: Out,
        variance: Out,
        elements: i64,
        step: *const AdamWStep,
    );
}

/// The implementation: kernels of this crate where they support a tensor, or libtorch operations,
/// which run on every device.
///
/// Models, objectives and optimizers use [`Kernels::Fast`]. The others let tests on a CPU run what
/// a GPU runs, with and without its kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kernels {
    /// On a CPU the kernels of this module and libtorch's flash attention, on a GPU those of
    /// [`gpu`], where supported.
    #[default]
    Fast,
    /// libtorch operations only.
    Portable,
    /// The GPU kernels emulated on CPU tensors, thread by thread; slow.
    Emulated,
}

impl Kernels {
    /// Whether this module's kernels are used for tensors like `x`.
    pub fn take(self, x: &Tensor) -> bool {
        self == Self::Fast
            && x.device() == Device::Cpu
            && x.kind() == Kind::Float
            && !x.requires_grad()
    }

    /// The runner of the GPU kernels for tensors like `x`; `None` if they are not used.
    pub fn gpu(self, x: &Tensor) -> Option<Runner> {
        if !matches!(x.kind(), Kind::Float | Kind::BFloat16) || x.requires_grad() {
            return None;
        }
        match (self, x.device()) {
            (Self::Fast, Device::Cuda(index)) if is_fake_cuda() || gpu::usable(index) => {
                Some(Runner::Gpu(index))
            }
            (Self::Emulated, Device::Cpu) => Some(Runner::Emulation),
            _ => None,
        }
    }

    /// Whether queries like `q` use libtorch's CPU flash attention.
    pub fn take_flash(self, q: &Tensor) -> bool {
        self == Self::Fast
            && q.device() == Device::Cpu
            && matches!(q.kind(), Kind::Float | Kind::BFloat16)
    }
}

/// Pointer to a contiguous float32 tensor.
fn data(x: &Tensor) -> *mut f32 {
    assert!(x.is_contiguous(), "a kernel needs contiguous memory, got {:?}", x.stride());
    start(x)
}

/// Pointer to a float32 tensor of any strides.
fn start(x: &Tensor) -> *mut f32 {
    assert!(
        x.device() == Device::Cpu && x.kind() == Kind::Float,
        "a kernel needs float32 on the CPU"
    );
    x.data_ptr().cast()
}

fn labels(x: &Tensor) -> *const i64 {
    assert!(x.is_contiguous() && x.kind() == Kind::Int64 && x.device() == Device::Cpu);
    x.data_ptr().cast::<i64>().cast_const()
}

/// Rows and row stride of a matrix whose rows are contiguous.
fn rows(x: &Tensor) -> (i64, i64) {
    let (size, stride) = (x.size(), x.stride());
    assert!(size.len() == 2 && stride[1] == 1, "a kernel needs rows, got {size:?} {stride:?}");
    (size[0], stride[0])
}

/// (rows, last dimension) of a contiguous tensor.
fn flat_rows(x: &Tensor) -> (i64, i64) {
    let dim = *x.size().last().expect("a row has a length");
    (if dim == 0 { 0 } else { x.numel() as i64 / dim }, dim)
}

/// `x / rms(x) * weight` over the last dimension.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Tensor {
    let y = x.empty_like();
    let (rows, dim) = flat_rows(x);
    assert_eq!(weight.numel() as i64, dim);
    // SAFETY: `x` and `y` have rows * dim, the weight dim contiguous float32 elements.
    unsafe {
        dflash_rms_norm(level::raw(), data(x), data(weight), data(&y), rows, dim, eps as f32)
    };
    y
}

/// Gradient of [`rms_norm`] plus `residual`, written over `dy`. The norm's output is recomputed
/// into `again`; the weight's gradient is added to `dweight`.
pub fn rms_norm_backward(
    dy: &mut Tensor,
    x: &Tensor,
    RmsWeight { weight, eps }: RmsWeight<'_>,
    residual: Option<&Tensor>,
    again: Option<&Tensor>,
    dweight: &Tensor,
) {
    let (rows, dim) = flat_rows(x);
    assert!([Some(&*dy), residual, again].into_iter().flatten().all(|t| t.size() == x.size()));
    assert!(weight.numel() as i64 == dim && dweight.numel() as i64 == dim);
    let (residual, again) = (residual.map_or(null_mut(), data), again.map_or(null_mut(), data));
    let (dy, x, weight, dweight) = (data(dy), data(x), data(weight), data(dweight));
    // SAFETY: shapes are checked above, type and contiguity by `data`. A row of `dy` is fully read
    // before its gradient is written.
    unsafe {
        let eps = eps as f32;
        dflash_rms_norm_backward(
            level::raw(),
            dy,
            x,
            weight,
            residual,
            again,
            dweight,
            rows,
            dim,
            eps,
        );
    }
}

/// Head norm, rotation and regrouping by key/value head: `x` [N, heads * D] (rows may be part of
/// wider rows), tables [N, D/2]; result [N, heads / kv heads, kv heads, D].
pub fn head_norm_rope(
    x: &Tensor,
    RmsWeight { weight, eps }: RmsWeight<'_>,
    cosine: &Tensor,
    sine: &Tensor,
    kv_heads: i64,
) -> Tensor {
    let (n, stride) = rows(x);
    let dim = weight.numel() as i64;
    let group = x.size()[1] / dim / kv_heads;
    assert!(
        x.size()[1] == kv_heads * group * dim
            && cosine.size() == [n, dim / 2]
            && sine.size() == [n, dim / 2]
    );
    let y = Tensor::empty([n, group, kv_heads, dim], (Kind::Float, Device::Cpu));
    // SAFETY: the shapes are checked above; rows of `x` lie `stride` elements apart.
    unsafe {
        dflash_head_norm_rope(
            level::raw(),
            start(x),
            stride,
            data(weight),
            data(cosine),
            data(sine),
            data(&y),
            n,
            kv_heads,
            group,
            dim,
            eps as f32,
        );
    }
    y
}

/// Gradient of [`head_norm_rope`] for `dy` [N, group, kv heads, D], written over `x`; the weight's
/// gradient is added to `dweight`.
pub fn head_norm_rope_backward(
    dy: &Tensor,
    x: &mut Tensor,
    RmsWeight { weight, eps }: RmsWeight<'_>,
    cosine: &Tensor,
    sine: &Tensor,
    dweight: &Tensor,
) {
    let (n, x_stride) = rows(x);
    let size = dy.size();
    let (group, kv_heads, dim) = (size[1], size[2], size[3]);
    assert!(size[0] == n && x.size()[1] == kv_heads * group * dim);
    assert!(weight.numel() as i64 == dim && dweight.numel() as i64 == dim);
    assert!(cosine.size() == [n, dim / 2] && sine.size() == [n, dim / 2]);
    // SAFETY: shapes are checked above; rows of `x` are `stride` elements apart. A head of `x` is
    // fully read before its gradient is written.
    unsafe {
        dflash_head_norm_rope_backward(
            level::raw(),
            data(dy),
            start(x),
            x_stride,
            data(weight),
            data(cosine),
            data(sine),
            data(dweight),
            n,
            kv_heads,
            group,
            dim,
            eps as f32,
        );
    }
}

/// `silu(gate) * up` of [N, 2I]; result [N, I].
pub fn swiglu(gate_up: &Tensor) -> Tensor {
    let (rows, width) = flat_rows(gate_up);
    let y = Tensor::empty([rows, width / 2], (Kind::Float, Device::Cpu));
    // SAFETY: `gate_up` has rows * width contiguous elements, `y` half of them.
    unsafe { dflash_swiglu(level::raw(), data(gate_up), data(&y), rows, width / 2) };
    y
}

/// Gradient and recomputed value of [`swiglu`], in place: `gate_up` [N, 2I] becomes its gradient,
/// `dy` [N, I] the value.
pub fn swiglu_backward(dy: &mut Tensor, gate_up: &mut Tensor) {
    let (rows, width) = flat_rows(gate_up);
    assert_eq!(dy.size(), [rows, width / 2]);
    // SAFETY: shapes are checked above, type and contiguity by `data`. Each element is read before
    // it is overwritten.
    unsafe { dflash_swiglu_backward(level::raw(), data(dy), data(gate_up), rows, width / 2) };
}

/// Cross-entropy of rows of logits.
#[derive(Debug)]
pub struct CrossEntropy {
    /// `-log softmax(logits)[label]`, `[m]`.
    pub ce_m: Tensor,
    /// 1 where the argmax is the label, `[m]`.
    pub correct_m: Tensor,
    total_m: Tensor,
}

/// Cross-entropy of `logits` [m, V] for `tokens` `[m]`; overwrites `logits` with exponentials.
pub fn softmax_cross_entropy(logits: &mut Tensor, tokens: &Tensor) -> CrossEntropy {
    let (m, vocab) = flat_rows(logits);
    assert_eq!(tokens.numel() as i64, m);
    let empty = || Tensor::empty([m], (Kind::Float, Device::Cpu));
    let result = CrossEntropy { ce_m: empty(), correct_m: empty(), total_m: empty() };
    let (first, last) = (|| tokens.min().int64_value(&[]), || tokens.max().int64_value(&[]));
    assert!(m == 0 || first() >= 0 && last() < vocab, "a label outside the vocabulary");
    // SAFETY: shapes and labels are checked above.
    unsafe {
        dflash_softmax_cross_entropy(
            level::raw(),
            data(logits),
            labels(tokens),
            data(&result.ce_m),
            data(&result.total_m),
            data(&result.correct_m),
            m,
            vocab,
        );
    }
    result
}

impl CrossEntropy {
    /// Overwrites the exponentials with the gradient of `sum weight * ce`.
    pub fn gradient(&self, exponentials: &mut Tensor, tokens: &Tensor, weight_m: &Tensor) {
        let (m, vocab) = flat_rows(exponentials);
        assert!(
            weight_m.numel() as i64 == m
                && self.total_m.numel() as i64 == m
                && tokens.numel() as i64 == m
        );
        // SAFETY: the shapes are checked above, the labels by `softmax_cross_entropy`.
        unsafe {
            dflash_cross_entropy_gradient(
                level::raw(),
                data(exponentials),
                labels(tokens),
                data(weight_m),
                data(&self.total_m),
                m,
                vocab,
            );
        }
    }
}

/// Merges a partial attention into the merged one, in place: `out` and `part_out` [.., D], `lse`
/// and `part_lse` without the last dimension, all contiguous.
pub fn merge_attention(out: &Tensor, lse: &Tensor, part_out: &Tensor, part_lse: &Tensor) {
    let (n, dim) = flat_rows(out);
    assert!(out.size() == part_out.size());
    assert!(lse.numel() as i64 == n && part_lse.numel() as i64 == n);
    // SAFETY: the shapes are checked above, and `data` checks type and contiguity.
    unsafe {
        dflash_merge_attention(
            level::raw(),
            data(out),
            data(lse),
            data(part_out),
            data(part_lse),
            n,
            dim,
        );
    }
}

/// Constants of one AdamW step; the kernel rounds them to float32.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AdamWStep {
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// Added to the divisor.
    pub epsilon: f64,
    /// rate / (1 - beta1^t).
    pub step_size: f64,
    /// sqrt(1 - beta2^t).
    pub root_correction2: f64,
}

/// One AdamW step over contiguous buffers of one length, in place.
pub fn adamw(
    parameter: &Tensor,
    gradient: &Tensor,
    mean: &Tensor,
    variance: &Tensor,
    step: AdamWStep,
) {
    let elements = parameter.numel();
    assert!([gradient, mean, variance].iter().all(|x| x.numel() == elements));
    // SAFETY: all four hold `elements` contiguous float32 elements.
    unsafe {
        dflash_adamw(
            level::raw(),
            data(parameter),
            data(gradient),
            data(mean),
            data(variance),
            elements as i64,
            &step,
        );
    }
}
