//! Variable-length flash attention on a GPU: many sequences of any lengths in one call.
//!
//! Supports float16 and bfloat16, head sizes that are multiples of 8 up to 256, and GPUs of compute
//! capability 8.0 or higher. Consecutive query heads share a key/value head.

use std::collections::BTreeMap;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::CudaContext;
use tch::{Kind, Tensor};

use crate::ffi::{self, Failure, RawTensor};
use crate::{Error, trace};

/// Largest supported head size.
const MOST_HEAD_DIM: i64 = 256;

/// Which keys of its sequence a query sees, as distances between positions. The last query and the
/// last key of a sequence have the same position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Keys before the query's position; `None` for no limit.
    pub left: Option<i64>,
    /// Keys after the query's position; `None` for no limit.
    pub right: Option<i64>,
}

impl Window {
    /// Every key of the sequence.
    pub const ALL: Self = Self { left: None, right: None };

    /// The range of keys, of `keys`, that query `query` of `queries` sees.
    pub fn seen(self, query: i64, queries: i64, keys: i64) -> (i64, i64) {
        let position = query + keys - queries;
        let first = self.left.map_or(0, |left| (position - left).clamp(0, keys));
        let end = self.right.map_or(keys, |right| (position + right + 1).clamp(0, keys));
        (first, end.max(first))
    }
}

/// Sequence lengths of a call: sequence i has queries `cu_q[i]..cu_q[i + 1]` and keys
/// `cu_k[i]..cu_k[i + 1]`.
#[derive(Debug)]
pub struct Sequences {
    /// Cumulative query counts, [sequences + 1], int32, contiguous, on the queries' device.
    pub cu_q: Tensor,
    /// Cumulative key counts, in the same form.
    pub cu_k: Tensor,
    /// Longest query count.
    pub max_q: i64,
    /// Longest key count.
    pub max_k: i64,
    /// What each query sees.
    pub window: Window,
}

/// Layout as in cpp/flash.cpp.
#[repr(C)]
struct Call {
    max_q: i64,
    max_k: i64,
    scale: f64,
    window_left: i64,
    window_right: i64,
}

impl Call {
    fn new(sequences: &Sequences, scale: f64) -> Self {
        let Sequences { max_q, max_k, window: Window { left, right }, .. } = *sequences;
        let (window_left, window_right) = (left.unwrap_or(-1), right.unwrap_or(-1));
        Self { max_q, max_k, scale, window_left, window_right }
    }
}

type In = *const RawTensor;
type Out = *mut *mut RawTensor;

unsafe extern "C" {
    fn dflash_flash_forward(
        q: In,
        k: In,
        v: In,
        cu_q: In,
        cu_k: In,
        call: *const Call,
        out: Out,
        lse: Out,
    ) -> Failure;
    fn dflash_flash_backward(
        dout: In,
        q: In,
        k: In,
        v: In,
        out: In,
        lse: In,
        cu_q: In,
        cu_k: In,
        call: *const Call,
        dq: Out,
        dk: Out,
        dv: Out,
    ) -> Failure;
}

/// Whether the GPU `index` has kernels for this type and head size.
///
/// # Errors
/// The driver does not report the GPU's compute capability.
pub fn takes_flash(index: usize, kind: Kind, head_dim: i64) -> Result<bool, Error> {
    let operation = "read the GPU's compute capability";
    let refused =
        |error: &dyn std::fmt::Display| Error::Torch { operation, message: error.to_string() };
    let fits = matches!(kind, Kind::Half | Kind::BFloat16)
        && head_dim % 8 == 0
        && head_dim <= MOST_HEAD_DIM;
    if !fits || trace::is_fake_cuda() {
        return Ok(fits);
    }
    // Cached, since every layer of a pass asks.
    static HAS_KERNELS: Mutex<BTreeMap<usize, bool>> = Mutex::new(BTreeMap::new());
    let mut known = HAS_KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&has_kernels) = known.get(&index) {
        return Ok(has_kernels);
    }
    let context = CudaContext::new(index).map_err(|error| refused(&error))?;
    let (major, _) = context.compute_capability().map_err(|error| refused(&error))?;
    known.insert(index, major >= 8);
    Ok(major >= 8)
}

/// Attention of `q` [queries, heads, D] over `k` and `v` [keys, kv heads, D] with scores times
/// `scale`: the output [queries, heads, D] and its log-sum-exp [heads, queries] in float32.
///
/// A query without any visible key gets zeros and an infinite log-sum-exp.
///
/// # Errors
/// libtorch's error: tensors not on a GPU or not supported by the kernels, out of memory.
pub fn flash_forward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sequences: &Sequences,
    scale: f64,
) -> Result<(Tensor, Tensor), Error> {
    let call = Call::new(sequences, scale);
    let (mut out, mut lse) = (null_mut(), null_mut());
    // SAFETY: live tensors; the out pointers are locals.
    ffi::checked("flash attention", unsafe {
        dflash_flash_forward(
            raw(q),
            raw(k),
            raw(v),
            raw(&sequences.cu_q),
            raw(&sequences.cu_k),
            &call,
            &mut out,
            &mut lse,
        )
    })?;
    Ok((owned(out), owned(lse)))
}

/// Gradients of queries, keys and values for `dout`, in the type and shape of the inputs. `out` and
/// `lse` belong to the merged attention that this call is a part of.
///
/// # Errors
/// As [`flash_forward`].
pub fn flash_backward(
    dout: &Tensor,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    out: &Tensor,
    lse: &Tensor,
    sequences: &Sequences,
    scale: f64,
) -> Result<(Tensor, Tensor, Tensor), Error> {
    let call = Call::new(sequences, scale);
    let (mut dq, mut dk, mut dv) = (null_mut(), null_mut(), null_mut());
    // SAFETY: live tensors; the out pointers are locals.
    ffi::checked("gradient of flash attention", unsafe {
        dflash_flash_backward(
            raw(dout),
            raw(q),
            raw(k),
            raw(v),
            raw(out),
            raw(lse),
            raw(&sequences.cu_q),
            raw(&sequences.cu_k),
            &call,
            &mut dq,
            &mut dk,
            &mut dv,
        )
    })?;
    Ok((owned(dq), owned(dk), owned(dv)))
}

/// tch's handle points to an `at::Tensor`, as the shim expects.
fn raw(tensor: &Tensor) -> In {
    tensor.as_ptr().cast()
}

/// Takes ownership of a handle created by the shim.
fn owned(handle: *mut RawTensor) -> Tensor {
    // SAFETY: a new `at::Tensor`, as tch creates them, handed over once.
    unsafe { Tensor::from_ptr(handle.cast()) }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    /// Both operators reach libtorch's dispatcher, which finds no CPU kernel.
    #[test]
    fn without_a_gpu_both_passes_are_refused_by_name() {
        let half = |shape: &[i64]| Tensor::zeros(shape, (Kind::BFloat16, Device::Cpu));
        let (q, k) = (half(&[4, 4, 8]), half(&[6, 2, 8]));
        let lse = Tensor::zeros([4, 4], (Kind::Float, Device::Cpu));
        let sequences = Sequences {
            cu_q: Tensor::from_slice(&[0i32, 4]),
            cu_k: Tensor::from_slice(&[0i32, 6]),
            max_q: 4,
            max_k: 6,
            window: Window::ALL,
        };
        let forward = flash_forward(&q, &k, &k, &sequences, 1.0).unwrap_err().to_string();
        let backward =
            flash_backward(&q, &q, &k, &k, &q, &lse, &sequences, 1.0).unwrap_err().to_string();
        for (message, operator) in [
            (forward, "flash attention: Could not run 'aten::_flash_attention_forward'"),
            (
                backward,
                "gradient of flash attention: Could not run 'aten::_flash_attention_backward'",
            ),
        ] {
            assert!(message.starts_with(operator), "{message}");
            assert!(message.contains("'CPU' backend"), "{message}");
        }
    }

    #[test]
    fn kinds_and_widths_that_the_kernels_lack_need_no_gpu_to_be_refused() {
        for (kind, head_dim) in [(Kind::Float, 128), (Kind::BFloat16, 12), (Kind::Half, 264)] {
            assert!(!takes_flash(0, kind, head_dim).unwrap(), "{kind:?} {head_dim}");
        }
    }

    #[test]
    fn windows_are_aligned_at_the_end() {
        let seen = |window: Window, queries, keys| -> Vec<(i64, i64)> {
            (0..queries).map(|query| window.seen(query, queries, keys)).collect()
        };
        assert_eq!(seen(Window::ALL, 2, 3), [(0, 3), (0, 3)]);
        let causal = Window { left: None, right: Some(0) };
        assert_eq!(seen(causal, 3, 3), [(0, 1), (0, 2), (0, 3)]);
        // the two queries are the last of three positions
        assert_eq!(seen(causal, 2, 3), [(0, 2), (0, 3)]);
        let band = Window { left: Some(1), right: Some(0) };
        assert_eq!(seen(band, 3, 5), [(1, 3), (2, 4), (3, 5)]);
        assert_eq!(seen(band, 3, 3), [(0, 1), (0, 2), (1, 3)]);
    }
}
