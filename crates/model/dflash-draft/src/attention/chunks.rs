//! Attention parts by chunks of neighbouring anchors.
//!
//! All queries of a chunk share one contiguous unmasked stretch of context; only the short
//! stretches between the chunk's first and last limit are masked. The blocks' own attention is one
//! batch of block size by block size.
//!
//! Query heads that share a key/value head are folded into the query length, so keys and values are
//! never expanded. In memory the key/value head is the second-to-last dimension of queries and
//! results, as flash kernels leave it. So parts are merged and gradients added over contiguous
//! memory, and the result is already a matrix with one row per slot.

use std::ops::Range;

use dflash_tensor::fused::{self, HeadOrder, PartialAttention};
use tch::Tensor;

use super::part::{AttentionPart, Query};
use super::plan::{BlockPlan, Segment, Visibility};
use super::{Attended, AttentionGradient, AttentionShape, HIDDEN, KeyValue, mask_tensor};

impl KeyValue {
    /// Rows as a batch of one.
    fn rows(&self, range: &Range<usize>) -> (Tensor, Tensor) {
        let (start, length) = (range.start as i64, range.len() as i64);
        let take = |x: &Tensor| x.narrow(1, start, length).unsqueeze(0);
        (take(&self.k_jtd), take(&self.v_jtd))
    }

    /// The blocks' rows as a batch of blocks: [A, kv heads, B, D].
    fn blocks(&self, block_size: i64) -> (Tensor, Tensor) {
        (split_blocks(&self.k_jtd, block_size), split_blocks(&self.v_jtd, block_size))
    }

    fn add_rows(&self, range: &Range<usize>, dk: &Tensor, dv: &Tensor) {
        let (mut k, mut v) = self.rows(range);
        let _ = k.g_add_(dk);
        let _ = v.g_add_(dv);
    }
}

/// Attention of one layer type over one packed row: chunks, segments and their masks.
#[derive(Debug)]
pub(super) struct ChunkAttention {
    block_size: i64,
    queries_per_kv: i64,
    part: AttentionPart,
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

impl ChunkAttention {
    /// Prepares the masks of all chunks of `plan` for layers with `visibility`.
    pub(super) fn new(plan: &BlockPlan, visibility: &Visibility, shape: &AttentionShape) -> Self {
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
            part: shape.part(),
            own_mask: visibility
                .causal_in_block
                .then(|| own_mask(visibility, plan.block_size(), shape)),
            chunks,
        }
    }

    /// See [`super::BlockAttention::forward`].
    pub(super) fn forward(&self, q_jngd: &Tensor, context: &KeyValue, own: &KeyValue) -> Attended {
        let q_jngd = &HeadOrder::ByQuery.ordered(q_jngd);
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

    /// See [`super::BlockAttention::backward`].
    pub(super) fn backward(
        &self,
        dout_jngd: &Tensor,
        q_jngd: &Tensor,
        context: &KeyValue,
        own: &KeyValue,
        attended: &Attended,
    ) -> AttentionGradient {
        let (dout_jngd, q_jngd) =
            (&HeadOrder::ByQuery.ordered(dout_jngd), &HeadOrder::ByQuery.ordered(q_jngd));
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

    /// [A, j, B*g, D] -> [j, N, g, D] with memory order [N, g, j, D], as flash kernels leave it.
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

    /// Merges one part's (out, lse) into the merged ones, in place.
    fn merge(&self, merged: &Attended, chunk: &Chunk, out: &Tensor, lse: &Tensor) {
        let merged_out = self.fold_chunk(&merged.out_jngd, chunk);
        let merged_lse = self.fold_lse(&merged.lse_jng, chunk);
        let merged = PartialAttention { out: &merged_out, lse: &merged_lse };
        fused::merge(merged, PartialAttention { out, lse }, self.part.kernels);
    }
}

/// [j, N, D] -> [A, j, B, D], a view.
fn split_blocks(x_jnd: &Tensor, block_size: i64) -> Tensor {
    let size = x_jnd.size();
    x_jnd.unflatten(1, [size[1] / block_size, block_size]).transpose(0, 1)
}

/// [A, j, rows, D] -> [j, A*rows, D] with memory order [A*rows, j, D].
fn join_blocks(x: &Tensor) -> Tensor {
    x.transpose(1, 2).contiguous().flatten(0, 1).transpose(0, 1)
}

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

/// Mask of the slots of a block over their own block, [B*g, B].
fn own_mask(visibility: &Visibility, block_size: usize, shape: &AttentionShape) -> Tensor {
    let group = shape.queries_per_kv as usize;
    let mut values = vec![HIDDEN; block_size * group * block_size];
    for (row, columns) in values.chunks_mut(block_size).enumerate() {
        columns[visibility.own(row / group, block_size)].fill(0.0);
    }
    mask_tensor(&values, block_size, shape)
}
