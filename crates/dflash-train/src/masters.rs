//! The float32 side of the parameters: one rank's share of the masters, the optimizer's state and
//! the averaged weights.
//!
//! The draft computes with a buffer of its own kind. In float32 the masters are a part of that very
//! buffer; in bfloat16 they are kept beside it, and the draft gets them rounded after each step.

use dflash_dist::Communicator;
use dflash_model::checkpoint::TensorFile;
use dflash_model::draft::{Draft, DraftLayout};
use tch::{Kind, Tensor};

use crate::Error;
use crate::checkpoint::MASTERS;
use crate::optimizer::{Average, Extent, Groups, Optimizer, OptimizerConfig};
use crate::shards::Shards;

/// Name of the averaged weights in a checkpoint.
pub(crate) const AVERAGE: &str = "average";

/// One rank's share of everything that is float32.
#[derive(Debug)]
pub(crate) struct Masters {
    shards: Shards,
    norm_shards: Shards,
    /// The share's parameters.
    pub(crate) weights: Tensor,
    pub(crate) optimizer: Optimizer,
    pub(crate) average: Option<Average>,
}

/// The whole state, as a checkpoint holds it.
pub(crate) struct Collected {
    /// By name.
    pub(crate) tensors: Vec<(String, Tensor)>,
    /// Whether the averaged weights are among them; else the masters are what is served.
    pub(crate) averaged: bool,
}

impl Masters {
    /// The masters of `fresh`, a draft in float32, and the draft to compute with in `kind`.
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
                // a copy of the share alone, so that the whole in float32 can be freed
                let weights = if shards.is_split() { view.copy() } else { view };
                (Draft::new(fresh.config().clone(), fresh.flat().to_kind(kind)), weights)
            }
        };
        let optimizer = Optimizer::new(config, groups, &weights);
        let average = config.ema_decay.map(|decay| Average::new(decay, &weights));
        (draft, Self { shards, norm_shards, weights, optimizer, average })
    }

    /// Moves the share by `rate` along its part of the whole `gradient`.
    pub(crate) fn step(&mut self, gradient: &Tensor, rate: f64) {
        self.optimizer.step(&mut self.weights, &self.shards.view(gradient), rate);
        if let Some(average) = &mut self.average {
            average.update(&self.weights);
        }
    }

    /// Gives the draft the parameters of all ranks. All ranks call it.
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

    /// The draft as a checkpoint of this moment serves it: the averaged weights where there are any,
    /// rounded to bfloat16. All ranks call it, and all get the whole.
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

    /// All ranks' state at rank 0, `None` elsewhere. All ranks call it.
    pub(crate) fn collect(
        &self,
        communicator: &dyn Communicator,
    ) -> Result<Option<Collected>, Error> {
        let mut tensors = Vec::new();
        for (name, extent, tensor) in self.state() {
            let collected = self.shards_of(extent).collect(communicator, tensor)?;
            tensors.extend(collected.map(|tensor| (name.to_string(), tensor)));
        }
        let averaged = self.average.is_some();
        Ok((communicator.rank() == 0).then_some(Collected { tensors, averaged }))
    }

    fn state(&self) -> Vec<(&'static str, Extent, &Tensor)> {
        let optimizer = self.optimizer.state();
        let average = self.average.iter().map(|average| (AVERAGE, Extent::Share, &average.weights));
        [(MASTERS, Extent::Share, &self.weights)]
            .into_iter()
            .chain(optimizer.into_iter().map(|part| (part.name, part.extent, part.tensor)))
            .chain(average)
            .collect()
    }

    fn shards_of(&self, extent: Extent) -> &Shards {
        match extent {
            Extent::Share => &self.shards,
            Extent::Norms => &self.norm_shards,
        }
    }

    /// Takes this rank's share of what a checkpoint holds, and gives the draft all of it.
    pub(crate) fn restore(
        &mut self,
        draft: &Draft,
        file: &TensorFile,
        steps: i64,
    ) -> Result<(), Error> {
        let elements = draft.layout().elements();
        let norms = norm_elements(draft.layout());
        for (name, extent, tensor) in self.state() {
            let length = if extent == Extent::Share { elements } else { norms };
            let stored = file.tensor(name, &[length])?;
            tensor.shallow_clone().copy_(&self.shards_of(extent).view(&stored));
            if name == MASTERS {
                draft.flat().shallow_clone().copy_(&stored);
            }
        }
        self.optimizer.set_steps(steps);
        Ok(())
    }

    /// Float32 numbers that this rank holds.
    pub(crate) fn elements(&self) -> i64 {
        self.state().iter().map(|(_, _, tensor)| tensor.numel() as i64).sum()
    }
}

fn norm_elements(layout: &DraftLayout) -> i64 {
    Groups::of(layout.parameters(), &(0..layout.elements())).norm_elements()
}

impl Collected {
    /// The weights to serve.
    pub(crate) fn served(&self) -> &Tensor {
        let name = if self.averaged { AVERAGE } else { MASTERS };
        let found = self.tensors.iter().find(|(found, _)| found == name);
        &found.expect("the state holds its weights").1
    }
}

#[cfg(test)]
mod tests;
