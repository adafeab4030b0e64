//! Attention of the draft: every block sees the context before its anchor, and itself.
//!
//! No mask over (slots, context + slots) is ever built. What the blocks see is cut into parts, each
//! with its own output and log-sum-exp, and the parts are merged by these. In the backward pass
//! each part receives the *merged* output and log-sum-exp, which makes its gradients exact (as in
//! ring attention). There are two ways of cutting, [`Method`]: `halves` into rectangles, one
//! variable-length call per depth, which suits GPUs, and `chunks` with masks at their edges, which
//! is faster on CPUs (LOG.md).
//!
//! `halves`: the context that the blocks of a document see is a staircase. Halving its anchors
//! recursively cuts it into rectangles: the later half sees everything between the first anchors of
//! the two halves. Rectangles of one depth are disjoint over all documents of a row, so each depth
//! is one variable-length flash call, with no wasted work and gradients that never overlap. Where
//! slots of one block see different context (a sliding window as it is served), they see it in the
//! call of their own block, as a band. On a CPU the portable path runs the same calls with the same
//! arguments, sequence by sequence.
//!
//! Shapes: `q_jngd` [kv heads, slots, queries per kv head, D]; `k_jtd` and `v_jtd` [kv heads,
//! context, D] or [kv heads, slots, D] for the blocks' own. Memory order is the method's own,
//! `HeadOrder`: in `chunks` the kv head comes before slots and queries, so results of the parts are
//! merged over contiguous memory and `o_proj` is applied with permuted columns (copying a weight,
//! not all slots); variable-length calls keep the heads in the checkpoint's order.

mod chunks;
mod halves;
mod joined;
mod part;
mod plan;
mod rectangles;
mod varlen;

#[cfg(test)]
#[path = "../tests/attention/case.rs"]
mod case;

use dflash_kernels::gpu::Runner;
use dflash_kernels::kernels::Kernels;
use dflash_tensor::fused::HeadOrder;
use dflash_tensor::ops::accumulate_kind;
use dflash_torch_sys::flash::takes_flash;
use tch::{Device, Kind, Tensor};

use chunks::ChunkAttention;
use halves::HalvesAttention;
use joined::JoinedAttention;
use part::AttentionPart;
pub use plan::{BlockPlan, DocumentSpan, Segment, Visibility, WindowRule};
pub use rectangles::{Rectangle, RectanglePlan};

/// Keys and values of the context or of the blocks themselves.
#[derive(Debug)]
pub struct KeyValue {
    /// [kv heads, rows, D].
    pub k_jtd: Tensor,
    /// [kv heads, rows, D].
    pub v_jtd: Tensor,
}

impl KeyValue {
    /// Zeros in the layout of a part's gradients, to add those of all parts to: in float32 where
    /// the parts are in half precision, since a sum of many would stop growing there.
    fn zeros_to_sum(&self) -> Self {
        let zeros = |x: &Tensor| {
            let size = x.size();
            let options = (accumulate_kind(x), x.device());
            Tensor::zeros([size[1], size[0], size[2]], options).transpose(0, 1)
        };
        Self { k_jtd: zeros(&self.k_jtd), v_jtd: zeros(&self.v_jtd) }
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

/// Gradients of one attention.
#[derive(Debug)]
pub struct AttentionGradient {
    /// As the queries, but float32 where those are in half precision and were cut into halves.
    pub dq_jngd: Tensor,
    /// As the context's keys and values, but float32 where those are in half precision.
    pub context: KeyValue,
    /// As the blocks' own keys and values, or float32 where those are in half precision.
    pub own: KeyValue,
}

/// How what the blocks see is cut into parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// A few anchors at a time: a stretch of context that all see, and masked edges.
    Chunks,
    /// Rectangles by halving the anchors, without masks: a call for each depth.
    Halves,
}

impl Method {
    /// Halves where the variable-length kernels are, and where a CPU is asked to run what a GPU runs;
    /// chunks elsewhere. Whether this GPU has the kernels, the driver says.
    pub fn of(device: Device, kind: Kind, head_dim: i64, kernels: Kernels) -> Self {
        let halves = match device {
            Device::Cuda(index) => takes_flash(index, kind, head_dim)
                .unwrap_or_else(|error| panic!("{error}, although the weights lie on it")),
            _ => kernels != Kernels::Fast,
        };
        if halves { Self::Halves } else { Self::Chunks }
    }
}

/// What an attention needs to know besides the packed row.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Query heads that share one key/value head.
    pub queries_per_kv: i64,
    /// Width of a head.
    pub head_dim: i64,
    /// Where the masks and lengths live.
    pub device: Device,
    /// Kind of the queries: the masks have it too.
    pub kind: Kind,
    /// What computes.
    pub kernels: Kernels,
    /// How it is cut.
    pub method: Method,
}

impl AttentionShape {
    fn part(&self) -> AttentionPart {
        AttentionPart { scale: (self.head_dim as f64).powf(-0.5), kernels: self.kernels }
    }

    /// What runs the kernels for GPUs on such queries.
    fn runner(&self) -> Option<Runner> {
        self.kernels.gpu(&Tensor::empty([0], (self.kind, self.device)))
    }
}

/// One kind of layer's attention over one packed row: its parts, ready on the device.
#[derive(Debug)]
pub struct BlockAttention(Parts);

#[derive(Debug)]
enum Parts {
    Chunks(ChunkAttention),
    Halves(HalvesAttention),
    /// Halves, with kernels of our own around the calls.
    Joined(JoinedAttention),
}

impl BlockAttention {
    /// Prepares all parts of `plan` for layers that see `visibility`.
    pub fn new(plan: &BlockPlan, visibility: &Visibility, shape: &AttentionShape) -> Self {
        Self(match shape.method {
            Method::Chunks => Parts::Chunks(ChunkAttention::new(plan, visibility, shape)),
            Method::Halves => {
                let joined = shape
                    .runner()
                    .and_then(|runner| JoinedAttention::new(runner, plan, visibility, shape));
                joined.map_or_else(
                    || Parts::Halves(HalvesAttention::new(plan, visibility, shape)),
                    Parts::Joined,
                )
            }
        })
    }

    /// How the heads of a slot lie in the memory of results. Queries and their gradients may lie
    /// otherwise, for a copy.
    pub(crate) fn head_order(&self) -> HeadOrder {
        match self.0 {
            Parts::Chunks(_) => HeadOrder::ByQuery,
            Parts::Halves(_) | Parts::Joined(_) => HeadOrder::ByKeyHead,
        }
    }

    /// Attends: `q_jngd` to the visible part of `context` and to its block's rows of `own`.
    pub fn forward(&self, q_jngd: &Tensor, context: &KeyValue, own: &KeyValue) -> Attended {
        match &self.0 {
            Parts::Chunks(chunks) => chunks.forward(q_jngd, context, own),
            Parts::Halves(halves) => halves.forward(q_jngd, context, own),
            Parts::Joined(joined) => joined.forward(q_jngd, context, own),
        }
    }

    /// Gradients for `dout_jngd`, given the forward's inputs and result.
    pub fn backward(
        &self,
        dout_jngd: &Tensor,
        q_jngd: &Tensor,
        context: &KeyValue,
        own: &KeyValue,
        attended: &Attended,
    ) -> AttentionGradient {
        match &self.0 {
            Parts::Chunks(chunks) => chunks.backward(dout_jngd, q_jngd, context, own, attended),
            Parts::Halves(halves) => halves.backward(dout_jngd, q_jngd, context, own, attended),
            Parts::Joined(joined) => joined.backward(dout_jngd, q_jngd, context, own, attended),
        }
    }
}

/// Score added where a query must not look. Finite, so that a row that sees nothing of a segment
/// yields numbers (with a log-sum-exp near this value, so no share in the merge) and never NaN.
const HIDDEN: f32 = -1e30;

fn mask_tensor(values: &[f32], columns: usize, shape: &AttentionShape) -> Tensor {
    Tensor::from_slice(values)
        .view([1, 1, -1, columns as i64])
        .to_device(shape.device)
        .to_kind(shape.kind)
}
