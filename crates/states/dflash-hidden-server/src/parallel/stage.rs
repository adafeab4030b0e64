//! One rank's part of a target: its layers, and its part of a pass.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use dflash_dist::Communicator;
use dflash_target::PrefillOptions;
use dflash_target::parallel::{Grid, Passing, States, Sum, TargetPart};
use dflash_tensor::catch_oom;
use tch::Tensor;

use super::Peers;
use super::job::{self, Job};
use super::link::Link;
use super::sums::Sums;
use crate::Error;

/// A rank's part of a target, and its connections.
pub(crate) struct Stage {
    pub(super) part: TargetPart,
    pub(super) grid: Grid,
    rank: usize,
    pub(super) control: Box<dyn Communicator>,
    sums: Option<Sums>,
    before: Option<Link>,
    behind: Option<Link>,
    pub(super) answers: Vec<Link>,
}

/// The auxiliary hidden states, or `None` if a rank ran out of memory.
pub(super) type AuxStates = Option<States>;

impl Stage {
    /// Loads this rank's part of the target in `dir`.
    ///
    /// # Errors
    /// As [`TargetPart::load`].
    pub(crate) fn load(
        dir: &Path,
        options: &PrefillOptions<'_>,
        peers: Peers,
    ) -> Result<Self, Error> {
        let Peers { grid, rank, control, tensor, before, behind, answers } = peers;
        let sums = tensor.map(Sums::new);
        let through = sums.clone().map(|sums| Arc::new(sums) as Arc<dyn Sum>);
        Ok(Self {
            part: TargetPart::load(dir, options, grid, rank, through)?,
            grid,
            rank,
            control,
            sums,
            before: before.map(Link::new),
            behind: behind.map(Link::new),
            answers: answers.into_iter().map(Link::new).collect(),
        })
    }

    /// Runs the jobs from rank 0 until they end.
    ///
    /// # Errors
    /// A rank that has gone or does not answer; running out of memory in the first pass.
    pub(crate) fn follow(mut self) -> Result<(), Error> {
        while let Some(job) = job::hear(&*self.control)? {
            self.run(&job)?;
        }
        Ok(())
    }

    /// This rank's part of a pass. After the first one, which must go through all layers, running
    /// out of memory ends only the pass.
    pub(super) fn run(&mut self, job: &Job) -> Result<AuxStates, Error> {
        let layers = self.part.layers();
        if layers.start > 0 && job.until() <= layers.start {
            return Ok(Some(Vec::new()));
        }
        let arrived = match &self.before {
            None => Some(None),
            Some(link) => link.receive(self.part.place().device)?.map(Some),
        };
        let ran = match arrived {
            None => None,
            Some(arrived) => self.attempt(job, arrived)?,
        };
        let (bundle, aux_states) = ran.unzip();
        if job.until() > layers.end
            && let Some(link) = &mut self.behind
        {
            link.send(bundle.as_ref())?;
        }
        if layers.start > 0 && self.grid.part(self.rank) == 0 {
            self.answer(job, aux_states.as_deref())?;
        }
        Ok(aux_states)
    }

    /// The pass, if all ranks of this stage had enough memory for it.
    fn attempt(
        &mut self,
        job: &Job,
        arrived: Option<Passing>,
    ) -> Result<Option<(Passing, States)>, Error> {
        if let Some(sums) = &self.sums {
            sums.begin();
        }
        let run = || self.part.run(&job.prompts, &job.layer_ids, job.until(), arrived);
        let outcome = catch_oom(run);
        let ran = match outcome {
            Ok(ran) => Some(ran?),
            Err(reason) => {
                let (rank, tokens) = (self.rank, job.prompts.input_ids.len());
                let reason = format!("rank {rank} has no memory for {tokens} tokens: {reason}");
                tracing::warn!("{reason}");
                let tokens = tokens as i64;
                if self.sums.as_ref().is_some_and(|sums| !sums.make_up(tokens, job.until())) {
                    return Err(Error::NoMemory { reason });
                }
                None
            }
        };
        let Some(sums) = &self.sums else { return Ok(ran) };
        let all = sums.agree(ran.is_some())?;
        if all && job.until() == self.part.config().num_hidden_layers {
            sums.learn();
        }
        Ok(ran.filter(|_| all))
    }

    /// Sends the answer that rank 0 requested: whether there are states, then the states.
    fn answer(&mut self, job: &Job, aux_states: Option<&[(u32, Tensor)]>) -> Result<(), Error> {
        let mut tensors = vec![Tensor::from_slice(&[i64::from(aux_states.is_some())])];
        match aux_states {
            Some(aux_states) => {
                tensors.extend(aux_states.iter().map(|(_, state_th)| state_th.shallow_clone()));
            }
            // It expects as many tensors.
            None => {
                let tokens = job.prompts.input_ids.len() as i64;
                let shape = [tokens, self.part.config().hidden_size];
                let blank = Tensor::zeros(shape, self.part.place().options());
                let count = ids_of(&self.part.layers(), &job.layer_ids).len();
                tensors.extend((0..count).map(|_| blank.shallow_clone()));
            }
        }
        Ok(self.answers[0].send_known(&tensors)?)
    }
}

/// Those of `ids` that are outputs of `layers`, ascending.
pub(super) fn ids_of(layers: &Range<usize>, ids: &[u32]) -> Vec<u32> {
    let all = layers.clone().map(|layer| layer as u32 + 1);
    all.filter(|id| ids.contains(id)).collect()
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (rank, grid, stages) = (self.rank, self.grid, self.part.stages());
        f.debug_struct("Stage")
            .field("rank", &rank)
            .field("grid", &grid)
            .field("stages", &stages)
            .finish_non_exhaustive()
    }
}
