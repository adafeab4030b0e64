//! The float32 state: one rank's share of the master weights, the optimizer's state and the
//! averaged weights.
//!
//! The draft computes with a buffer of its own type. In float32 the master weights are a view of
//! that buffer; in bfloat16 they are separate, and the draft receives them rounded after each step.

use dflash_dist::Communicator;
use dflash_draft::Draft;
use dflash_tensor::checkpoint::{Entry, TensorFile};
use tch::{Kind, Tensor};

use crate::Error;
use crate::checkpoint::MASTER_WEIGHTS;
use crate::optimizer::{Extent, Groups, Optimizer, OptimizerConfig, StateTensor, StepGate};
use crate::readback;
use crate::shards::Shards;

/// Name of the averaged weights in a checkpoint.
pub(crate) const AVERAGE: &str = "average";

/// One rank's share of the float32 state.
#[derive(Debug)]
pub(crate) struct MasterWeights {
    shards: Shards,
    norm_shards: Shards,
    /// The parameters in this rank's share.
    pub(crate) weights: Tensor,
    pub(crate) optimizer: Optimizer,
    pub(crate) average: Option<Average>,
}

/// An exponential moving average of the share's weights.
#[derive(Debug)]
pub(crate) struct Average {
    decay: f64,
    weights: Tensor,
}

impl Average {
    /// Starts at `master_weights`, so no bias correction is needed.
    fn new(decay: f64, master_weights: &Tensor) -> Self {
        Self { decay, weights: master_weights.copy() }
    }

    /// `average = decay * average + (1 - decay) * master_weights`, after each step.
    fn update(&mut self, master_weights: &Tensor) {
        let _ = self.weights.lerp_(master_weights, 1.0 - self.decay);
    }
}

impl MasterWeights {
    /// Splits the float32 draft `fresh` into the draft to compute with, in `kind`, and the master
    /// weights.
    pub(crate) fn new(
        fresh: Draft,
        kind: Kind,
        config: &OptimizerConfig,
        shards: Shards,
    ) -> (Draft, Self) {
        let layout = fresh.layout();
        let groups = Groups::of(layout.parameters(), &shards.own());
        let norm_shards = shards.of_norms(layout);
        let (draft, weights) = match kind {
            Kind::Float => {
                let weights = shards.view(fresh.flat());
                (fresh, weights)
            }
            kind => {
                let view = shards.view(fresh.flat());
                // copies only the share, so that the whole float32 buffer can be freed
                let weights = if shards.is_split() { view.copy() } else { view };
                (Draft::new(fresh.config().clone(), fresh.flat().to_kind(kind)), weights)
            }
        };
        let optimizer = Optimizer::new(config, groups, &weights);
        let average = config.ema_decay.map(|decay| Average::new(decay, &weights));
        (draft, Self { shards, norm_shards, weights, optimizer, average })
    }

    /// Updates the share at learning rate `rate`, using its part of the whole `gradient`.
    pub(crate) fn step(&mut self, gradient: &Tensor, rate: f64) {
        self.optimizer.step(&mut self.weights, &self.shards.view(gradient), rate);
        if let Some(average) = &mut self.average {
            average.update(&self.weights);
        }
    }

    /// As [`Self::step`], but the device decides whether the step is taken. Consumes the gradient.
    pub(crate) fn step_on_device(
        &mut self,
        gradient: &Tensor,
        rate: f64,
        gate: &StepGate,
    ) -> Result<(), Error> {
        let gradient = self.shards.view(gradient);
        self.optimizer.step_on_device(&self.weights, &gradient, rate, gate)?;
        if let Some(average) = &mut self.average {
            let share = gate.share(1.0 - average.decay);
            let _ = average.weights.lerp_tensor_(&self.weights, &share);
        }
        Ok(())
    }

    /// Updates the draft with the parameters of all ranks. All ranks call it.
    pub(crate) fn publish(
        &self,
        draft: &Draft,
        communicator: &dyn Communicator,
    ) -> Result<(), Error> {
        if draft.flat().kind() != Kind::Float {
            self.shards.view(draft.flat()).copy_(&self.weights);
        }
        self.shards.fill(communicator, draft.flat())
    }

    /// The draft as a checkpoint would serve it now: the averaged weights if there are any, rounded
    /// to bfloat16. All ranks call it and get the whole draft.
    pub(crate) fn served(
        &self,
        draft: &Draft,
        communicator: &dyn Communicator,
    ) -> Result<Draft, Error> {
        let kind = draft.flat().kind();
        let mut rounded = draft.flat().to_kind(Kind::BFloat16);
        if let Some(average) = &self.average {
            self.shards.view(&rounded).copy_(&average.weights);
            self.shards.fill(communicator, &rounded)?;
        }
        rounded = rounded.to_kind(kind);
        Ok(Draft::new(draft.config().clone(), rounded))
    }

    /// Names and shapes of the state's tensors in a checkpoint, in file order.
    pub(crate) fn entries(&self) -> Vec<Entry> {
        let entry = |StateTensor { name, extent, .. }| Entry {
            name: String::from(name),
            kind: Kind::Float,
            shape: vec![self.shards_of(extent).elements()],
        };
        self.state().into_iter().map(entry).collect()
    }

    /// Passes all ranks' state to `take` in pieces, ordered as [`Self::entries`]. All ranks call
    /// it.
    pub(crate) fn stream(
        &self,
        communicator: &dyn Communicator,
        take: &mut dyn FnMut(&Tensor),
    ) -> Result<(), Error> {
        for StateTensor { extent, tensor, .. } in self.state() {
            self.shards_of(extent).stream(communicator, tensor, take)?;
        }
        Ok(())
    }

    /// Name of the tensor that a checkpoint serves.
    pub(crate) fn served_name(&self) -> &'static str {
        if self.average.is_some() { AVERAGE } else { MASTER_WEIGHTS }
    }

    /// The state's tensors, in file order.
    fn state(&self) -> Vec<StateTensor<'_>> {
        let share = |name, tensor| StateTensor { name, extent: Extent::Share, tensor };
        let mut state = self.optimizer.state();
        state.push(share(MASTER_WEIGHTS, &self.weights));
        state.extend(self.average.iter().map(|average| share(AVERAGE, &average.weights)));
        state.sort_by_key(|part| part.name);
        state
    }

    fn shards_of(&self, extent: Extent) -> &Shards {
        match extent {
            Extent::Share => &self.shards,
            Extent::Norms => &self.norm_shards,
        }
    }

    /// Loads this rank's share from a checkpoint, and all parameters into the draft.
    pub(crate) fn restore(
        &mut self,
        draft: &Draft,
        file: &TensorFile,
        steps: i64,
    ) -> Result<(), Error> {
        for StateTensor { name, extent, tensor } in self.state() {
            let shards = self.shards_of(extent);
            file.check_shape(name, &[shards.elements()])?;
            file.read_into(name, shards.own().start, tensor)?;
            if name == MASTER_WEIGHTS {
                file.read_into(name, 0, draft.flat())?;
            }
        }
        self.optimizer.set_steps(steps);
        Ok(())
    }

    /// Whether all numbers in this rank's share are finite, and the largest weight by magnitude.
    pub(crate) fn soundness(&self) -> (bool, f64) {
        let mut finite = true;
        let mut largest = 0.0;
        for StateTensor { name, tensor, .. } in self.state() {
            if tensor.numel() == 0 {
                continue;
            }
            // both are NaN if any number is
            let (least, most) = tensor.aminmax(None, false);
            let ends = readback::values(&Tensor::stack(&[least, most], 0));
            let bound = ends[0].abs().max(ends[1].abs());
            finite &= ends.iter().all(|end| end.is_finite());
            if name == MASTER_WEIGHTS {
                largest = bound;
            }
        }
        (finite, largest)
    }

    /// Number of float32 elements that this rank holds.
    pub(crate) fn elements(&self) -> i64 {
        self.state().iter().map(|part| part.tensor.numel() as i64).sum()
    }
}

#[cfg(test)]
mod tests;
