//! One rank's model, gradients and optimizer, and the training step.

use dflash_dist::{Communicator, Pending};
use dflash_draft::objective::{HeadPass, Objective, Statistics};
use dflash_draft::{Draft, DraftViews, Keep};
use dflash_run::StreamCounters;
use dflash_tensor::catch_oom;
use dflash_torch_sys::trace;
use tch::{Device, Kind, Tensor};

use crate::Error;
use crate::assembly::{AssembledRow, TrainedRow};
use crate::batch::{Batch, BatchMaker};
use crate::master_weights::MasterWeights;
use crate::optimizer::{StepGate, gradient_norm};
use crate::readback::{self, Control, Finished, Outcome, StepOutcome, Unread};
use crate::vote::{Vote, add_up};

/// Keeps a loss finite if its weights underflow.
const LEAST_DIVISOR: f64 = 1e-12;

/// Keeps the clipping factor finite (PyTorch's value).
const CLIP_EPSILON: f64 = 1e-6;

/// Everything that a rank trains with.
#[derive(Debug)]
pub(crate) struct Trainer {
    pub(crate) draft: Draft,
    pub(crate) master_weights: MasterWeights,
    pub(crate) objective: Objective,
    pub(crate) batches: BatchMaker,
    /// What the forward pass keeps for the backward pass.
    pub(crate) keep: Keep,
    /// Who decides about a step: host or device.
    pub(crate) control: Control,
    pub(crate) gradient: Tensor,
    gradient_views: DraftViews,
}

/// A rank's contribution to a step other than gradients; summed over ranks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StepSums {
    /// Tokens of the packed rows.
    pub(crate) tokens: f64,
    /// Samples of the packed rows.
    pub(crate) samples: f64,
    /// Samples left out.
    pub(crate) skipped: f64,
    /// Arithmetic that the rows required.
    pub(crate) flops: f64,
    /// Counts of the streams since the process started; they fetch ahead, so also between steps.
    pub(crate) stream: StreamCounters,
}

/// Effect of a step on the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// They changed.
    Moved,
    /// None: loss or gradient is not finite.
    NotFinite,
    /// None: no rank had a supervised slot.
    Empty,
    /// None: the ranks voted it void.
    Void,
}

/// A step in progress: gradients and counts of the micro-batches so far.
pub(crate) struct Step<'a> {
    trainer: &'a mut Trainer,
    communicator: &'a dyn Communicator,
    statistics: Statistics,
    /// Slots that carry loss.
    slots: f64,
    reductions: Vec<Reduction>,
}

impl Trainer {
    pub(crate) fn new(
        draft: Draft,
        master_weights: MasterWeights,
        objective: Objective,
        batches: BatchMaker,
    ) -> Self {
        let (gradient, gradient_views) = draft.zero_gradients();
        let (keep, control) = (Keep::default(), Control::of(draft.device()));
        Self { draft, master_weights, objective, batches, keep, control, gradient, gradient_views }
    }

    pub(crate) fn begin<'a>(&'a mut self, communicator: &'a dyn Communicator) -> Step<'a> {
        let _part = trace::part("optimizer");
        let _ = self.gradient.zero_();
        let statistics = no_statistics(&self.draft, self.draft.device());
        Step { trainer: self, communicator, statistics, slots: 0.0, reductions: Vec::new() }
    }

    /// Statistics of `draft` on one row, without gradients; `None` without a supervised slot.
    pub(crate) fn validate(
        &self,
        draft: &Draft,
        row: AssembledRow,
    ) -> Result<Option<Statistics>, Error> {
        let Some(trained) = row.trained else { return Ok(None) };
        let batch = self.batches.make(draft, trained)?;
        let (hidden_nh, _) = draft.forward_keeping(&batch.input, Keep::Inputs);
        let lm_head_vh = &self.batches.lm_head_vh;
        let pass = HeadPass { head: draft.head(), lm_head_vh, gradient: None };
        let target_distribution = batch.target_distribution.as_ref();
        let output = self.objective.evaluate(pass, &hidden_nh, &batch.labels, target_distribution);
        Ok(Some(output.statistics))
    }

    /// Forward and backward pass of one batch; accumulates gradients of the loss numerator.
    fn accumulate(&mut self, batch: &Batch, finished: &mut dyn FnMut(usize)) -> Statistics {
        let (hidden_nh, saved) = self.draft.forward_keeping(&batch.input, self.keep);
        let pass = HeadPass {
            head: self.draft.head(),
            lm_head_vh: &self.batches.lm_head_vh,
            gradient: Some(&self.gradient_views.head),
        };
        let part = trace::part("loss");
        let target_distribution = batch.target_distribution.as_ref();
        let output = self.objective.evaluate(pass, &hidden_nh, &batch.labels, target_distribution);
        drop((hidden_nh, part));
        let gradients = &self.gradient_views;
        self.draft.backward(output.dhidden_nh, &batch.input, saved, gradients, finished);
        output.statistics
    }
}

impl Step<'_> {
    /// The trainer.
    pub(crate) fn trainer(&self) -> &Trainer {
        self.trainer
    }

    /// Builds a batch from a row.
    pub(crate) fn batch(&self, row: TrainedRow) -> Result<Batch, Error> {
        self.trainer.batches.make(&self.trainer.draft, row)
    }

    /// Adds a micro-batch; `None` if it has no supervised slot. With `last`, each bucket of the
    /// gradient is all-reduced as soon as the backward pass has finished it.
    ///
    /// The inner error is the allocator's message if memory ran out. The other ranks are then in
    /// the middle of their all-reduces, so this rank joins all of them, and the step must be void.
    pub(crate) fn add(
        &mut self,
        batch: Option<Batch>,
        last: bool,
    ) -> Result<Result<(), String>, Error> {
        let mut sums = GradientSums::new(self.communicator, self.trainer);
        let mut added = Ok(());
        if let Some(batch) = batch {
            self.slots += batch.labels.slots().len() as f64;
            let trainer = &mut *self.trainer;
            let mut finished = |bucket: usize| {
                if last {
                    sums.start(bucket);
                }
            };
            match catch_oom(|| trainer.accumulate(&batch, &mut finished)) {
                Ok(statistics) => self.statistics.add(&statistics),
                Err(reason) => added = Err(reason),
            }
        }
        if last {
            sums.start_rest();
        }
        self.reductions.extend(sums.reductions);
        sums.failure.map_or(Ok(added), |error| Err(error.into()))
    }

    /// Sums over the ranks, divides, clips and updates the parameters at learning rate `rate`.
    pub(crate) fn finish(
        mut self,
        mut sums: StepSums,
        vote: Vote,
        rate: f64,
        max_norm: f64,
    ) -> Result<Finished, Error> {
        let _part = trace::part("optimizer");
        let control = self.trainer.control;
        // On the host, with a timeout that detects a hanging rank before the GPU waits for it.
        let StepSums { tokens, samples, skipped, flops, stream } = &mut sums;
        let mut counts = stream.counts().map(|count| *count as f64);
        let own = [tokens, samples, skipped, flops, &mut self.slots];
        let mut numbers: Vec<_> = own.into_iter().chain(&mut counts).collect();
        let vector = match control {
            Control::Host => Some(self.statistics.sums_mut()),
            Control::Device => None,
        };
        let vote = add_up(self.communicator, vote, &mut numbers, vector)?;
        stream.counts().into_iter().zip(counts).for_each(|(count, sum)| *count = sum as u64);
        for reduction in std::mem::take(&mut self.reductions) {
            reduction.wait()?;
        }
        let outcome = match control {
            _ if vote.is_void() => self.unmoved(Effect::Void, f64::NAN),
            Control::Host => Outcome::Known(self.decide(rate, max_norm)?),
            Control::Device if self.slots == 0.0 => self.unmoved(Effect::Empty, 0.0),
            Control::Device => {
                let metrics = self.trainer.draft.head().metrics();
                let record = self.let_device_decide(rate, max_norm)?;
                Outcome::Unread(Unread { record, metrics })
            }
        };
        Ok(Finished { sums, vote, outcome })
    }

    /// The outcome of a step that the host ends without consulting the device.
    fn unmoved(&self, effect: Effect, gradient_norm: f64) -> Outcome {
        let statistics = no_statistics(&self.trainer.draft, Device::Cpu);
        Outcome::Known(StepOutcome { effect, gradient_norm, statistics })
    }

    /// Updates the parameters, unless the denominator is 0 or the norm is not finite.
    fn decide(mut self, rate: f64, max_norm: f64) -> Result<StepOutcome, Error> {
        let (effect, gradient_norm) = match readback::value(&self.statistics.denominator()) {
            // momentum and weight decay would change parameters without data
            0.0 => (Effect::Empty, 0.0),
            denominator => self.apply(denominator, rate, max_norm)?,
        };
        Ok(StepOutcome { effect, gradient_norm, statistics: self.statistics })
    }

    /// Updates the parameters with the summed gradient; also returns its norm.
    fn apply(
        &mut self,
        denominator: f64,
        rate: f64,
        max_norm: f64,
    ) -> Result<(Effect, f64), Error> {
        let Self { trainer, communicator, .. } = self;
        let divisor = denominator + trainer.objective.denominator.epsilon();
        // not `max`, which would lose a NaN
        let divisor = if divisor < LEAST_DIVISOR { LEAST_DIVISOR } else { divisor };
        let own = readback::value(&gradient_norm(&trainer.gradient)) / divisor;
        let norm = of_rank_0(own, *communicator)?;
        // The norm depends on all ranks' sums, so it is valid only if the group is.
        communicator.check()?;
        if !norm.is_finite() {
            return Ok((Effect::NotFinite, norm));
        }
        let clip = (max_norm / (norm + CLIP_EPSILON)).min(1.0);
        let _ = trainer.gradient.g_mul_scalar_(clip / divisor);
        trainer.master_weights.step(&trainer.gradient, rate);
        trainer.master_weights.publish(&trainer.draft, *communicator)?;
        Ok((Effect::Moved, norm))
    }

    /// The same decided by the device, without waiting for it; returns the record for
    /// [`Outcome::Unread`].
    fn let_device_decide(mut self, rate: f64, max_norm: f64) -> Result<Tensor, Error> {
        let communicator = self.communicator;
        exchange(communicator, self.statistics.sums_mut(), |sums| {
            communicator.all_reduce_sum(sums)
        })?;
        let Self { trainer, statistics, .. } = self;
        let denominator = statistics.denominator().view([1]);
        let epsilon = trainer.objective.denominator.epsilon();
        let divisor = (&denominator + epsilon).clamp_min(LEAST_DIVISOR);
        let own = gradient_norm(&trainer.gradient).to_kind(Kind::Double).view([1]);
        let mut norm = own / &divisor;
        exchange(communicator, &mut norm, |norm| communicator.broadcast(norm, 0))?;
        // This covers failures known so far; the reader checks again once it has seen a value.
        communicator.check()?;
        let clip = ((&norm + CLIP_EPSILON).reciprocal() * max_norm).clamp_max(1.0);
        let skip = norm.isfinite().logical_not().logical_or(&denominator.eq(0.0));
        let gate = StepGate::new(&(divisor / clip), skip);
        trainer.master_weights.step_on_device(&trainer.gradient, rate, &gate)?;
        trainer.master_weights.publish(&trainer.draft, communicator)?;
        Ok(Tensor::cat(&[statistics.sums(), &norm], 0))
    }
}

/// Empty statistics for `draft`, on `device`.
pub(crate) fn no_statistics(draft: &Draft, device: Device) -> Statistics {
    Statistics::zero(draft.config().block_size, draft.head().metrics(), device)
}

/// Runs `collective` on `tensor`, via the host if the communicator does not accept its device.
fn exchange(
    communicator: &dyn Communicator,
    tensor: &mut Tensor,
    collective: impl FnOnce(&mut Tensor) -> Result<(), dflash_dist::Error>,
) -> Result<(), dflash_dist::Error> {
    if communicator.takes(tensor.device()) {
        return collective(tensor);
    }
    let mut host = readback::to_host(tensor);
    collective(&mut host)?;
    tensor.copy_(&host);
    Ok(())
}

/// Rank 0's `value`. With different thread counts, equal gradients have norms that differ in the
/// last bits, and ranks would clip or refuse differently.
fn of_rank_0(value: f64, communicator: &dyn Communicator) -> Result<f64, Error> {
    let mut value = Tensor::from_slice(&[value]);
    communicator.broadcast(&mut value, 0)?;
    Ok(readback::value(&value))
}

/// All-reduces of a gradient, started bucket by bucket in backward order, last to first.
struct GradientSums<'a> {
    communicator: &'a dyn Communicator,
    gradient: Tensor,
    /// Offset and length of each bucket.
    buckets: Vec<(i64, i64)>,
    reductions: Vec<Reduction>,
    /// After a failure no more sums are started.
    failure: Option<dflash_dist::Error>,
}

impl<'a> GradientSums<'a> {
    fn new(communicator: &'a dyn Communicator, trainer: &Trainer) -> Self {
        let buckets = trainer.draft.layout().buckets().to_vec();
        let gradient = trainer.gradient.shallow_clone();
        Self { communicator, gradient, buckets, reductions: Vec::new(), failure: None }
    }

    fn start(&mut self, bucket: usize) {
        if self.failure.is_some() {
            return;
        }
        let (offset, elements) = self.buckets[bucket];
        match Reduction::start(self.communicator, self.gradient.narrow(0, offset, elements)) {
            Ok(reduction) => self.reductions.push(reduction),
            Err(error) => self.failure = Some(error),
        }
    }

    /// Starts the all-reduces of buckets that this rank's backward pass never reached, so that
    /// peers do not hang.
    fn start_rest(&mut self) {
        (0..self.buckets.len() - self.reductions.len()).rev().for_each(|bucket| self.start(bucket));
    }
}

/// An all-reduce in progress on one bucket.
struct Reduction {
    pending: Box<dyn Pending>,
    /// (device tensor, host copy) if the collective works on host memory only.
    staged: Option<(Tensor, Tensor)>,
}

impl Reduction {
    fn start(communicator: &dyn Communicator, part: Tensor) -> Result<Self, dflash_dist::Error> {
        if communicator.takes(part.device()) {
            return Ok(Self { pending: communicator.start_all_reduce_sum(&part)?, staged: None });
        }
        let host = readback::to_host(&part);
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

#[cfg(test)]
mod tests {
    use dflash_target::TargetIo;
    use dflash_tensor::DeviceKind;
    use tch::Kind;

    use super::*;
    use crate::fake::Beside;
    use crate::shards::Rank;
    use crate::world::World;
    use crate::{Prepared, setup};

    #[test]
    fn what_a_backward_pass_did_not_come_to_is_summed_all_the_same() {
        let world = World::new();
        let config = world.config("out");
        let prepared = Prepared::open(&config).unwrap();
        let head = TargetIo::load(&config.target_dir, Device::Cpu, Kind::Float).unwrap();
        let rank = Rank { rank: 0, world_size: 1 };
        let trainer = setup::trainer(&prepared, head, DeviceKind::CPU_F32, rank).unwrap();
        let buckets = trainer.draft.layout().buckets();
        let parts: Vec<usize> =
            buckets.iter().rev().map(|&(_, elements)| elements as usize).collect();
        for finished in 0..=buckets.len() {
            let others = Beside::default();
            let mut sums = GradientSums::new(&others, &trainer);
            (buckets.len() - finished..buckets.len()).rev().for_each(|bucket| sums.start(bucket));
            sums.start_rest();
            assert!(sums.failure.is_none());
            assert_eq!(*others.started.lock().unwrap(), parts, "{finished} finished before");
        }
    }
}
