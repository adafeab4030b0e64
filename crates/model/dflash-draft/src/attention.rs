//! Attention of the draft: every block attends to the context before its anchor, and to itself.
//!
//! No mask over (slots, context + slots) is ever built. The visible pairs are split into parts,
//! each with its own output and log-sum-exp, by which the parts are merged. In the backward pass
//! each part receives the *merged* output and log-sum-exp, so its gradients are exact (as in ring
//! attention). There are two ways to split, [`Method`]: `halves` into rectangles, with one
//! variable-length call per depth, suits GPUs; `chunks`, with masked edges, is faster on CPUs
//! (LOG.md).
//!
//! `halves`: the context visible to the blocks of a document forms a staircase. Recursively halving
//! its anchors splits it into rectangles: the later half sees everything between the first anchors
//! of the two halves. Rectangles of one depth are disjoint over all documents of a row, so each
//! depth is one variable-length flash call, without wasted work or overlapping gradients. If the
//! slots of a block see different context (a served sliding window), the differing part is a band
//! in the blocks' own call. On a CPU the portable path runs the same calls with the same arguments,
//! sequence by sequence.
//!
//! Shapes: `q_jngd` [kv heads, slots, queries per kv head, D]; `k_jtd` and `v_jtd` [kv heads,
//! context, D], or [kv heads, slots, D] for the blocks' own. The memory order, `HeadOrder`, depends
//! on the method. In `chunks` the kv head comes before slots and queries, so parts are merged over
//! contiguous memory and `o_proj` is applied with permuted columns (copying a weight instead of all
//! slots). Variable-length calls keep the checkpoint's head order.

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

/// Keys and values, of the context or of the blocks.
#[derive(Debug)]
pub struct KeyValue {
    /// [kv heads, rows, D].
    pub k_jtd: Tensor,
    /// [kv heads, rows, D].
    pub v_jtd: Tensor,
}

impl KeyValue {
    /// Zeros with the layout of the gradients, to accumulate all parts: float32 for half-precision
    /// inputs, since a half-precision sum of many parts would stop growing.
    fn zeros_to_sum(&self) -> Self {
        let zeros = |x: &Tensor| {
            let size = x.size();
            let options = (accumulate_kind(x), x.device());
            Tensor::zeros([size[1], size[0], size[2]], options).transpose(0, 1)
        };
        Self { k_jtd: zeros(&self.k_jtd), v_jtd: zeros(&self.v_jtd) }
    }
}

/// Merged attention output, and what its gradient needs.
#[derive(Debug)]
pub struct Attended {
    /// [kv heads, slots, queries per kv head, D].
    pub out_jngd: Tensor,
    /// Log-sum-exp of the scaled scores over all visible keys, [kv heads, slots, queries], float32.
    pub lse_jng: Tensor,
}

/// Gradients of one attention.
#[derive(Debug)]
pub struct AttentionGradient {
    /// Shape of the queries; float32 for half-precision queries with [`Method::Halves`].
    pub dq_jngd: Tensor,
    /// For the context's keys and values; float32 if those are half precision.
    pub context: KeyValue,
    /// For the blocks' keys and values; their type, or float32 if that is half precision.
    pub own: KeyValue,
}

/// How the visible pairs are split into parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// A few anchors at a time: an unmasked common stretch of context, and masked edges.
    Chunks,
    /// Unmasked rectangles by recursive halving of the anchors: one call per depth.
    Halves,
}

impl Method {
    /// Halves if the driver reports a GPU with variable-length kernels, or if a CPU emulates a GPU;
    /// otherwise chunks.
    pub fn of(device: Device, kind: Kind, head_dim: i64, kernels: Kernels) -> Self {
        let halves = match device {
            Device::Cuda(index) => takes_flash(index, kind, head_dim)
                .unwrap_or_else(|error| panic!("{error}, although the weights lie on it")),
            _ => kernels != Kernels::Fast,
        };
        if halves { Self::Halves } else { Self::Chunks }
    }
}

/// Parameters of an attention apart from the packed row.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Query heads that share one key/value head.
    pub queries_per_kv: i64,
    /// Width of a head.
    pub head_dim: i64,
    /// Device of masks and lengths.
    pub device: Device,
    /// Type of the queries and masks.
    pub kind: Kind,
    /// Kernels to use.
    pub kernels: Kernels,
    /// How it is split.
    pub method: Method,
}

impl AttentionShape {
    fn part(&self) -> AttentionPart {
        AttentionPart { scale: (self.head_dim as f64).powf(-0.5), kernels: self.kernels }
    }

    /// The GPU kernel runner for such queries.
    fn runner(&self) -> Option<Runner> {
        self.kernels.gpu(&Tensor::empty([0], (self.kind, self.device)))
    }
}

/// Attention of one layer type over one packed row: its parts, on the device.
#[derive(Debug)]
pub struct BlockAttention(Parts);

#[derive(Debug)]
enum Parts {
    Chunks(ChunkAttention),
    Halves(HalvesAttention),
    /// Halves, with our kernels around the calls.
    Joined(JoinedAttention),
}

impl BlockAttention {
    /// Prepares all parts of `plan` for layers with `visibility`.
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

    /// Memory order of a slot's heads in results. Queries and their gradients may have another
    /// order at the cost of a copy.
    pub(crate) fn head_order(&self) -> HeadOrder {
        match self.0 {
            Parts::Chunks(_) => HeadOrder::ByQuery,
            Parts::Halves(_) | Parts::Joined(_) => HeadOrder::ByKeyHead,
        }
    }

    /// Attends from `q_jngd` to the visible part of `context` and to the own block in `own`.
    pub fn forward(&self, q_jngd: &Tensor, context: &KeyValue, own: &KeyValue) -> Attended {
        match &self.0 {
            Parts::Chunks(chunks) => chunks.forward(q_jngd, context, own),
            Parts::Halves(halves) => halves.forward(q_jngd, context, own),
            Parts::Joined(joined) => joined.forward(q_jngd, context, own),
        }
    }

    /// Gradients for `dout_jngd`, given the inputs and result of [`Self::forward`].
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

/// Score added to hidden pairs. Finite, so that a row that sees nothing of a segment gives numbers
/// (with a log-sum-exp near this value, hence no weight in the merge) and never NaN.
const HIDDEN: f32 = -1e30;

fn mask_tensor(values: &[f32], columns: usize, shape: &AttentionShape) -> Tensor {
    Tensor::from_slice(values)
        .view([1, 1, -1, columns as i64])
        .to_device(shape.device)
        .to_kind(shape.kind)
}
