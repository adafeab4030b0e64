//! Every loss compared with its definition and with central differences, in float64; float32 on
//! both paths compared with that.
//!
//! The definitions are repeated here, slot by slot in plain Rust, so that an error in the tensor
//! code shows in the value and one in its closed-form gradients shows in the differences. The
//! weights of D-PACE and the mixing weight of `lk` are held at their values at the point of the
//! gradient, as the method prescribes: they carry no gradient.

#[path = "gradients/reference.rs"]
mod reference;

use dflash_draft::BlockShape;
use dflash_draft::objective::{
    BlockLabels, Confidence, Denominator, DraftVocabulary, ElementLoss, HeadPass, LabelSource,
    LabelledRow, Objective, TargetDistribution, Weighting,
};
use dflash_tensor::{Kernels, LogitTransform};
use dflash_test_support::alone;
use reference::{Matrix, Reference, Slot};
use tch::{Device, Kind, Tensor, no_grad};

const HIDDEN: usize = 5;
const VOCABULARY: usize = 11;
const BLOCK: usize = 4;

/// Half the step of the differences: float64 rounding and the cubic term are both near 1e-10.
const STEP: f64 = 1e-5;
const TOLERANCE: f64 = 1e-7;

/// A packed row with a draft's hidden states and the target's.
struct World {
    input_ids: Vec<i64>,
    loss_mask: Vec<bool>,
    document_starts: Vec<usize>,
    anchors: Vec<usize>,
    hidden_nh: Tensor,
    head_vh: Tensor,
    normed_th: Tensor,
    vocabulary: Option<DraftVocabulary>,
}

impl World {
    fn new(seed: i64, pruned: bool) -> Self {
        let _alone = alone();
        tch::manual_seed(seed);
        let normal =
            |rows: usize| Tensor::randn([rows as i64, HIDDEN as i64], (Kind::Double, Device::Cpu));
        let tokens = 16;
        let anchors = vec![0, 3, 6, 9, 11];
        let full_vh = normal(VOCABULARY);
        let selected = vec![0, 2, 3, 5, 7, 8, 10];
        let vocabulary = pruned.then(|| DraftVocabulary::new(selected.clone(), VOCABULARY));
        let head_vh = match &vocabulary {
            Some(_) => full_vh.index_select(0, &Tensor::from_slice(&selected)),
            None => full_vh,
        };
        Self {
            input_ids: (0..tokens).map(|t| (t * t + 3 * t) % VOCABULARY as i64).collect(),
            // a gap in a block, and a block that ends with the document
            loss_mask: (0..tokens).map(|t| t != 2 && t != 13).collect(),
            document_starts: vec![0, 8, tokens as usize],
            hidden_nh: normal(anchors.len() * BLOCK),
            anchors,
            head_vh,
            normed_th: normal(tokens as usize),
            vocabulary,
        }
    }

    fn labels(&self) -> BlockLabels {
        let row = LabelledRow {
            input_ids: &self.input_ids,
            loss_mask: &self.loss_mask,
            document_starts: &self.document_starts,
        };
        BlockLabels::new(row, &self.anchors, BlockShape::fill_in(BLOCK), self.vocabulary.as_ref())
    }

    /// Loss, its denominator and the gradient of their quotient, [N, H], as seen by the trainer.
    fn evaluate(&self, objective: &Objective, kind: Kind) -> (f64, f64, Vec<f64>) {
        let labels = self.labels();
        let rows = labels.distribution_rows_on(Device::Cpu);
        let target_distribution =
            objective.needs_target_distribution().then(|| TargetDistribution {
                normed_rh: self.normed_th.to_kind(kind),
                rows_m: rows,
                head_vh: self.head_vh.to_kind(kind),
                output: LogitTransform::identity(),
            });
        let (hidden, head) = (self.hidden_nh.to_kind(kind), self.head_vh.to_kind(kind));
        let output = objective.evaluate(
            HeadPass::plain(&head),
            &hidden,
            &labels,
            target_distribution.as_ref(),
        );
        let epsilon = objective.denominator.epsilon();
        let report = output.statistics.report(epsilon);
        let divisor = report.denominator + epsilon;
        let gradient = output.dhidden_nh / divisor;
        assert_eq!(gradient.kind(), kind);
        let gradient = gradient.to_kind(Kind::Double).view([-1]);
        (report.loss, divisor, Vec::try_from(gradient).unwrap())
    }

    /// The same row for the definitions: supervised slots, labels, and predicting target rows.
    fn reference(&self) -> Reference {
        let rows = |x: &Tensor| -> Matrix {
            let width = x.size()[1] as usize;
            let flat = Vec::<f64>::try_from(x.view([-1])).unwrap();
            flat.chunks(width).map(<[f64]>::to_vec).collect()
        };
        let mut slots = Vec::new();
        for (block, &anchor) in self.anchors.iter().enumerate() {
            let end = *self.document_starts.iter().find(|&&start| start > anchor).unwrap();
            for k in 1..BLOCK {
                let position = anchor + k;
                if position >= end || !self.loss_mask[position] {
                    continue;
                }
                let token = self.input_ids[position];
                let of_draft = |v: &DraftVocabulary| {
                    v.selected().iter().position(|&selected| selected == token)
                };
                let label = self.vocabulary.as_ref().map_or(Some(token as usize), of_draft);
                if let Some(label) = label {
                    slots.push(Slot { block, k, label, distribution_row: position - 1 });
                }
            }
        }
        Reference {
            block_size: BLOCK,
            slots,
            head: rows(&self.head_vh),
            target: rows(&self.normed_th),
            blocks: self.supervised_blocks(),
        }
    }

    fn supervised_blocks(&self) -> usize {
        let supervised = |anchor: usize| {
            let end = *self.document_starts.iter().find(|&&start| start > anchor).unwrap();
            (anchor + 1..end.min(anchor + BLOCK)).any(|position| self.loss_mask[position])
        };
        self.anchors.iter().filter(|&&anchor| supervised(anchor)).count()
    }
}

fn check(world: &World, objective: &Objective) {
    let (loss, divisor, gradient) = world.evaluate(objective, Kind::Double);
    let mut hidden = Vec::<f64>::try_from(world.hidden_nh.view([-1])).unwrap();
    let reference = world.reference();
    let frozen = reference.frozen(objective, &hidden, HIDDEN);
    let what = format!("{objective:?}, pruned {}", world.vocabulary.is_some());
    assert!((divisor - frozen.divisor).abs() <= 1e-12 * divisor, "divisor of {what}");
    let expected = reference.loss(objective, &frozen, (&hidden, HIDDEN));
    assert!((loss - expected).abs() <= 1e-10, "{what}: loss {loss}, by definition {expected}");
    for index in 0..hidden.len() {
        let here = hidden[index];
        let mut at = |x: f64| {
            hidden[index] = x;
            reference.loss(objective, &frozen, (&hidden, HIDDEN))
        };
        let difference = (at(here + STEP) - at(here - STEP)) / (2.0 * STEP);
        hidden[index] = here;
        let found = gradient[index];
        assert!(
            (found - difference).abs() <= TOLERANCE * difference.abs().max(1.0),
            "{what}: element {index} is {found}, by differences {difference}"
        );
    }
    for kernels in [Kernels::Fast, Kernels::Portable, Kernels::Emulated] {
        let objective = Objective { kernels, ..objective.clone() };
        let (narrow_loss, _, narrow) = world.evaluate(&objective, Kind::Float);
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b.abs().max(1.0);
        assert!(close(narrow_loss, loss), "{what} {kernels:?}: {narrow_loss}, in float64 {loss}");
        for (found, expected) in narrow.iter().zip(&gradient) {
            assert!(close(*found, *expected), "{what} {kernels:?}: {found}, in float64 {expected}");
        }
    }
}

fn weightings() -> [Weighting; 3] {
    [
        Weighting::Decay { gamma: 4.0 },
        Weighting::Dpace { alpha: 0.5, confidence: Confidence::CrossEntropy },
        Weighting::Dpace { alpha: 0.3, confidence: Confidence::Term },
    ]
}

/// Every weighting, denominator and vocabulary for one sum of terms.
fn check_all(terms: &[(ElementLoss, f64)], labels: LabelSource) {
    no_grad(|| {
        for (seed, pruned) in [(1, false), (2, true)] {
            let world = World::new(seed, pruned);
            for weighting in weightings() {
                let all = [Denominator::Weights, Denominator::Blocks, Denominator::MaskedSlots];
                for denominator in all {
                    // small chunks: a block or two each
                    let objective = Objective {
                        terms: terms.to_vec(),
                        weighting,
                        denominator,
                        labels,
                        chunk_bytes: 4 * VOCABULARY * 6 * 5,
                        kernels: Kernels::Fast,
                    };
                    check(&world, &objective);
                }
            }
        }
    });
}

fn check_term(term: ElementLoss) {
    for labels in [LabelSource::Data, LabelSource::TargetArgmax] {
        check_all(&[(term, 1.0)], labels);
    }
}

#[test]
fn cross_entropy_on_data_and_on_the_target_s_argmax() {
    check_term(ElementLoss::CrossEntropy);
}

#[test]
fn kl() {
    check_term(ElementLoss::Kl);
}

#[test]
fn reverse_kl() {
    check_term(ElementLoss::ReverseKl);
}

#[test]
fn jensen_shannon() {
    check_term(ElementLoss::Jsd);
}

#[test]
fn total_variation() {
    check_term(ElementLoss::Tv);
}

#[test]
fn negative_log_acceptance() {
    check_term(ElementLoss::Nla);
}

#[test]
fn lk_with_its_mixing_weight_held() {
    check_term(ElementLoss::Lk);
}

#[test]
fn weighted_sums() {
    use ElementLoss::{CrossEntropy, Jsd, Kl, Lk, Nla, ReverseKl, Tv};
    let sums: [&[(ElementLoss, f64)]; 4] = [
        &[(CrossEntropy, 0.5), (Kl, 1.0)],
        &[(CrossEntropy, 2.5)],
        &[(Tv, 0.1), (CrossEntropy, 0.9), (Nla, 0.3)],
        &[(Jsd, 0.7), (ReverseKl, 0.2), (Lk, 1.5), (CrossEntropy, 0.1)],
    ];
    for terms in sums {
        for labels in [LabelSource::Data, LabelSource::TargetArgmax] {
            check_all(terms, labels);
        }
    }
}
