//! All-reduces the partial products of split layers within a stage.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dflash_dist::{Communicator, Error};
use dflash_target::parallel::Sum;
use tch::{Device, Kind, Tensor};

/// The sums of a stage's ranks. After a sum has failed, it and all following ones leave their
/// numbers unchanged; the pass checks for the failure at its end.
#[derive(Clone)]
pub(crate) struct Sums(Arc<Mutex<State>>);

struct State {
    group: Box<dyn Communicator>,
    layer: usize,
    /// Sums of this pass so far.
    done: usize,
    /// The sums of a whole pass, recorded from the first one through all layers.
    plan: Option<Vec<Planned>>,
    seen: Vec<Planned>,
    failed: Option<Error>,
}

#[derive(Debug, Clone)]
struct Planned {
    layer: usize,
    /// The dimensions after the tokens.
    width: Vec<i64>,
    options: (Kind, Device),
}

impl Sums {
    pub(crate) fn new(group: Box<dyn Communicator>) -> Self {
        let (seen, plan) = (Vec::new(), None);
        Self(Arc::new(Mutex::new(State { group, layer: 0, done: 0, plan, seen, failed: None })))
    }

    pub(crate) fn begin(&self) {
        let mut state = self.state();
        (state.done, state.layer) = (0, 0);
        state.seen.clear();
    }

    /// Records the pass that has just gone through all layers: all passes have the same sums.
    pub(crate) fn learn(&self) {
        let mut state = self.state();
        let seen = std::mem::take(&mut state.seen);
        state.plan = Some(seen);
    }

    /// Completes the sums of this pass, of `tokens` tokens up to layer `until`, that this rank
    /// still owes because its pass was aborted, so that the others do not wait for it. Their
    /// numbers are worthless. Returns whether it could: not before a pass has been recorded.
    pub(crate) fn make_up(&self, tokens: i64, until: usize) -> bool {
        let mut state = self.state();
        let Some(plan) = state.plan.clone() else { return false };
        let owed = plan.iter().filter(|planned| planned.layer < until).skip(state.done);
        for planned in owed {
            let shape: Vec<i64> = [&[tokens], planned.width.as_slice()].concat();
            state.sum(&Tensor::zeros(shape, planned.options));
        }
        true
    }

    /// Whether the pass of all ranks has `succeeded`.
    ///
    /// # Errors
    /// A sum of this pass that failed.
    pub(crate) fn agree(&self, succeeded: bool) -> Result<bool, Error> {
        let mut state = self.state();
        if let Some(error) = state.failed.take() {
            return Err(error);
        }
        let mut failures = Tensor::from_slice(&[i64::from(!succeeded)]);
        state.group.all_reduce_sum(&mut failures)?;
        state.group.check()?;
        Ok(failures.int64_value(&[0]) == 0)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A pass that was aborted because memory ran out leaves nothing inconsistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sum for Sums {
    fn at(&self, number: usize) {
        self.state().layer = number;
    }

    fn sum(&self, partial: &Tensor) {
        let mut state = self.state();
        let (layer, width) = (state.layer, partial.size()[1..].to_vec());
        let options = (partial.kind(), partial.device());
        state.seen.push(Planned { layer, width, options });
        state.sum(partial);
    }
}

impl State {
    fn sum(&mut self, partial: &Tensor) {
        self.done += 1;
        if self.failed.is_none() {
            self.failed = self.reduce(partial).err();
        }
    }

    fn reduce(&self, partial: &Tensor) -> Result<(), Error> {
        if self.group.takes(partial.device()) {
            return self.group.all_reduce_sum(&mut partial.shallow_clone());
        }
        let mut host = partial.to_device(Device::Cpu);
        self.group.all_reduce_sum(&mut host)?;
        partial.shallow_clone().copy_(&host);
        Ok(())
    }
}

impl fmt::Debug for Sums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sums").finish_non_exhaustive()
    }
}
