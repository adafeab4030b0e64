//! One rank's model, gradients and optimizer, and what a step does with them.

use dflash_data::PackedRow;
use dflash_dist::{Communicator, Pending};
use dflash_hidden::HiddenStates;
use dflash_model::draft::{Draft, DraftViews, Keep};
use dflash_model::objective::{Objective, Statistics};
use tch::{Device, Tensor};

use crate::Error;
use crate::batch::{Batch, BatchMaker};
use crate::masters::Masters;
use crate::optimizer::gradient_norm;
use crate::rows::LoadedRow;

/// Below this a denominator means that no rank had anything to learn from.
const EMPTY_DENOMINATOR: f64 = 1e-12;

/// Keeps the clipping factor finite (PyTorch's constant).
const CLIP_EPSILON: f64 = 1e-6;

/// Everything a rank trains with.
#[derive(Debug)]
pub(crate) struct Trainer {
    /// All parameters, in the kind of the computation.
    pub(crate) draft: Draft,
    /// This rank's share of them in float32, and what moves them.
    pub(crate) masters: Masters,
    pub(crate) objective: Objective,
    pub(crate) batches: BatchMaker,
    /// What the forward pass keeps for the backward pass.
    pub(crate) keep: Keep,
    gradient: Tensor,
    gradient_views: DraftViews,
}

/// What a rank adds to a step besides gradients; summed over ranks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StepExtras {
    /// Tokens of the packed rows.
    pub(crate) tokens: f64,
    /// Packed rows.
    pub(crate) rows: f64,
    /// Samples left out.
    pub(crate) skipped: f64,
    /// Arithmetic that the rows needed.
    pub(crate) flops: f64,
    /// Ranks that were told to stop.
    pub(crate) stopping: f64,
    /// Ranks that could not get their rows because they were told to stop: the step is void.
    pub(crate) abandoned: f64,
    /// Ranks that could not get their rows for a fault: the step is void, and the run ends.
    pub(crate) failed: f64,
}

/// A finished step.
#[derive(Debug)]
pub(crate) struct StepResult {
    /// Global norm of the gradient before clipping.
    pub(crate) gradient_norm: f64,
    /// Whether the parameters moved.
    pub(crate) applied: bool,
    /// What the loss was divided by, all ranks: 0 where there was nothing to learn.
    pub(crate) denominator: f64,
    /// Summed over ranks.
    pub(crate) statistics: Statistics,
    /// Summed over ranks.
    pub(crate) extras: StepExtras,
}

/// A step in the making: gradients and counts of the micro-batches so far.
pub(crate) struct Step<'a> {
    trainer: &'a mut Trainer,
    communicator: &'a dyn Communicator,
    statistics: Statistics,
    reductions: Vec<Reduction>,
}

impl Trainer {
    /// A trainer of a draft and its masters.
    pub(crate) fn new(
        (draft, masters): (Draft, Masters),
        (objective, batches): (Objective, BatchMaker),
    ) -> Self {
        let (gradient, gradient_views) = draft.zero_gradients();
        let keep = Keep::default();
        Self { draft, masters, objective, batches, keep, gradient, gradient_views }
    }

    /// Begins a step.
    pub(crate) fn begin<'a>(&'a mut self, communicator: &'a dyn Communicator) -> Step<'a> {
        let _ = self.gradient.zero_();
        let statistics = Statistics::zero(self.draft.config().block_size, self.draft.device());
        Step { trainer: self, communicator, statistics, reductions: Vec::new() }
    }

    /// The draft as its checkpoint serves it. All ranks call it.
    pub(crate) fn served(&self, communicator: &dyn Communicator) -> Result<Draft, Error> {
        self.masters.served(&self.draft, communicator)
    }

    /// The figures of `draft` on one row, without gradients; `None` when there is nothing to learn.
    pub(crate) fn validate(&self, draft: &Draft, row: &LoadedRow) -> Option<Statistics> {
        let batch = self.batches.make(draft, &row.row, &row.states, row.epoch)?;
        let (hidden_nh, _) = draft.forward_keeping(&batch.input, Keep::Inputs);
        let head_vh = &self.batches.lm_head_vh;
        let teacher = batch.teacher.as_ref();
        Some(self.objective.evaluate(&hidden_nh, head_vh, &batch.labels, teacher).statistics)
    }

    /// Forward and backward of one batch; gradients of the loss numerator are added up.
    fn accumulate(&mut self, batch: Batch, finished: &mut dyn FnMut(usize)) -> Statistics {
        let Batch { input, labels, teacher, flops: _ } = batch;
        let (hidden_nh, saved) = self.draft.forward_keeping(&input, self.keep);
        let head_vh = &self.batches.lm_head_vh;
        let output = self.objective.evaluate(&hidden_nh, head_vh, &labels, teacher.as_ref());
        drop(hidden_nh);
        let gradients = (&self.gradient_views, finished);
        self.draft.backward(output.dhidden_nh, &input, saved, gradients);
        output.statistics
    }
}

impl Step<'_> {
    /// Turns a row into a batch for this step's draft.
    pub(crate) fn batch(
        &self,
        row: &PackedRow,
        states: &[HiddenStates],
        epoch: u64,
    ) -> Option<Batch> {
        self.trainer.batches.make(&self.trainer.draft, row, states, epoch)
    }

    /// Adds a micro-batch; `None` has nothing to learn from. With `last` each part of the gradient
    /// is summed over the ranks as soon as the backward pass is done with it.
    pub(crate) fn add(&mut self, batch: Option<Batch>, last: bool) -> Result<(), Error> {
        let buckets = self.trainer.draft.layout().buckets().to_vec();
        let gradient = self.trainer.gradient.shallow_clone();
        let communicator = self.communicator;
        let mut failure = None;
        let mut reductions = Vec::new();
        let mut finished = |bucket: usize| {
            let (offset, elements) = buckets[bucket];
            match Reduction::start(communicator, gradient.narrow(0, offset, elements)) {
                Ok(reduction) => reductions.push(reduction),
                Err(error) => failure = Some(error),
            }
        };
        match (batch, last) {
            (Some(batch), true) => {
                let statistics = self.trainer.accumulate(batch, &mut finished);
                self.statistics.add(&statistics);
            }
            (Some(batch), false) => {
                let statistics = self.trainer.accumulate(batch, &mut |_| ());
                self.statistics.add(&statistics);
            }
            // the other ranks reduce: so must this one, in the same order
            (None, true) => (0..buckets.len()).rev().for_each(&mut finished),
            (None, false) => (),
        }
        self.reductions.extend(reductions);
        failure.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Sums over the ranks, divides, clips and moves the parameters by `rate`.
    pub(crate) fn finish(
        mut self,
        extras: StepExtras,
        (rate, max_norm): (f64, f64),
    ) -> Result<StepResult, Error> {
        // On the host and with a timeout, so that a rank that hangs is found before the GPU waits
        // for it.
        let extras = self.reduce_counts(extras)?;
        for reduction in std::mem::take(&mut self.reductions) {
            reduction.wait()?;
        }
        let trainer = self.trainer;
        let epsilon = trainer.objective.denominator.epsilon();
        let denominator = self.statistics.denominator().double_value(&[]);
        let divisor = denominator + epsilon;
        // not `max`, which would lose a NaN
        let divisor = if divisor < EMPTY_DENOMINATOR { EMPTY_DENOMINATOR } else { divisor };
        let gradient_norm = gradient_norm(&trainer.gradient).double_value(&[]) / divisor;
        let void = extras.abandoned > 0.0 || extras.failed > 0.0;
        let applied = gradient_norm.is_finite() && !void;
        if applied {
            let clip = (max_norm / (gradient_norm + CLIP_EPSILON)).min(1.0);
            let _ = trainer.gradient.g_mul_scalar_(clip / divisor);
            trainer.masters.step(&trainer.gradient, rate);
            trainer.masters.publish(&trainer.draft, self.communicator)?;
        }
        let statistics = self.statistics;
        Ok(StepResult { gradient_norm, applied, denominator, statistics, extras })
    }

    /// Sums statistics and extras in one collective.
    fn reduce_counts(&mut self, extras: StepExtras) -> Result<StepExtras, Error> {
        let StepExtras { tokens, rows, skipped, flops, stopping, abandoned, failed } = extras;
        let tail = [tokens, rows, skipped, flops, stopping, abandoned, failed];
        let extra = tail.len() as i64;
        let tail = Tensor::from_slice(&tail);
        let sums = self.statistics.sums_mut();
        let length = sums.size()[0];
        let mut joined = Tensor::cat(&[sums.to_device(Device::Cpu), tail], 0);
        self.communicator.all_reduce_sum(&mut joined)?;
        // They stay on the host, so that reading them waits for no device.
        *sums = joined.narrow(0, 0, length);
        let tail = Vec::<f64>::try_from(joined.narrow(0, length, extra)).expect("float64 numbers");
        let [tokens, rows, skipped, flops, stopping, abandoned, failed] = tail[..] else {
            unreachable!("as many come out as went in")
        };
        Ok(StepExtras { tokens, rows, skipped, flops, stopping, abandoned, failed })
    }
}

/// A part of the gradient being summed over the ranks.
struct Reduction {
    pending: Box<dyn Pending>,
    /// (on the device, on the host) where the collective works on host memory only.
    staged: Option<(Tensor, Tensor)>,
}

impl Reduction {
    fn start(communicator: &dyn Communicator, part: Tensor) -> Result<Self, dflash_dist::Error> {
        if communicator.takes(part.device()) {
            return Ok(Self { pending: communicator.start_all_reduce_sum(&part)?, staged: None });
        }
        let host = part.to_device(Device::Cpu);
        let pending = communicator.start_all_reduce_sum(&host)?;
        Ok(Self { pending, staged: Some((part, host)) })
    }

    fn wait(self) -> Result<(), dflash_dist::Error> {
        self.pending.wait()?;
        if let Some((mut part, host)) = self.staged {
            part.copy_(&host);
        }
        Ok(())
    }
}
