//! Per-slot losses and their gradients with respect to the draft's logits.
//!
//! p is the target's distribution, q the draft's. Gradients are closed-form: with g = dL/dq the
//! gradient is `q (g - sum q g)`, which simplifies for most losses.

use dflash_kernels::gpu::{self, Runner};
use dflash_kernels::kernels::{self, Kernels};
use dflash_settings::ElementLoss;
use tch::{Kind, Tensor};

use super::LabelSource;
use crate::draft::AuxiliaryLoss;

/// Overlap below which `nla` is constant.
pub const NLA_EPSILON: f64 = 1e-5;

/// Rate at which `lk` shifts from KL to total variation as the overlap grows (arXiv 2602.23881).
pub const LK_ETA: f64 = 3.0;

/// A chunk of supervised slots.
#[derive(Debug)]
pub(super) struct ChunkInput {
    /// The draft's logits, [m, V].
    pub(super) logits_mv: Tensor,
    /// The target's logits, [m, V].
    pub(super) target_mv: Option<Tensor>,
    /// The data's tokens, `[m]`.
    pub(super) tokens_m: Tensor,
}

/// A chunk's loss, gradient and correctness.
#[derive(Debug)]
pub(super) struct ChunkOutput {
    /// Sum of the weighted losses, float64 scalar.
    pub(super) loss_sum: Tensor,
    /// Sum of the weights, float64 scalar.
    pub(super) weight_sum: Tensor,
    /// Whether the argmax is the label, `[m]` (bool, or 1 and 0).
    pub(super) correct_m: Tensor,
    /// Gradient of `loss_sum`, [m, V].
    pub(super) dlogits_mv: Tensor,
}

impl ChunkOutput {
    /// Adds a head's own loss.
    pub(super) fn add(&mut self, own: &AuxiliaryLoss) {
        self.loss_sum += &own.loss_sum;
        if let Some(dlogits_mv) = &own.dlogits_mv {
            self.dlogits_mv += dlogits_mv.to_kind(self.dlogits_mv.kind());
        }
    }
}

/// Cross-entropy on the data's tokens, computed in the logits' memory.
pub(super) fn data_cross_entropy(
    input: ChunkInput,
    coefficient: f64,
    weigh: impl FnOnce(&Tensor) -> Tensor,
    kernels: Kernels,
) -> ChunkOutput {
    let ChunkInput { logits_mv: mut dlogits_mv, tokens_m, .. } = input;
    if let Some(runner) = kernels.gpu(&dlogits_mv) {
        return gpu_cross_entropy(runner, dlogits_mv, &tokens_m, coefficient, weigh);
    }
    if !kernels.take(&dlogits_mv) {
        return portable_cross_entropy(dlogits_mv, &tokens_m, coefficient, weigh);
    }
    let result = kernels::softmax_cross_entropy(&mut dlogits_mv, &tokens_m);
    let weight_m = weigh(&result.ce_m) * coefficient;
    result.gradient(&mut dlogits_mv, &tokens_m, &weight_m);
    ChunkOutput {
        loss_sum: (&result.ce_m * &weight_m).sum(Kind::Double),
        weight_sum: weight_m.sum(Kind::Double) / coefficient,
        correct_m: result.correct_m,
        dlogits_mv,
    }
}

/// [`portable_cross_entropy`] in the logits' own type: two reads and one write of the logits.
fn gpu_cross_entropy(
    runner: Runner,
    mut logits_mv: Tensor,
    tokens_m: &Tensor,
    coefficient: f64,
    weigh: impl FnOnce(&Tensor) -> Tensor,
) -> ChunkOutput {
    let result = gpu::cross_entropy(runner, &logits_mv, tokens_m);
    let weight_m = weigh(&result.ce_m) * coefficient;
    result.gradient(&mut logits_mv, tokens_m, &weight_m);
    ChunkOutput {
        loss_sum: (&result.ce_m * &weight_m).sum(Kind::Double),
        weight_sum: weight_m.sum(Kind::Double) / coefficient,
        correct_m: result.correct_m,
        dlogits_mv: logits_mv,
    }
}

fn portable_cross_entropy(
    mut logits_mv: Tensor,
    tokens_m: &Tensor,
    coefficient: f64,
    weigh: impl FnOnce(&Tensor) -> Tensor,
) -> ChunkOutput {
    let (max_m1, argmax_m1) = logits_mv.max_dim(1, true);
    let labels_m1 = tokens_m.unsqueeze(1);
    let _ = logits_mv.g_sub_(&max_m1);
    let label_m1 = logits_mv.gather(1, &labels_m1, false);
    let mut exp_mv = logits_mv.exp_();
    let kind = exp_mv.kind();
    let sum_m1 = exp_mv.sum_dim_intlist([1i64].as_slice(), true, kind);
    let ce_m = (sum_m1.log() - label_m1).squeeze_dim(1);
    let weight_m = weigh(&ce_m) * coefficient;
    let weight_m1 = weight_m.unsqueeze(1);
    let _ = exp_mv.g_mul_(&(&weight_m1 / &sum_m1));
    let dlogits_mv = exp_mv.scatter_add_(1, &labels_m1, &weight_m1.neg());
    ChunkOutput {
        loss_sum: (&ce_m * &weight_m).sum(Kind::Double),
        weight_sum: weight_m.sum(Kind::Double) / coefficient,
        correct_m: argmax_m1.eq_tensor(&labels_m1).squeeze_dim(1),
        dlogits_mv,
    }
}

/// Weighted sum of terms; per-slot weights are computed from (cross-entropy, the term's loss).
pub(super) fn mixture(
    input: ChunkInput,
    terms: &[(ElementLoss, f64)],
    labels: LabelSource,
    weigh: impl Fn(&Tensor, &Tensor) -> Tensor,
) -> ChunkOutput {
    let label_m = match (labels, &input.target_mv) {
        (LabelSource::TargetArgmax, Some(target_mv)) => target_mv.argmax(1, false),
        (LabelSource::TargetArgmax, None) => panic!("labels from the target need its logits"),
        (LabelSource::Data, _) => input.tokens_m,
    };
    let correct_m = input.logits_mv.argmax(1, false).eq_tensor(&label_m);
    let pair = Pair::new(&input.logits_mv, input.target_mv.as_ref(), &label_m);
    let ce_m = pair.cross_entropy();
    let mut total = ChunkOutput {
        loss_sum: Tensor::zeros([], (Kind::Double, ce_m.device())),
        weight_sum: Tensor::zeros([], (Kind::Double, ce_m.device())),
        correct_m,
        dlogits_mv: pair.q.zeros_like(),
    };
    for (index, &(term, coefficient)) in terms.iter().enumerate() {
        let (loss_m, gradient_mv) = pair.evaluate(term);
        let weight_m = weigh(&ce_m, &loss_m);
        if index == 0 {
            total.weight_sum = weight_m.sum(Kind::Double);
        }
        let scaled_m = weight_m * coefficient;
        total.loss_sum += (&loss_m * &scaled_m).sum(Kind::Double);
        let _ = total.dlogits_mv.g_add_(&(gradient_mv * scaled_m.unsqueeze(1)));
    }
    total
}

/// One term's losses `[m]` and gradients [m, V] for given logits; the label is the target's argmax.
pub fn element_loss(term: ElementLoss, logits_mv: &Tensor, target_mv: &Tensor) -> (Tensor, Tensor) {
    Pair::new(logits_mv, Some(target_mv), &target_mv.argmax(1, false)).evaluate(term)
}

/// Both distributions of a chunk.
struct Pair {
    log_q: Tensor,
    q: Tensor,
    /// log p and p.
    target_distribution: Option<(Tensor, Tensor)>,
    label_m1: Tensor,
}

impl Pair {
    fn new(logits_mv: &Tensor, target_mv: Option<&Tensor>, label_m: &Tensor) -> Self {
        let kind = logits_mv.kind();
        let log_q = logits_mv.log_softmax(-1, kind);
        let target_distribution = target_mv.map(|logits| {
            let log_p = logits.log_softmax(-1, kind);
            let p = log_p.exp();
            (log_p, p)
        });
        Self { q: log_q.exp(), log_q, target_distribution, label_m1: label_m.unsqueeze(1) }
    }

    fn target_distribution(&self) -> (&Tensor, &Tensor) {
        let (log_p, p) = self
            .target_distribution
            .as_ref()
            .expect("losses between distributions have the target's distribution");
        (log_p, p)
    }

    fn cross_entropy(&self) -> Tensor {
        -self.log_q.gather(1, &self.label_m1, false).squeeze_dim(1)
    }

    fn evaluate(&self, term: ElementLoss) -> (Tensor, Tensor) {
        match term {
            ElementLoss::CrossEntropy => {
                let ones = self.label_m1.ones_like().to_kind(self.q.kind());
                let gradient = self.q.scatter_add(1, &self.label_m1, &-ones);
                (self.cross_entropy(), gradient)
            }
            ElementLoss::Kl => self.kl(),
            ElementLoss::ReverseKl => {
                let ratio = &self.log_q - self.target_distribution().0;
                let loss = row_sum(&(&self.q * &ratio));
                let gradient = &self.q * (ratio - loss.unsqueeze(1));
                (loss, gradient)
            }
            ElementLoss::Jsd => self.jsd(),
            ElementLoss::Tv => self.total_variation(),
            ElementLoss::Nla => {
                let (tv, dtv) = self.total_variation();
                let overlap: Tensor = 1.0 - tv;
                let slope = overlap.gt(NLA_EPSILON).to_kind(overlap.kind())
                    / overlap.clamp_min(NLA_EPSILON);
                (-overlap.clamp_min(NLA_EPSILON).log(), dtv * slope.unsqueeze(1))
            }
            ElementLoss::Lk => {
                let ((kl, dkl), (tv, dtv)) = (self.kl(), self.total_variation());
                let weight = ((&tv - 1.0) * LK_ETA).exp();
                let weight_m1 = weight.unsqueeze(1);
                let gradient = dkl * &weight_m1 + dtv * (1.0 - &weight_m1);
                (&weight * kl + (1.0 - &weight) * tv, gradient)
            }
        }
    }

    fn kl(&self) -> (Tensor, Tensor) {
        let (log_p, p) = self.target_distribution();
        // p underflows to 0 if log p is very negative, and 0 log 0 counts as 0
        let loss = row_sum(&(p * (log_p - &self.log_q)));
        (loss, &self.q - p)
    }

    fn jsd(&self) -> (Tensor, Tensor) {
        let (log_p, p) = self.target_distribution();
        let log_mix = self.log_q.logaddexp(log_p) - std::f64::consts::LN_2;
        let ratio = &self.log_q - &log_mix;
        let draft = row_sum(&(&self.q * &ratio));
        let target = row_sum(&(p * (log_p - &log_mix)));
        let gradient = &self.q * (ratio - draft.unsqueeze(1)) * 0.5;
        ((draft + target) * 0.5, gradient)
    }

    fn total_variation(&self) -> (Tensor, Tensor) {
        let p = self.target_distribution().1;
        let loss = 1.0 - row_sum(&self.q.minimum(p));
        // d min(p, q) / dq: 1 where q is smaller, half at ties
        let kind = self.q.kind();
        let share = (self.q.lt_tensor(p).to_kind(kind) + self.q.le_tensor(p).to_kind(kind)) * 0.5;
        let inside = row_sum(&(&self.q * &share)).unsqueeze(1);
        (loss, &self.q * (inside - share))
    }
}

fn row_sum(x: &Tensor) -> Tensor {
    x.sum_dim_intlist([1i64].as_slice(), false, x.kind())
}
