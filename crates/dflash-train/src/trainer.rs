//! One rank's model, gradients and optimizer, and what a step does with them.

use dflash_dist::{Communicator, Pending};
use dflash_model::draft::{Draft, DraftViews, Keep};
use dflash_model::objective::{Objective, Statistics};
use dflash_run::StreamCounters;
use tch::{Device, Tensor};

use crate::Error;
use crate::batch::{Batch, BatchMaker};
use crate::masters::Masters;
use crate::optimizer::gradient_norm;
use crate::rows::LoadedRow;
use crate::vote::{Vote, add_up};

/// Keeps a loss finite whose weights underflow.
const LEAST_DIVISOR: f64 = 1e-12;

/// Keeps the clipping factor finite (PyTorch's constant).
const CLIP_EPSILON: f64 = 1e-6;

/// Everything a rank trains with.
#[derive(Debug)]
pub(crate) struct Trainer {
    pub(crate) draft: Draft,
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
pub(crate) struct StepSums {
    /// Tokens of the packed rows.
    pub(crate) tokens: f64,
    /// Samples of the packed rows.
    pub(crate) samples: f64,
    /// Samples left out.
    pub(crate) skipped: f64,
    /// Arithmetic that the rows needed.
    pub(crate) flops: f64,
    /// What the streams have counted so far, also between the steps: they fetch ahead.
    pub(crate) stream: StreamCounters,
}

/// What a step did to the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// It moved them.
    Moved,
    /// Nothing: loss or gradient is not finite.
    NotFinite,
    /// Nothing: no rank had a slot to learn from.
    Empty,
    /// Nothing: the ranks voted it void.
    Void,
}

/// A finished step.
#[derive(Debug)]
pub(crate) struct StepResult {
    /// Global norm of the gradient before clipping, as rank 0 finds it.
    pub(crate) gradient_norm: f64,
    pub(crate) effect: Effect,
    /// Summed over ranks.
    pub(crate) statistics: Statistics,
    /// Summed over ranks.
    pub(crate) sums: StepSums,
    /// Of all ranks.
    pub(crate) vote: Vote,
}

/// A step under way: gradients and counts of the micro-batches so far.
pub(crate) struct Step<'a> {
    trainer: &'a mut Trainer,
    communicator: &'a dyn Communicator,
    statistics: Statistics,
    reductions: Vec<Reduction>,
}

impl Trainer {
    pub(crate) fn new(
        (draft, masters): (Draft, Masters),
        (objective, batches): (Objective, BatchMaker),
    ) -> Self {
        let (gradient, gradient_views) = draft.zero_gradients();
        let keep = Keep::default();
        Self { draft, masters, objective, batches, keep, gradient, gradient_views }
    }

    pub(crate) fn begin<'a>(&'a mut self, communicator: &'a dyn Communicator) -> Step<'a> {
        let _ = self.gradient.zero_();
        let statistics = Statistics::zero(self.draft.config().block_size, self.draft.device());
        Step { trainer: self, communicator, statistics, reductions: Vec::new() }
    }

    /// The figures of `draft` on one row, without gradients; `None` when there is nothing to learn.
    pub(crate) fn validate(&self, draft: &Draft, row: &LoadedRow) -> Option<Statistics> {
        let batch = self.batches.make(draft, row)?;
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
    pub(crate) fn batch(&self, row: &LoadedRow) -> Option<Batch> {
        self.trainer.batches.make(&self.trainer.draft, row)
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
        if let Some(batch) = batch {
            let finished = if last { &mut finished as &mut dyn FnMut(usize) } else { &mut |_| () };
            self.statistics.add(&self.trainer.accumulate(batch, finished));
        } else if last {
            // the other ranks reduce: so must this one, in the same order
            (0..buckets.len()).rev().for_each(&mut finished);
        }
        self.reductions.extend(reductions);
        failure.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Sums over the ranks, divides, clips and moves the parameters by `rate`.
    pub(crate) fn finish(
        mut self,
        (mut sums, vote): (StepSums, Vote),
        (rate, max_norm): (f64, f64),
    ) -> Result<StepResult, Error> {
        // On the host and with a timeout, so that a rank that hangs is found before the GPU waits
        // for it.
        let StepSums { tokens, samples, skipped, flops, stream } = &mut sums;
        let mut counts = stream.counts().map(|count| *count as f64);
        let mut numbers: Vec<_> =
            [tokens, samples, skipped, flops].into_iter().chain(&mut counts).collect();
        let vector = self.statistics.sums_mut();
        let vote = add_up(self.communicator, vote, &mut numbers, Some(vector))?;
        stream.counts().into_iter().zip(counts).for_each(|(count, sum)| *count = sum as u64);
        for reduction in std::mem::take(&mut self.reductions) {
            reduction.wait()?;
        }
        let (effect, gradient_norm) = match self.statistics.denominator().double_value(&[]) {
            _ if vote.is_void() => (Effect::Void, f64::NAN),
            // momentum and decay would move what nothing was learned about
            0.0 => (Effect::Empty, 0.0),
            denominator => self.apply(denominator, (rate, max_norm))?,
        };
        let statistics = self.statistics;
        Ok(StepResult { gradient_norm, effect, statistics, sums, vote })
    }

    /// Moves the parameters along the summed gradient; returns its norm too.
    fn apply(
        &mut self,
        denominator: f64,
        (rate, max_norm): (f64, f64),
    ) -> Result<(Effect, f64), Error> {
        let Self { trainer, communicator, .. } = self;
        let divisor = denominator + trainer.objective.denominator.epsilon();
        // not `max`, which would lose a NaN
        let divisor = if divisor < LEAST_DIVISOR { LEAST_DIVISOR } else { divisor };
        let own = gradient_norm(&trainer.gradient).double_value(&[]) / divisor;
        let norm = of_rank_0(own, *communicator)?;
        if !norm.is_finite() {
            return Ok((Effect::NotFinite, norm));
        }
        let clip = (max_norm / (norm + CLIP_EPSILON)).min(1.0);
        let _ = trainer.gradient.g_mul_scalar_(clip / divisor);
        trainer.masters.step(&trainer.gradient, rate);
        trainer.masters.publish(&trainer.draft, *communicator)?;
        Ok((Effect::Moved, norm))
    }
}

/// Rank 0's `value`. Equal gradients have norms that differ in their last bits where another number
/// of threads adds them up, and then ranks would clip, or refuse, differently.
fn of_rank_0(value: f64, communicator: &dyn Communicator) -> Result<f64, Error> {
    let mut value = Tensor::from_slice(&[value]);
    communicator.broadcast(&mut value, 0)?;
    Ok(value.double_value(&[]))
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
