//! Flash attention on GPUs outside training: packed documents, and new tokens over a cache.
//!
//! libtorch's `scaled_dot_product_attention` picks a kernel by GPU, library version and shape, and
//! its pick can cost far more than the attention itself: cuDNN builds a plan for each new length,
//! and a mask with grouped heads falls back to materialised scores. So wherever the variable-length
//! kernels support a call, they are called directly. Shapes: `q` [T, N, D], `k` and `v` [S, M, D]
//! with a contiguous last dimension; N is a multiple of M.

use dflash_torch_sys::flash::{Sequences, Window, flash_forward, takes_flash};
use tch::{Device, Tensor};

use crate::attention_span::{AttentionPlace, AttentionSpan};
use crate::upload;

/// Whether the kernels support these queries, keys and values.
pub fn takes(q_tnd: &Tensor, k: &Tensor, v: &Tensor) -> bool {
    let dim = |x: &Tensor| x.size().last().copied().unwrap_or(0);
    let Device::Cuda(index) = q_tnd.device() else { return false };
    let alike = [k, v].iter().all(|x| x.kind() == q_tnd.kind() && dim(x) == dim(q_tnd));
    let recorded = [q_tnd, k, v].iter().any(|x| x.requires_grad());
    alike
        && !recorded
        && takes_flash(index, q_tnd.kind(), dim(q_tnd)).unwrap_or_else(|error| panic!("{error}"))
}

/// The layer's attention window, or `None` if the kernels do not support it (chunked spans,
/// soft-capped scores, sinks).
pub fn window(place: AttentionPlace<'_>) -> Option<Window> {
    if place.scores.softcap.is_some() || place.scores.sinks_nr.is_some() {
        return None;
    }
    match place.attention_span {
        AttentionSpan::All => Some(Window { left: None, right: Some(0) }),
        AttentionSpan::Window(window) => Some(Window { left: Some(window - 1), right: Some(0) }),
        AttentionSpan::Chunk(_) => None,
    }
}

/// Attention output [T, N, D]; each sequence attends only to its own keys.
pub fn attend(
    q_tnd: &Tensor,
    k_tmd: &Tensor,
    v_tme: &Tensor,
    sequences: &Sequences,
    scale: Option<f64>,
) -> Tensor {
    let dim = q_tnd.size()[2] as f64;
    let scale = scale.unwrap_or(dim.sqrt().recip());
    let run = flash_forward(q_tnd, k_tmd, v_tme, sequences, scale);
    run.unwrap_or_else(|error| panic!("{error}")).0
}

/// One sequence whose queries are the last `queries` of its `keys` positions.
pub fn one(queries: i64, keys: i64, window: Window, device: Device) -> Sequences {
    let ends = |length: i64| upload(&[0, length as i32], device);
    let cu_q = ends(queries);
    let cu_k = if queries == keys { cu_q.shallow_clone() } else { ends(keys) };
    // A single query sees every key, and with an unlimited window the kernel reads keys once per
    // group of query heads.
    let sees_all = queries == 1 && window.left.is_none_or(|left| left + 1 >= keys);
    let window = if sees_all { Window::ALL } else { window };
    Sequences { cu_q, cu_k, max_q: queries, max_k: keys, window }
}

/// Self-attention over packed documents: `starts` holds each one's start, then the token count.
pub fn documents(starts: &[i64], window: Window, device: Device) -> Sequences {
    // Drop empty documents: the kernels would get a sequence without keys.
    let mut ends: Vec<i32> = starts.iter().map(|&end| end as i32).collect();
    ends.dedup();
    let cu_q = upload(&ends, device);
    let longest = ends.windows(2).map(|pair| i64::from(pair[1] - pair[0])).max().unwrap_or(0);
    let cu_k = cu_q.shallow_clone();
    Sequences { cu_q, cu_k, max_q: longest, max_k: longest, window }
}

/// Sequence lengths of one pass, cached per window.
#[derive(Debug, Default)]
pub struct Calls(Vec<(Window, Sequences)>);

impl Calls {
    /// Returns the sequences for `window`, building them with `make` on first use.
    pub fn of(&mut self, window: Window, make: impl FnOnce() -> Sequences) -> &Sequences {
        let known = self.0.iter().position(|(known, _)| *known == window);
        let at = known.unwrap_or_else(|| {
            self.0.push((window, make()));
            self.0.len() - 1
        });
        &self.0[at].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: Device = Device::Cpu;

    fn ends(x: &Tensor) -> Vec<i32> {
        Vec::try_from(x).unwrap()
    }

    #[test]
    fn a_sequence_ends_where_its_tokens_do() {
        let causal = Window { left: None, right: Some(0) };
        let verified = one(4, 9, causal, CPU);
        assert_eq!((ends(&verified.cu_q), ends(&verified.cu_k)), (vec![0, 4], vec![0, 9]));
        assert_eq!((verified.max_q, verified.max_k, verified.window), (4, 9, causal));
        assert_eq!(one(1, 9, causal, CPU).window, Window::ALL);
        assert_eq!(ends(&one(1, 1, causal, CPU).cu_k), [0, 1]);
        let sliding = Window { left: Some(3), right: Some(0) };
        assert_eq!(one(1, 4, sliding, CPU).window, Window::ALL);
        assert_eq!(one(1, 5, sliding, CPU).window, sliding);
    }

    #[test]
    fn empty_documents_are_left_out() {
        let packed = documents(&[0, 3, 3, 10], Window::ALL, CPU);
        assert_eq!((ends(&packed.cu_q), packed.max_q), (vec![0, 3, 10], 7));
    }

    #[test]
    fn a_window_is_made_once_a_pass() {
        let (mut calls, mut made) = (Calls::default(), 0);
        for window in [Window::ALL, Window { left: Some(1), right: Some(0) }, Window::ALL] {
            calls.of(window, || {
                made += 1;
                one(2, 2, window, CPU)
            });
        }
        assert_eq!(made, 2);
    }
}
