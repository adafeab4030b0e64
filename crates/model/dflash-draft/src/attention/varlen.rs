//! One variable-length call over many sequences: output and log-sum-exp of each query, and
//! gradients from the values of the merged attention that the call is a part of.
//!
//! On a GPU libtorch's flash kernels compute it. On a CPU the same arguments are processed sequence
//! by sequence (neighbours of equal lengths together), by libtorch's CPU flash attention or by its
//! plain operations, so CPU tests cover what a GPU gets.
//!
//! Shapes: queries and results [queries, heads, D], keys and values [keys, kv heads, D],
//! log-sum-exp [heads, queries]. Query heads that share a key/value head are adjacent.

#[cfg(test)]
mod reference;

use dflash_kernels::kernels::Kernels;
use dflash_tensor::ops::accumulate_kind;
use dflash_torch_sys::flash::{Sequences, Window, flash_backward, flash_forward};
use tch::{Device, Kind, Tensor};

use super::part::{AttentionPart, Query};
use super::{AttentionShape, HIDDEN, mask_tensor};

/// Sequence lengths of a call before they are copied to a device.
#[derive(Clone, Debug)]
pub(super) struct Lengths {
    /// Cumulative query counts, starting with 0.
    pub(super) queries: Vec<i32>,
    /// Cumulative key counts.
    pub(super) keys: Vec<i32>,
    pub(super) window: Window,
}

impl Lengths {
    /// From each sequence's (queries, keys).
    ///
    /// # Panics On a sequence without queries or keys, for which kernels return infinities (a bug).
    pub(super) fn new(sequences: impl Iterator<Item = (usize, usize)>, window: Window) -> Self {
        let (mut queries, mut keys) = (vec![0], vec![0]);
        let next = |ends: &[i32], length: usize| {
            assert!(length > 0, "a sequence of an attention is empty");
            i32::try_from(ends[ends.len() - 1] as usize + length)
                .expect("a row has fewer than 2^31")
        };
        for (query, key) in sequences {
            queries.push(next(&queries, query));
            keys.push(next(&keys, key));
        }
        Self { queries, keys, window }
    }

    /// Groups neighbouring sequences of equal lengths.
    fn runs(&self) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for (q, k) in self.queries.windows(2).zip(self.keys.windows(2)) {
            let (queries, keys) = (i64::from(q[1] - q[0]), i64::from(k[1] - k[0]));
            match runs.last_mut() {
                Some(run) if (run.queries, run.keys) == (queries, keys) => run.sequences += 1,
                _ => runs.push(Run {
                    sequences: 1,
                    queries,
                    keys,
                    first_query: i64::from(q[0]),
                    first_key: i64::from(k[0]),
                }),
            }
        }
        runs
    }
}

/// Neighbouring sequences of equal lengths.
#[derive(Clone, Copy, Debug)]
struct Run {
    sequences: i64,
    /// Per sequence.
    queries: i64,
    keys: i64,
    /// Start of the first sequence.
    first_query: i64,
    first_key: i64,
}

impl Run {
    fn query_rows(&self, x: &Tensor, dim: i64) -> Tensor {
        x.narrow(dim, self.first_query, self.sequences * self.queries)
    }

    fn key_rows(&self, x: &Tensor) -> Tensor {
        x.narrow(0, self.first_key, self.sequences * self.keys)
    }

    /// The run's rows of [queries, heads, D] as [sequences, kv heads, queries * group, D].
    fn fold(&self, x: &Tensor, kv_heads: i64) -> Tensor {
        let group = x.size()[1] / kv_heads;
        let rows = self.query_rows(x, 0).unflatten(0, [self.sequences, self.queries]);
        rows.unflatten(2, [kv_heads, group]).transpose(1, 2).flatten(2, 3)
    }

    /// Inverse of [`Self::fold`], for the run's rows only.
    fn unfold(&self, x: &Tensor) -> Tensor {
        let group = x.size()[2] / self.queries;
        x.unflatten(2, [self.queries, group]).transpose(1, 2).flatten(0, 1).flatten(1, 2)
    }

    /// The run's columns of [heads, queries] as [sequences, kv heads, queries * group].
    fn fold_lse(&self, lse: &Tensor, kv_heads: i64) -> Tensor {
        let group = lse.size()[0] / kv_heads;
        let columns = self.query_rows(lse, 1).unflatten(1, [self.sequences, self.queries]);
        columns.unflatten(0, [kv_heads, group]).permute([2, 0, 3, 1]).flatten(2, 3)
    }

    fn unfold_lse(&self, lse: &Tensor) -> Tensor {
        let group = lse.size()[2] / self.queries;
        let lse = lse.unflatten(2, [self.queries, group]).permute([1, 3, 0, 2]);
        lse.flatten(2, 3).flatten(0, 1)
    }

    /// The run's rows of [keys, kv heads, D] as [sequences, kv heads, keys, D].
    fn fold_keys(&self, x: &Tensor) -> Tensor {
        self.key_rows(x).unflatten(0, [self.sequences, self.keys]).transpose(1, 2)
    }

    fn unfold_keys(x: &Tensor) -> Tensor {
        x.transpose(1, 2).flatten(0, 1)
    }

    /// The window as an additive mask over the folded scores; `None` if it hides nothing.
    fn mask(&self, window: Window, shape: &AttentionShape) -> Option<Tensor> {
        if window == Window::ALL {
            return None;
        }
        let rows = self.queries * shape.queries_per_kv;
        let mut values = vec![HIDDEN; (rows * self.keys) as usize];
        for (row, columns) in values.chunks_mut(self.keys as usize).enumerate() {
            let query = row as i64 / shape.queries_per_kv;
            let (first, end) = window.seen(query, self.queries, self.keys);
            columns[first as usize..end as usize].fill(0.0);
        }
        Some(mask_tensor(&values, self.keys as usize, shape))
    }
}

#[derive(Debug)]
pub(super) struct CallGradient {
    pub(super) dq: Tensor,
    pub(super) dk: Tensor,
    pub(super) dv: Tensor,
}

/// What a call's gradients start from: results of the merged attention for the call's queries.
#[derive(Debug)]
pub(super) struct Results {
    pub(super) out: Tensor,
    pub(super) lse: Tensor,
    pub(super) dout: Tensor,
}

#[derive(Debug)]
pub(super) struct Call {
    pub(super) sequences: Sequences,
    backend: Backend,
    part: AttentionPart,
}

#[derive(Debug)]
enum Backend {
    /// libtorch's GPU kernels.
    Flash,
    /// Run by run, with masks.
    Runs(Vec<(Run, Option<Tensor>)>),
    /// A reference implementation of the kernels, from their arguments.
    #[cfg(test)]
    Reference,
}

impl Call {
    /// `cu_q` and `cu_k` are the cumulative counts on the shape's device.
    pub(super) fn new(
        lengths: &Lengths,
        cu_q: Tensor,
        cu_k: Tensor,
        shape: &AttentionShape,
    ) -> Self {
        let longest = |ends: &[i32]| {
            ends.windows(2).map(|pair| i64::from(pair[1] - pair[0])).max().unwrap_or(0)
        };
        let (max_q, max_k) = (longest(&lengths.queries), longest(&lengths.keys));
        let window = lengths.window;
        let masked = |run: Run| (run, run.mask(window, shape));
        let backend = match shape.device {
            Device::Cuda(_) => Backend::Flash,
            _ => Backend::Runs(lengths.runs().into_iter().map(masked).collect()),
        };
        let sequences = Sequences { cu_q, cu_k, max_q, max_k, window };
        Self { sequences, backend, part: part(shape) }
    }

    /// Output, shaped as `q`, and log-sum-exp.
    pub(super) fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> (Tensor, Tensor) {
        match &self.backend {
            Backend::Flash => {
                flash_forward(q, k, v, &self.sequences, self.part.scale).unwrap_or_else(panic)
            }
            Backend::Runs(runs) => self.forward_runs(runs, q, k, v),
            #[cfg(test)]
            Backend::Reference => reference::forward(&self.sequences, self.part.scale, q, k, v),
        }
    }

    /// Gradients from the results of the merged attention.
    pub(super) fn backward(
        &self,
        results: &Results,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> CallGradient {
        match &self.backend {
            Backend::Flash => {
                let Results { out, lse, dout } = results;
                let (sequences, scale) = (&self.sequences, self.part.scale);
                let (dq, dk, dv) =
                    flash_backward(dout, q, k, v, out, lse, sequences, scale).unwrap_or_else(panic);
                CallGradient { dq, dk, dv }
            }
            Backend::Runs(runs) => self.backward_runs(runs, results, q, k, v),
            #[cfg(test)]
            Backend::Reference => {
                reference::backward(&self.sequences, self.part.scale, results, q, k, v)
            }
        }
    }

    /// Switches to the reference implementation.
    #[cfg(test)]
    pub(super) fn refer(&mut self) {
        self.backend = Backend::Reference;
    }

    /// Calls `pair` with every visible query-key pair, as rows of the call.
    #[cfg(test)]
    pub(super) fn for_each_pair(&self, pair: impl FnMut(usize, usize)) {
        reference::for_each_pair(&self.sequences, pair);
    }

    fn forward_runs(
        &self,
        runs: &[(Run, Option<Tensor>)],
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> (Tensor, Tensor) {
        let kv_heads = k.size()[1];
        let out = q.empty_like();
        let lse = Tensor::empty([q.size()[1], q.size()[0]], (accumulate_kind(q), q.device()));
        for (run, mask) in runs {
            let (k, v) = (run.fold_keys(k), run.fold_keys(v));
            let (o, l) = self.part.forward(&run.fold(q, kv_heads), &k, &v, mask.as_ref());
            run.query_rows(&out, 0).copy_(&run.unfold(&o));
            run.query_rows(&lse, 1).copy_(&run.unfold_lse(&l));
        }
        (out, lse)
    }

    fn backward_runs(
        &self,
        runs: &[(Run, Option<Tensor>)],
        results: &Results,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> CallGradient {
        let kv_heads = k.size()[1];
        let gradient = CallGradient { dq: q.empty_like(), dk: k.empty_like(), dv: v.empty_like() };
        for (run, mask) in runs {
            let query = Query {
                q: run.fold(q, kv_heads),
                out: run.fold(&results.out, kv_heads),
                lse: run.fold_lse(&results.lse, kv_heads),
                dout: run.fold(&results.dout, kv_heads),
            };
            let (k, v) = (run.fold_keys(k), run.fold_keys(v));
            let (dq, dk, dv) = self.part.backward(&query, &k, &v, mask.as_ref());
            run.query_rows(&gradient.dq, 0).copy_(&run.unfold(&dq));
            run.key_rows(&gradient.dk).copy_(&Run::unfold_keys(&dk));
            run.key_rows(&gradient.dv).copy_(&Run::unfold_keys(&dv));
        }
        gradient
    }
}

/// The implementation for a run. Half precision does not use libtorch's CPU flash attention, which
/// sums the keys' gradients in half precision: over as many queries as a rectangle has, sums stop
/// growing.
fn part(shape: &AttentionShape) -> AttentionPart {
    match shape.kind {
        Kind::Half | Kind::BFloat16 => AttentionPart { kernels: Kernels::Portable, ..shape.part() },
        _ => shape.part(),
    }
}

/// Panics as tch does when libtorch refuses a call.
fn panic<T>(error: dflash_torch_sys::Error) -> T {
    panic!("{error}")
}
