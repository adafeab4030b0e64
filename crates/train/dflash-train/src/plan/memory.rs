//! A rank's peak memory in bytes, by part.
//!
//! In float32 the draft computes with the master weights themselves, whole on every rank; in
//! bfloat16 with a separate copy. On a GPU, the window of hidden states and the rows assembled from
//! it stay on the host.

use dflash_draft::{DraftConfig, DraftLayout};
use dflash_settings::OptimizerKind;
use dflash_target::TargetFacts;
use serde::Serialize;

use super::Planned;
use super::rows::RowShape;
use super::target::Colocated;
use crate::prefetcher::BUFFERS;

/// Program, libraries and allocator on a CPU before a model is loaded: resident memory of `dflash
/// bench` less its tensors.
const PROCESS_BYTES: f64 = 150.0 * MIB;
/// CUDA's context and libraries on a device: NVIDIA's usual half a GB, not measured.
const CONTEXT_BYTES: f64 = 500.0 * MIB;
/// Memory per byte of activations, with fragmentation and temporaries: CPU-measured, docs/plan.md.
pub(super) const SLACK: f64 = 1.2;
const MIB: f64 = (1 << 20) as f64;

/// A rank's memory in bytes. On a GPU all but the window and the assembled rows is on the device.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Memory {
    /// Float32 parameters.
    #[serde(rename = "masters")]
    pub master_weights: f64,
    /// Optimizer state: AdamW's two moments, or Muon's momentum.
    pub moments: f64,
    /// Averaged weights.
    pub average: f64,
    /// Float32 gradients.
    pub gradients: f64,
    /// The bfloat16 copy used for computing.
    pub copy: f64,
    /// The target's embedding and lm_head, frozen, including rows copied for a reduced vocabulary.
    pub frozen: f64,
    /// Activations of the forward pass and temporaries of the backward pass, for the largest row.
    pub activations: f64,
    /// A chunk of logits.
    pub logits: f64,
    /// With --colocate, the target's layers.
    pub target: f64,
    /// With --colocate, the target's pass over the largest row; its memory is reused by activations
    /// and logits when the row is trained.
    pub target_pass: f64,
    /// Hidden states in flight and waiting, in host memory.
    pub window: f64,
    /// Assembled rows in host memory. The features of the current row count as activations.
    pub ahead: f64,
    /// Peak of a step's tensors beyond all these, if its budget is known.
    pub widest: f64,
    /// Float32 state that other ranks hold, which the budget's step includes.
    #[serde(skip)]
    elsewhere: f64,
    /// Program and libraries.
    pub process: f64,
}

impl Memory {
    /// What a GPU holds before the first step.
    pub(super) fn at_first(&self) -> f64 {
        let state = self.master_weights + self.moments + self.average + self.gradients + self.copy;
        state + self.frozen + self.target + self.process
    }

    /// Sum of the parts on the rank's device; with a `gpu`, without those on the host.
    pub fn total(&self, gpu: bool) -> f64 {
        let state = self.master_weights + self.moments + self.average + self.gradients + self.copy;
        let hidden_states = if gpu { 0.0 } else { self.window + self.ahead };
        let turns = (self.activations + self.logits).max(self.target_pass);
        state + self.frozen + self.target + turns + self.widest + hidden_states + self.process
    }

    /// Adds the excess of a step's peak tensor memory, plus the target's layers, over the parts.
    pub(super) fn count_widest(&mut self, tensors: f64) {
        let own = tensors - self.elsewhere + self.target + self.process;
        self.widest = (own - self.total(true)).max(0.0);
    }
}

/// The memory of a rank whose largest row is `row`.
pub(super) fn memory(
    planned: &Planned<'_>,
    target: &TargetFacts,
    draft: &DraftConfig,
    row: &RowShape,
) -> Memory {
    let elements = DraftLayout::new(draft).elements() as f64;
    let Planned { settings, vocab_size, .. } = *planned;
    let (gpu, bf16) = (planned.place.is_gpu(), planned.computes_in_bf16());
    let width = planned.width();
    let colocated = Colocated::of(planned, draft);
    let splits = settings.compute.splits_state();
    let share = if splits { elements / settings.ranks() as f64 } else { elements };
    let moments = match settings.optimizer.optimizer {
        OptimizerKind::Adamw => 2.0,
        OptimizerKind::Muon => 1.0,
    };
    let averages = if settings.optimizer.ema_decay.is_some() { 1.0 } else { 0.0 };
    let master_weights = if bf16 { 1.0 } else { 0.0 };
    let matrix = (target.vocab_size * target.hidden_size) as f64 * width;
    let own_head = if target.is_tied() { 0.0 } else { matrix };
    let pruned = vocab_size.map_or(0.0, |rows| rows as f64 * draft.hidden_size as f64);
    let head_rows = vocab_size.map_or(target.vocab_size as f64, |rows| rows as f64);
    // A chunk holds at least one slot, even if that exceeds its size.
    let copies = if settings.objective.needs_target_distribution() { 6.0 } else { 1.0 };
    // assumes a GPU of unlimited memory: no default is larger
    let free = gpu.then_some(u64::MAX);
    let logits = (settings.objective.chunk_bytes(free) as f64).max(head_rows * 4.0 * copies);
    Memory {
        master_weights: 4.0 * if bf16 { share } else { elements },
        moments: 4.0 * moments * share,
        average: 4.0 * averages * share,
        gradients: 4.0 * elements,
        copy: if bf16 { 2.0 * elements } else { 0.0 },
        frozen: matrix + own_head + pruned * width,
        activations: activations(draft, row, width, settings.compute.recompute, gpu),
        // the matmul's result has the computation's type before it is widened
        logits: logits * (1.0 + if bf16 { 0.5 } else { 0.0 }),
        target: colocated.as_ref().map_or(0.0, Colocated::weights),
        target_pass: colocated.as_ref().map_or(0.0, |target| target.pass(row.tokens, row.longest)),
        // With --colocate nothing is fetched or assembled ahead.
        window: if colocated.is_some() { 0.0 } else { window(planned, draft) },
        ahead: if colocated.is_some() { 0.0 } else { ahead(planned, draft, row, width) },
        widest: 0.0,
        elsewhere: 4.0 * (master_weights + moments + averages) * (elements - share),
        process: if gpu { CONTEXT_BYTES } else { PROCESS_BYTES },
    }
}

/// Bytes of hidden states in flight and waiting.
fn window(planned: &Planned<'_>, draft: &DraftConfig) -> f64 {
    let settings = planned.settings;
    let tokens = settings.hidden_states.window_tokens(settings.rows.total_seq_len()) as f64;
    (settings.hidden_states.window_bytes() as f64).max(tokens * planned.token_bytes(draft))
}

/// Bytes of the buffers for assembled rows: for a GPU bfloat16 in page-locked memory, whose sizes
/// are powers of two; on a CPU the computation's type, an eighth larger than the row, without the
/// buffer of the current row.
fn ahead(planned: &Planned<'_>, draft: &DraftConfig, row: &RowShape, width: f64) -> f64 {
    let h = draft.hidden_size as f64;
    let last = if planned.settings.objective.needs_target_distribution() {
        row.tokens * h * 2.0
    } else {
        0.0
    };
    let features = row.context_rows * draft.aux_layers() as f64 * h;
    let beside = row.slots * 8.0 + last;
    let buffers = BUFFERS as f64;
    if planned.place.is_gpu() {
        return buffers * (features * 2.0 + beside).log2().ceil().exp2();
    }
    (buffers * 1.125 - 1.0) * features * width + buffers * 1.125 * beside
}

/// Bytes of a row's activations, at `width` bytes per number, if layers keep only their inputs or
/// everything that their backward pass reads.
fn activations(draft: &DraftConfig, row: &RowShape, width: f64, recompute: bool, gpu: bool) -> f64 {
    let (h, i) = (draft.hidden_size as f64, draft.intermediate_size as f64);
    let heads = draft.num_attention_heads as f64;
    let q_width = heads * draft.head_dim as f64;
    let kv_width = 2.0 * draft.kv_width() as f64;
    let layers = draft.layers.len() as f64;
    let (slots, context) = (row.slots, row.context_rows);
    // Kept per layer: input, raw projections, attention output, residual after it, gate and up.
    let kept_slot = 2.0 * h + 2.0 * q_width + kv_width + 2.0 * i;
    let layer = (slots * kept_slot + context * kv_width) * width + slots * heads * 4.0;
    let kept = if recompute { layers * slots * h * width + layer } else { layers * layer };
    // On a GPU the features of the next row are already there.
    let next = if gpu { context * draft.aux_layers() as f64 * h * 2.0 } else { 0.0 };
    // Features, their fusion before and after the norm, and the latter's gradient.
    let shared = context * (draft.aux_layers() as f64 + 3.0) * h * width;
    // The last hidden state, its norm and gradient, and the embeddings.
    let ends = slots * 4.0 * h * width;
    // The peak of a layer's backward pass: the activated product, a norm, and gradients of the
    // residual stream. Our CPU kernels (float32) write the gradients of gate and up in place.
    let in_place = !gpu && width > 2.0;
    let transient = slots * (if in_place { i } else { 3.0 * i } + 4.0 * h) * width;
    // Sine and cosine tables, float32.
    let tables = (slots + context) * draft.head_dim as f64 * 2.0 * 4.0;
    SLACK * (kept + shared + next + ends + transient + tables)
}
