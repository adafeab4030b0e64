//! Attention of the draft: every block sees the context before its anchor, and itself.
//!
//! No mask over (slots, context + slots) is ever built. The anchors of a document are taken in
//! chunks; all queries of a chunk share one contiguous stretch of context that needs no mask, and
//! only the short stretches between the chunk's first and last limit are masked. The own block is
//! one batched attention of block size by block size. Each part returns its output and its
//! log-sum-exp, and the parts are merged by these; in the backward pass each part receives the
//! *merged* output and log-sum-exp, which makes its gradients exact (as in ring attention).
//!
//! Query heads that share a key/value head are folded into the query length, so keys and values
//! are never expanded. Shapes: `q_jngd` [kv heads, slots, queries per kv head, D]; `k_jtd` and
//! `v_jtd` [kv heads, context, D] or [kv heads, slots, D] for the blocks' own. In memory the key/value
//! head is the last but one dimension of all results, as flash kernels leave it: so parts are merged
//! and gradients added over contiguous memory, and a result already is a matrix with a row per slot.

mod part;
mod plan;

use std::ops::Range;

use dflash_torch_sys::kernels::Kernels;
use tch::{Device, Kind, Tensor};

use crate::fused;
use crate::ops::accumulate_kind;

use part::{Part, Query};
pub use plan::{BlockPlan, DocumentSpan, Segment, Visibility, WindowRule};

/// Keys and values of the context or of the blocks themselves.
#[derive(Debug)]
pub struct KeyValue {
    /// [kv heads, rows, D].
    pub k_jtd: Tensor,
    /// [kv heads, rows, D].
    pub v_jtd: Tensor,
}

impl KeyValue {
    /// Zeros in the layout of a part's gradients, to add those of all chunks to: in float32 where
    /// the parts are in half precision, since a sum of many would stop growing there.
    fn zeros_to_sum(&self) -> Self {
        let zeros = |x: &Tensor| {
            let size = x.size();
            let options = (accumulate_kind(x), x.device());
            Tensor::zeros([size[1], size[0], size[2]], options).transpose(0, 1)
        };
        Self { k_jtd: zeros(&self.k_jtd), v_jtd: zeros(&self.v_jtd) }
    }

    /// Rows of a batch of one.
    fn rows(&self, range: &Range<usize>) -> (Tensor, Tensor) {
        let (start, length) = (range.start as i64, range.len() as i64);
        let take = |x: &Tensor| x.narrow(1, start, length).unsqueeze(0);
        (take(&self.k_jtd), take(&self.v_jtd))
    }

    /// The blocks' own rows as a batch of blocks: [A, kv heads, B, D].
    fn blocks(&self, block_size: i64) -> (Tensor, Tensor) {
        (split_blocks(&self.k_jtd, block_size), split_blocks(&self.v_jtd, block_size))
    }

    fn add_rows(&self, range: &Range<usize>, dk: &Tensor, dv: &Tensor) {
        let (mut k, mut v) = self.rows(range);
        let _ = k.g_add_(dk);
        let _ = v.g_add_(dv);
    }
}

/// Output of the merged attention and what its gradient needs.
#[derive(Debug)]
pub struct Attended {
    /// [kv heads, slots, queries per kv head, D].
    pub out_jngd: Tensor,
    /// Log-sum-exp of the scaled scores over everything seen, [kv heads, slots, queries], float32.
    pub lse_jng: Tensor,
}

impl Attended {
    /// The output as a matrix with a row per slot, [slots, queries per kv head * kv heads * D].
    pub(crate) fn by_slot(&self) -> Tensor {
        fused::by_slot(&self.out_jngd).flatten(1, -1)
    }
}

/// Gradients of one attention.
#[derive(Debug)]
pub struct AttentionGradient {
    /// As the queries.
    pub dq_jngd: Tensor,
    /// As the context's keys and values, but float32 where those are in half precision.
    pub context: KeyValue,
    /// As the blocks' own keys and values.
    pub own: KeyValue,
}

/// One kind of layer's attention over one packed row: chunks, segments and their masks.
#[derive(Debug)]
pub struct BlockAttention {
    block_size: i64,
    queries_per_kv: i64,
    part: Part,
    own_mask: Option<Tensor>,
    chunks: Vec<Chunk>,
}

#[derive(Debug)]
struct Chunk {
    /// First slot and number of slots.
    slots: (i64, i64),
    /// Masks and context rows.
    parts: Vec<(Option<Tensor>, Range<usize>)>,
}

/// What an attention needs to know besides the packed row.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Query heads that share one key/value head.
    pub queries_per_kv: i64,
    /// Width of a head.
    pub head_dim: i64,
    /// Where the masks live.
    pub device: Device,
    /// Kind of the queries: the masks have it too.
    pub kind: Kind,
    /// What computes.
    pub kernels: Kernels,
}

impl BlockAttention {
    /// Prepares the masks of all chunks of `plan` for layers that see `visibility`.
    pub fn new(plan: &BlockPlan, visibility: &Visibility, shape: &AttentionShape) -> Self {
        let group = shape.queries_per_kv as usize;
        let slots = |anchors: usize| (anchors * plan.block_size()) as i64;
        let part = |segment: Segment| (segment_mask(&segment, group, shape), segment.context);
        let chunks = plan
            .chunks(visibility, group)
            .into_iter()
            .map(|chunk| Chunk {
                slots: (slots(chunk.anchors.start), slots(chunk.anchors.len())),
                parts: chunk.segments.into_iter().map(part).collect(),
            })
            .collect();
        Self {
            block_size: plan.block_size() as i64,
            queries_per_kv: shape.queries_per_kv,
            part: Part { scale: (shape.head_dim as f64).powf(-0.5), kernels: shape.kernels },
            own_mask: visibility
                .causal_in_block
                .then(|| own_mask(visibility, plan.block_size(), shape)),
            chunks,
        }
    }

    /// Attends: `q_jngd` to the visible part of `context` and to its block's rows of `own`.
    pub fn forward(&self, q_jngd: &Tensor, context: &KeyValue, own: &KeyValue) -> Attended {
        let (k, v) = own.blocks(self.block_size);
        let q_blocks = self.fold_blocks(q_jngd);
        let (out, lse) = self.part.forward(&q_blocks, &k, &v, self.own_mask.as_ref());
        let merged = Attended {
            out_jngd: self.unfold_blocks(&out),
            lse_jng: self.unfold_blocks(&lse.unsqueeze(-1)).squeeze_dim(-1),
        };
        for chunk in &self.chunks {
            let q = self.fold_chunk(q_jngd, chunk);
            for (mask, range) in &chunk.parts {
                let (k, v) = context.rows(range);
                let (out, lse) = self.part.forward(&q, &k, &v, mask.as_ref());
                self.merge(&merged, chunk, &out, &lse);
            }
        }
        merged
    }

    /// Gradients for `dout_jngd`, given the forward's inputs and result.
    pub fn backward(
        &self,
        dout_jngd: &Tensor,
        q_jngd: &Tensor,
        (context, own): (&KeyValue, &KeyValue),
        attended: &Attended,
    ) -> AttentionGradient {
        let dcontext = context.zeros_to_sum();
        let (dq, own) = self.own_backward(dout_jngd, q_jngd, own, attended);
        for chunk in &self.chunks {
            let fold = |x: &Tensor| self.fold_chunk(x, chunk);
            let q = Query {
                q: fold(q_jngd),
                out: fold(&attended.out_jngd),
                lse: self.fold_lse(&attended.lse_jng, chunk),
                dout: fold(dout_jngd),
            };
            let dq_chunk = fold(&dq);
            for (mask, range) in &chunk.parts {
                let (k, v) = context.rows(range);
                let (dq_part, dk, dv) = self.part.backward(&q, &k, &v, mask.as_ref());
                let _ = dq_chunk.shallow_clone().g_add_(&dq_part);
                dcontext.add_rows(range, &dk, &dv);
            }
        }
        AttentionGradient { dq_jngd: dq, context: dcontext, own }
    }

    fn own_backward(
        &self,
        dout_jngd: &Tensor,
        q_jngd: &Tensor,
        own: &KeyValue,
        attended: &Attended,
    ) -> (Tensor, KeyValue) {
        let lse = self.fold_blocks(&attended.lse_jng.unsqueeze(-1)).squeeze_dim(-1);
        let q = Query {
            q: self.fold_blocks(q_jngd),
            out: self.fold_blocks(&attended.out_jngd),
            lse,
            dout: self.fold_blocks(dout_jngd),
        };
        let (k, v) = own.blocks(self.block_size);
        let (dq, dk, dv) = self.part.backward(&q, &k, &v, self.own_mask.as_ref());
        let own = KeyValue { k_jtd: join_blocks(&dk), v_jtd: join_blocks(&dv) };
        (self.unfold_blocks(&dq), own)
    }

    /// [j, N, g, D] -> [A, j, B*g, D], a view.
    fn fold_blocks(&self, x: &Tensor) -> Tensor {
        let size = x.size();
        x.view([size[0], -1, self.block_size * self.queries_per_kv, size[3]]).transpose(0, 1)
    }

    /// [A, j, B*g, D] -> [j, N, g, D], whose memory is [N, g, j, D]; flash kernels leave it so.
    fn unfold_blocks(&self, x: &Tensor) -> Tensor {
        join_blocks(x).unflatten(1, [-1, self.queries_per_kv])
    }

    /// The chunk's slots of [j, N, g, D] as [1, j, slots*g, D], a view.
    fn fold_chunk(&self, x: &Tensor, chunk: &Chunk) -> Tensor {
        let size = x.size();
        let (start, length) = chunk.slots;
        x.narrow(1, start, length).view([1, size[0], length * self.queries_per_kv, size[3]])
    }

    fn fold_lse(&self, lse_jng: &Tensor, chunk: &Chunk) -> Tensor {
        let (start, length) = chunk.slots;
        lse_jng.narrow(1, start, length).view([1, lse_jng.size()[0], length * self.queries_per_kv])
    }

    /// Folds one part's (out, lse) into the merged ones, in place.
    fn merge(&self, merged: &Attended, chunk: &Chunk, out: &Tensor, lse: &Tensor) {
        let merged_out = self.fold_chunk(&merged.out_jngd, chunk);
        let merged_lse = self.fold_lse(&merged.lse_jng, chunk);
        fused::merge((&merged_out, &merged_lse), (out, lse), self.part.kernels);
    }
}

/// [j, N, D] -> [A, j, B, D], a view.
fn split_blocks(x_jnd: &Tensor, block_size: i64) -> Tensor {
    let size = x_jnd.size();
    x_jnd.unflatten(1, [size[1] / block_size, block_size]).transpose(0, 1)
}

/// [A, j, rows, D] -> [j, A*rows, D], whose memory is [A*rows, j, D].
fn join_blocks(x: &Tensor) -> Tensor {
    x.transpose(1, 2).contiguous().flatten(0, 1).transpose(0, 1)
}

/// Score added where a query must not look. Finite, so that a row that sees nothing of a segment
/// yields numbers (with a log-sum-exp near this value, so no share in the merge) and never NaN.
const HIDDEN: f32 = -1e30;

/// [rows*g, columns] with 0 where visible; `None` when every row sees every column.
fn segment_mask(segment: &Segment, group: usize, shape: &AttentionShape) -> Option<Tensor> {
    let limits = segment.row_limits.as_ref()?;
    let columns = segment.context.len();
    let mut values = vec![HIDDEN; limits.len() * group * columns];
    for (row, limit) in limits.iter().enumerate() {
        for query in 0..group {
            let start = (row * group + query) * columns;
            values[start + limit.start..start + limit.end].fill(0.0);
        }
    }
    Some(mask_tensor(&values, columns, shape))
}

/// What the slots of a block see of their block, [B*g, B].
fn own_mask(visibility: &Visibility, block_size: usize, shape: &AttentionShape) -> Tensor {
    let group = shape.queries_per_kv as usize;
    let mut values = vec![HIDDEN; block_size * group * block_size];
    for (row, columns) in values.chunks_mut(block_size).enumerate() {
        columns[visibility.own(row / group, block_size)].fill(0.0);
    }
    mask_tensor(&values, block_size, shape)
}

fn mask_tensor(values: &[f32], columns: usize, shape: &AttentionShape) -> Tensor {
    Tensor::from_slice(values)
        .view([1, 1, -1, columns as i64])
        .to_device(shape.device)
        .to_kind(shape.kind)
}
