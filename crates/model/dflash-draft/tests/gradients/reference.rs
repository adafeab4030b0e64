//! The objective by its definition, one slot at a time.

use dflash_draft::objective::{
    Confidence, Denominator, ElementLoss, LabelSource, MASKED_SLOTS_EPSILON, Objective, Weighting,
};

pub(crate) type Matrix = Vec<Vec<f64>>;

/// A slot that carries loss.
pub(crate) struct Slot {
    pub(crate) block: usize,
    /// Position in the block.
    pub(crate) k: usize,
    /// Index of the data's token in the draft's vocabulary.
    pub(crate) label: usize,
    /// Row of the target that predicts the label.
    pub(crate) distribution_row: usize,
}

/// Everything except the draft's hidden states.
pub(crate) struct Reference {
    pub(crate) block_size: usize,
    pub(crate) slots: Vec<Slot>,
    pub(crate) head: Matrix,
    /// The target's normed hidden states.
    pub(crate) target: Matrix,
    /// Blocks with a supervised slot.
    pub(crate) blocks: usize,
}

/// Values that carry no gradient, at the point of the gradient.
pub(crate) struct Frozen {
    /// Weight of each slot, per term.
    weights: Vec<Vec<f64>>,
    /// `lk`'s mixing weight of each slot.
    mixing: Vec<f64>,
    /// Divisor of the sum.
    pub(crate) divisor: f64,
}

/// Both distributions at a slot.
struct Distributions {
    p: Vec<f64>,
    q: Vec<f64>,
    label: usize,
}

impl Distributions {
    fn overlap(&self) -> f64 {
        self.p.iter().zip(&self.q).map(|(p, q)| p.min(*q)).sum()
    }

    fn sum(&self, f: impl Fn(f64, f64) -> f64) -> f64 {
        self.p.iter().zip(&self.q).map(|(&p, &q)| f(p, q)).sum()
    }

    fn loss(&self, term: ElementLoss, mixing: f64) -> f64 {
        let half = |x: f64, p: f64, q: f64| 0.5 * x * (2.0 * x / (p + q)).ln();
        match term {
            ElementLoss::CrossEntropy => -self.q[self.label].ln(),
            ElementLoss::Kl => self.sum(|p, q| p * (p / q).ln()),
            ElementLoss::ReverseKl => self.sum(|p, q| q * (q / p).ln()),
            ElementLoss::Jsd => self.sum(|p, q| half(p, p, q) + half(q, p, q)),
            ElementLoss::Tv => 1.0 - self.overlap(),
            ElementLoss::Nla => -self.overlap().max(1e-5).ln(),
            ElementLoss::Lk => {
                mixing * self.loss(ElementLoss::Kl, mixing)
                    + (1.0 - mixing) * self.loss(ElementLoss::Tv, mixing)
            }
        }
    }
}

fn softmax(hidden: &[f64], head: &Matrix) -> Vec<f64> {
    let logit = |row: &Vec<f64>| -> f64 { row.iter().zip(hidden).map(|(w, h)| w * h).sum() };
    let exponentials: Vec<f64> = head.iter().map(|row| logit(row).exp()).collect();
    let total: f64 = exponentials.iter().sum();
    exponentials.into_iter().map(|e| e / total).collect()
}

fn argmax(values: &[f64]) -> usize {
    (0..values.len()).max_by(|&a, &b| values[a].total_cmp(&values[b])).unwrap()
}

impl Reference {
    fn distributions(
        &self,
        labels: LabelSource,
        hidden: &[f64],
        width: usize,
    ) -> Vec<Distributions> {
        let of = |slot: &Slot| {
            let row = (slot.block * self.block_size + slot.k) * width;
            let q = softmax(&hidden[row..row + width], &self.head);
            let p = softmax(&self.target[slot.distribution_row], &self.head);
            let label = match labels {
                LabelSource::Data => slot.label,
                LabelSource::TargetArgmax => argmax(&p),
            };
            Distributions { p, q, label }
        };
        self.slots.iter().map(of).collect()
    }

    /// The constants at `hidden` (flat, rows of `width`).
    pub(crate) fn frozen(&self, objective: &Objective, hidden: &[f64], width: usize) -> Frozen {
        let distributions = self.distributions(objective.labels, hidden, width);
        let mixing: Vec<f64> = distributions.iter().map(|d| (-3.0 * d.overlap()).exp()).collect();
        let term_weights = |term: ElementLoss| {
            let losses = |term| -> Vec<f64> {
                distributions.iter().zip(&mixing).map(|(d, &w)| d.loss(term, w)).collect()
            };
            match objective.weighting {
                Weighting::Decay { gamma } => {
                    self.slots.iter().map(|slot| (-((slot.k - 1) as f64) / gamma).exp()).collect()
                }
                Weighting::Dpace { alpha, confidence: Confidence::CrossEntropy } => {
                    self.dpace(alpha, &losses(ElementLoss::CrossEntropy))
                }
                Weighting::Dpace { alpha, confidence: Confidence::Term } => {
                    self.dpace(alpha, &losses(term))
                }
            }
        };
        let weights: Vec<Vec<f64>> =
            objective.terms.iter().map(|&(term, _)| term_weights(term)).collect();
        let divisor = match objective.denominator {
            Denominator::Weights => weights[0].iter().sum(),
            Denominator::Blocks => self.blocks as f64,
            Denominator::MaskedSlots => self.slots.len() as f64 + MASKED_SLOTS_EPSILON,
        };
        Frozen { weights, mixing, divisor }
    }

    /// `w_k = sum over later slots i >= k of prod over slots up to i of (1 - alpha) e^-l + alpha`.
    fn dpace(&self, alpha: f64, losses: &[f64]) -> Vec<f64> {
        let smoothed = |index: usize| (1.0 - alpha) * (-losses[index]).exp() + alpha;
        let in_block = |block: usize| -> Vec<usize> {
            (0..self.slots.len()).filter(|&index| self.slots[index].block == block).collect()
        };
        (0..self.slots.len())
            .map(|index| {
                let block = in_block(self.slots[index].block);
                let later = block.iter().filter(|&&i| self.slots[i].k >= self.slots[index].k);
                later
                    .map(|&i| {
                        let earlier = block.iter().filter(|&&j| self.slots[j].k <= self.slots[i].k);
                        earlier.map(|&j| smoothed(j)).product::<f64>()
                    })
                    .sum()
            })
            .collect()
    }

    /// The loss at `hidden`, given the constants.
    pub(crate) fn loss(
        &self,
        objective: &Objective,
        frozen: &Frozen,
        (hidden, width): (&[f64], usize),
    ) -> f64 {
        let distributions = self.distributions(objective.labels, hidden, width);
        let mut sum = 0.0;
        for (&(term, coefficient), weights) in objective.terms.iter().zip(&frozen.weights) {
            for (index, slot) in distributions.iter().enumerate() {
                sum += coefficient * weights[index] * slot.loss(term, frozen.mixing[index]);
            }
        }
        sum / frozen.divisor
    }
}
