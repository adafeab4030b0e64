//! Sums that steps accumulate on the device and read once per logging interval.
//!
//! The vector is `[loss, denominator, accepted, blocks, correct per slot.., supervised per
//! slot..]`, followed by sum and weight of each of the head's metrics, in float64: one small tensor
//! to add over micro-batches and to all-reduce over ranks.

use tch::{Device, Kind, Tensor};

use super::element::ChunkOutput;
use super::labels::BlockLabels;
use super::placed::Placed;
use super::weight::Denominator;
use crate::draft::{Head, MetricSums};

const DENOMINATOR: i64 = 1;
const BLOCKS: i64 = 3;
/// Number of elements before the per-slot counts.
const HEAD: i64 = 4;

/// Additive sums over packed rows.
#[derive(Debug)]
pub struct Statistics {
    sums: Tensor,
    /// Names of the head's metrics.
    metrics: &'static [&'static str],
}

/// [`Statistics`] on the host, as ratios; NaN without data.
#[derive(Clone, Debug, PartialEq)]
pub struct StatisticsReport {
    /// Weighted loss over its denominator.
    pub loss: f64,
    /// The summed denominator.
    pub denominator: f64,
    /// Share of supervised slots whose argmax is the label.
    pub accuracy: f64,
    /// Accuracy by slot of a block; `None` if no such slot was supervised.
    pub accuracy_by_slot: Vec<Option<f64>>,
    /// Mean over blocks of 1 + the number of leading correct slots.
    pub expected_acceptance_length: f64,
    /// Number of supervised slots.
    pub supervised: u64,
    /// Number of blocks with a supervised slot.
    pub blocks: u64,
    /// The head's metrics.
    pub of_head: Vec<(&'static str, f64)>,
}

impl Statistics {
    /// Zero sums.
    pub fn zero(block_size: usize, metrics: &'static [&'static str], device: Device) -> Self {
        let elements = HEAD + 2 * (block_size + metrics.len()) as i64;
        Self { sums: Tensor::zeros([elements], (Kind::Double, device)), metrics }
    }

    /// Wraps sums obtained from [`Self::sums`], possibly on another device.
    pub fn from_sums(sums: Tensor, metrics: &'static [&'static str]) -> Self {
        Self { sums, metrics }
    }

    /// Zero sums with the same layout.
    pub fn cleared(&self) -> Self {
        Self { sums: self.sums.zeros_like(), metrics: self.metrics }
    }

    /// Adds another row's or rank's sums.
    pub fn add(&mut self, other: &Self) {
        let _ = self.sums.g_add_(&other.sums);
    }

    /// The vector of sums.
    pub fn sums(&self) -> &Tensor {
        &self.sums
    }

    /// The vector of sums, for all-reduce.
    pub fn sums_mut(&mut self) -> &mut Tensor {
        &mut self.sums
    }

    /// Number of blocks with a supervised slot. Waits for the device if the sums are on one.
    pub fn blocks(&self) -> u64 {
        self.sums.double_value(&[BLOCKS]) as u64
    }

    /// Summed loss denominator, a float64 scalar on the device.
    pub fn denominator(&self) -> Tensor {
        self.sums.get(DENOMINATOR)
    }

    /// Copies the sums to the host; `epsilon` is [`Denominator::epsilon`].
    pub fn report(&self, epsilon: f64) -> StatisticsReport {
        let sums = Vec::<f64>::try_from(self.sums.to_device(Device::Cpu))
            .expect("the sums are a float64 vector");
        let (head, rest) = sums.split_at(HEAD as usize);
        let (slots, own) = rest.split_at(rest.len() - 2 * self.metrics.len());
        let (correct, supervised) = slots.split_at(slots.len() / 2);
        let ratio = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { f64::NAN };
        let total: f64 = supervised.iter().sum();
        let figure = |(&name, own): (&&'static str, &[f64])| (name, ratio(own[0], own[1]));
        StatisticsReport {
            loss: ratio(head[0], head[1] + epsilon),
            denominator: head[1],
            accuracy: ratio(correct.iter().sum(), total),
            accuracy_by_slot: correct
                .iter()
                .zip(supervised)
                .map(|(&right, &all)| (all > 0.0).then(|| right / all))
                .collect(),
            expected_acceptance_length: ratio(head[2], head[3]),
            supervised: total as u64,
            blocks: head[3] as u64,
            of_head: self.metrics.iter().zip(own.chunks(2)).map(figure).collect(),
        }
    }
}

/// A row's sums under construction.
#[derive(Debug)]
pub(super) struct Tally {
    loss_sum: Tensor,
    weight_sum: Tensor,
    /// 1 where the argmax is the label, `[N]`.
    correct_n: Tensor,
    pub(super) metrics: MetricSums,
}

impl Tally {
    pub(super) fn new(labels: &BlockLabels, like: &Tensor, head: &dyn Head) -> Self {
        let device = like.device();
        let slots = (labels.blocks() * labels.block().rows) as i64;
        Self {
            loss_sum: Tensor::zeros([], (Kind::Double, device)),
            weight_sum: Tensor::zeros([], (Kind::Double, device)),
            correct_n: Tensor::zeros([slots], (Kind::Double, device)),
            metrics: MetricSums::zeros(head.metrics().len(), device),
        }
    }

    pub(super) fn add(&mut self, slots_m: &Tensor, output: &ChunkOutput) {
        self.loss_sum += &output.loss_sum;
        self.weight_sum += &output.weight_sum;
        let _ = self.correct_n.index_copy_(0, slots_m, &output.correct_m.to_kind(Kind::Double));
    }

    pub(super) fn finish(
        self,
        labels: &Placed<'_>,
        denominator: Denominator,
        metrics: &'static [&'static str],
    ) -> Statistics {
        let Placed { row, blocks, per_slot_b, .. } = labels;
        let divisor = match denominator {
            Denominator::Weights => self.weight_sum,
            Denominator::Blocks => blocks.shallow_clone(),
            Denominator::MaskedSlots => labels.slots.shallow_clone(),
        };
        let block = row.block();
        let correct_ab = self.correct_n.view([-1, block.rows as i64]);
        let (first, predicting) = (block.first_predicting as i64, block.proposals() as i64);
        let runs = correct_ab.narrow(1, first, predicting).cumprod(1, Kind::Double);
        let accepted = runs.sum(Kind::Double) + blocks;
        let head = Tensor::stack(&[&self.loss_sum, &divisor, &accepted, blocks], 0);
        let mut parts = vec![head, sum_blocks(&correct_ab), per_slot_b.shallow_clone()];
        parts.extend(self.metrics.sums().map(|sum| sum.view([1])));
        Statistics { sums: Tensor::cat(&parts, 0), metrics }
    }
}

fn sum_blocks(x_ab: &Tensor) -> Tensor {
    x_ab.sum_dim_intlist([0i64].as_slice(), false, Kind::Double)
}
