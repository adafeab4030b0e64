//! One variable-length call: many sequences of queries and keys, output and log-sum-exp of each
//! query, and gradients from those of the whole attention that the call is a part of.
//!
//! On a GPU libtorch's flash kernels compute it. On a CPU the same arguments are taken one sequence
//! at a time (neighbours of equal lengths together), by libtorch's flash attention for the CPU or by
//! its plain operations: what a GPU is given is what a CPU's tests see.
//!
//! Shapes: queries and results [queries, heads, D], keys and values [keys, kv heads, D], log-sum-exp
//! [heads, queries]. Query heads that share a key/value head are neighbours.

#[cfg(test)]
mod reference;

use dflash_kernels::kernels::Kernels;
use dflash_tensor::ops::accumulate_kind;
use dflash_torch_sys::flash::{Sequences, Window, flash_backward, flash_forward};
use tch::{Device, Kind, Tensor};

use super::part::{AttentionPart, Query};
use super::{AttentionShape, HIDDEN, mask_tensor};

/// The sequences of a call before they are on a device.
#[derive(Clone, Debug)]
pub(super) struct Lengths {
    /// Cumulative numbers of queries, from 0 on.
    pub(super) queries: Vec<i32>,
    /// Of keys.
    pub(super) keys: Vec<i32>,
    pub(super) window: Window,
}

impl Lengths {
    /// Of sequences of so many (queries, keys).
    ///
    /// # Panics
    /// A sequence without queries or keys, of which kernels make infinities: a bug of the caller.
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

    /// Neighbouring sequences of equal lengths, joined.
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
    /// Of each sequence.
    queries: i64,
    keys: i64,
    /// Of the first sequence.
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

    /// The way back, the run's rows alone.
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

    /// The window as an additive mask over the folded scores; `None` where it hides nothing.
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

/// Gradients of a call, each like its input.
#[derive(Debug)]
pub(super) struct CallGradient {
    pub(super) dq: Tensor,
    pub(super) dk: Tensor,
    pub(super) dv: Tensor,
}

/// The results that a call's gradients start from: those of the whole attention, the call's queries
/// alone.
#[derive(Debug)]
pub(super) struct Results {
    pub(super) out: Tensor,
    pub(super) lse: Tensor,
    pub(super) dout: Tensor,
}

/// A call that is ready to be made.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) sequences: Sequences,
    backend: Backend,
    part: AttentionPart,
}

#[derive(Debug)]
enum Backend {
    /// libtorch's kernels for GPUs.
    Flash,
    /// Run by run, with their masks.
    Runs(Vec<(Run, Option<Tensor>)>),
    /// What the kernels are defined to do, from the arguments that they get.
    #[cfg(test)]
    Reference,
}

impl Call {
    /// `cu_q` and `cu_k` are the lengths' cumulative numbers on the shape's device.
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

    /// Output, as `q`, and log-sum-exp.
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

    /// Gradients from what the whole attention came to.
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

    /// From now on computed by the definition.
    #[cfg(test)]
    pub(super) fn refer(&mut self) {
        self.backend = Backend::Reference;
    }

    /// Every pair of a query and a key of it, as rows of the call, that the arguments show a kernel.
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

/// What computes a run. Not libtorch's flash attention for the CPU in half precision: it adds up the
/// keys' gradients in their own kind, and over as many queries as a rectangle has they stop growing.
fn part(shape: &AttentionShape) -> AttentionPart {
    match shape.kind {
        Kind::Half | Kind::BFloat16 => AttentionPart { kernels: Kernels::Portable, ..shape.part() },
        _ => shape.part(),
    }
}

/// As tch ends a call that libtorch refused.
fn panic<T>(error: dflash_torch_sys::Error) -> T {
    panic!("{error}")
}
