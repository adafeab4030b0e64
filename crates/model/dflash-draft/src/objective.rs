//! The training objective: loss and gradient of the slots without materialising all logits.
//!
//! The lm_head is the target's and frozen; the draft's head may modify its output and then has its
//! own gradients. For each chunk of supervised slots, logits, loss and the logits' gradient are
//! computed in place. Two matrix products (to the logits and back) suffice; nothing is kept for a
//! later pass, and slots without a label cost nothing. Everything after the logits is float32
//! (float64 for gradient checks).
//!
//! Losses are returned as a numerator, its gradient and a denominator. The caller first sums both
//! over micro-batches and ranks and then divides: a token-weighted mean over all of them, not a
//! mean of means.

mod element;
mod labels;
mod placed;
mod statistics;
mod vocabulary;
mod weight;

use std::ops::Range;

use dflash_kernels::kernels::Kernels;
use tch::{Kind, Tensor};

pub use dflash_settings::ElementLoss;
use dflash_tensor::LogitTransform;
use dflash_tensor::ops::accumulate_kind;
pub use element::{LK_ETA, NLA_EPSILON, element_loss};
pub use labels::{BlockLabels, LabelSource, LabelledRow};
pub use statistics::{Statistics, StatisticsReport};
pub use vocabulary::DraftVocabulary;
pub use weight::{
    Confidence, Denominator, MASKED_SLOTS_EPSILON, Weighting, decay_weights, dpace_weights,
};

use crate::draft::{Dflash, Head, HeadChunk, HeadViews};
use placed::{ChunkPlace, Placed};

/// The loss to minimise.
#[derive(Clone, Debug)]
pub struct Objective {
    /// Element losses and their coefficients.
    pub terms: Vec<(ElementLoss, f64)>,
    /// Weights of slots.
    pub weighting: Weighting,
    /// Divisor of the weighted sum.
    pub denominator: Denominator,
    /// Which token is the label for cross-entropy and accuracy.
    pub labels: LabelSource,
    /// Memory limit of one chunk of logits, bytes.
    pub chunk_bytes: usize,
    /// Kernels to use.
    pub kernels: Kernels,
}

/// The target's side of a packed row.
#[derive(Debug)]
pub struct TargetDistribution {
    /// The target's last hidden states after the final norm, [R, H].
    pub normed_rh: Tensor,
    /// For each supervised slot the row that predicts its token, `[M]` int64.
    pub rows_m: Tensor,
    /// The target's lm_head, pruned like the draft's, [V, H].
    pub head_vh: Tensor,
    /// Transform from LM-head output to target logits; the draft's logits need none.
    pub output: LogitTransform,
}

/// The head as used in a pass: turns hidden states into logits and accumulates gradients.
#[derive(Clone, Copy, Debug)]
pub struct HeadPass<'a> {
    /// The draft's head.
    pub head: &'a dyn Head,
    /// The target's lm_head [V, H], pruned to the draft's vocabulary, in the hidden states' type.
    pub lm_head_vh: &'a Tensor,
    /// Accumulates gradients of the head's parameters; `None` outside training.
    pub gradient: Option<&'a HeadViews>,
}

impl<'a> HeadPass<'a> {
    /// DFlash's head: only the lm_head.
    pub fn plain(lm_head_vh: &'a Tensor) -> Self {
        Self { head: &Dflash, lm_head_vh, gradient: None }
    }
}

/// A packed row's contribution to the loss.
#[derive(Debug)]
pub struct LossOutput {
    /// Gradient of the loss *numerator* with respect to the hidden states, [N, H].
    pub dhidden_nh: Tensor,
    /// Numerator, denominator and counts, on the device.
    pub statistics: Statistics,
}

impl Objective {
    /// Whether terms or labels need the target's distribution.
    pub fn needs_target_distribution(&self) -> bool {
        self.labels == LabelSource::TargetArgmax
            || self.terms.iter().any(|(term, _)| term.needs_target_distribution())
    }

    /// Loss numerator, its gradient and the counts of one packed row.
    ///
    /// `hidden_nh` [N, H] is the trunk's output after its norm. Must be called without autograd.
    ///
    /// # Panics
    /// If the target's distribution is needed and absent: a bug of the caller.
    pub fn evaluate(
        &self,
        pass: HeadPass<'_>,
        hidden_nh: &Tensor,
        labels: &BlockLabels,
        target_distribution: Option<&TargetDistribution>,
    ) -> LossOutput {
        let HeadPass { head, lm_head_vh, gradient } = pass;
        let placed = Placed::new(labels, &self.weighting, hidden_nh, head);
        let mut dhidden_nh = hidden_nh.zeros_like();
        let mut tally = statistics::Tally::new(labels, hidden_nh, head);
        for chunk in labels.chunks(self.chunk_rows(pass, target_distribution.is_some())) {
            let place = placed.chunk(&chunk);
            let hidden_mh = hidden_nh.index_select(0, &place.slots_m);
            let of_head = HeadChunk {
                hidden_nh,
                hidden_mh: &hidden_mh,
                slots_m: &place.slots_m,
                tokens_m: &place.tokens_m,
                previous_n: placed.previous_n.as_ref(),
                decay_m: place.decay_m.as_ref(),
                gradient,
            };
            let base_mv = self.worked_on(hidden_mh.matmul(&lm_head_vh.tr()), head);
            let logits_mv = head.logits(&of_head, base_mv, &mut tally.metrics);
            let target_mv =
                target_distribution.map(|target_distribution| target_distribution.logits(&chunk));
            let metrics = &mut tally.metrics;
            let own = head.auxiliary_loss(&of_head, &logits_mv, target_mv.as_ref(), metrics);
            let tokens_m = place.tokens_m.shallow_clone();
            let mut output =
                self.chunk(element::ChunkInput { logits_mv, target_mv, tokens_m }, &place);
            if let Some(own) = &own {
                output.add(own);
            }
            tally.add(&place.slots_m, &output);
            let mut dhidden_mh = output.dlogits_mv.to_kind(hidden_nh.kind()).matmul(lm_head_vh);
            let of_logits = head.backward(&of_head, &output.dlogits_mv);
            for more in [of_logits, own.and_then(|own| own.dhidden_mh)].into_iter().flatten() {
                dhidden_mh += more.to_kind(dhidden_mh.kind());
            }
            let _ = dhidden_nh.index_copy_(0, &place.slots_m, &dhidden_mh);
        }
        LossOutput {
            dhidden_nh,
            statistics: tally.finish(&placed, self.denominator, head.metrics()),
        }
    }

    /// Converts logits to the type that the loss is computed in.
    fn worked_on(&self, logits_mv: Tensor, head: &dyn Head) -> Tensor {
        if self.takes_any_kind(&logits_mv, head) { logits_mv } else { wide(logits_mv) }
    }

    /// Whether logits stay in the product's type, which the GPU kernels support.
    fn takes_any_kind(&self, like: &Tensor, head: &dyn Head) -> bool {
        let is_plain = head.is_plain()
            && self.labels == LabelSource::Data
            && matches!(self.terms[..], [(ElementLoss::CrossEntropy, _)]);
        is_plain && self.kernels.gpu(like).is_some()
    }

    fn chunk(&self, input: element::ChunkInput, place: &ChunkPlace) -> element::ChunkOutput {
        match (self.terms.as_slice(), self.labels) {
            ([(ElementLoss::CrossEntropy, coefficient)], LabelSource::Data) => {
                let weigh = |ce: &Tensor| self.weighting.weights(ce, ce, place);
                element::data_cross_entropy(input, *coefficient, weigh, self.kernels)
            }
            _ => element::mixture(input, &self.terms, self.labels, |ce, loss| {
                self.weighting.weights(ce, loss, place)
            }),
        }
    }

    /// Slots per chunk within the memory limit, with the target's logits and temporaries.
    fn chunk_rows(&self, pass: HeadPass<'_>, with_distribution: bool) -> usize {
        let head_vh = pass.lm_head_vh;
        let copies = if with_distribution { 6 } else { 1 };
        let number =
            if self.takes_any_kind(head_vh, pass.head) { head_vh.kind() } else { Kind::Float };
        let row_bytes = head_vh.size()[0] as usize * number.elt_size_in_bytes() * copies;
        (self.chunk_bytes / row_bytes).max(1)
    }
}

impl TargetDistribution {
    fn logits(&self, chunk: &Range<usize>) -> Tensor {
        let rows = self.rows_m.narrow(0, chunk.start as i64, chunk.len() as i64);
        let normed_mh = self.normed_rh.index_select(0, &rows);
        self.output.apply(wide(normed_mh.matmul(&self.head_vh.tr())))
    }
}

/// Logits in float32, or float64.
fn wide(logits: Tensor) -> Tensor {
    logits.to_kind(accumulate_kind(&logits))
}
