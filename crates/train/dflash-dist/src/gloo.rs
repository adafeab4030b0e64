//! Collectives between CPU processes over gloo.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dflash_torch_sys::{Error as TorchError, ProcessGroup, ReduceOp, Store, Work};
use tch::{Device, Kind, Tensor};

use crate::communicator::check_contiguous;
use crate::{Communicator, Error, Pending, WorkerEnv};

/// Our timeout exceeds gloo's by this, so that gloo's message, which names the peer's address,
/// comes first.
const MARGIN: Duration = Duration::from_secs(5);

/// The key under which a rank records that it ends because it lost a peer. The launcher uses it to
/// tell the cause from its consequences.
pub(crate) fn lost_peer_key(rank: usize) -> String {
    format!("lost-peer/{rank}")
}

/// The key under which ranks record that their work is in progress: a later error is not an invalid
/// setting, and a restart may help.
pub(crate) const BEGAN_KEY: &str = "began";

/// The key under which ranks record that a restart would fail in the same way.
pub(crate) const PERMANENT_KEY: &str = "permanent";

/// A member of a group of processes joined by gloo; made by [`connect`](crate::connect).
#[derive(Debug)]
pub struct Gloo {
    /// This process's rank in the group.
    index: usize,
    world_size: usize,
    timeout: Duration,
    /// `Some` until dropped.
    group: Option<ProcessGroup>,
    health: Arc<Health>,
}

/// Whether a collective has failed, and where to report it.
#[derive(Debug)]
pub(crate) struct Health {
    rank: usize,
    failed: AtomicBool,
    store: Arc<Store>,
}

impl Gloo {
    /// The group of all processes. `timeout` is for each collective.
    pub(crate) fn new(
        group: ProcessGroup,
        store: Store,
        env: &WorkerEnv,
        timeout: Duration,
    ) -> Self {
        Self::of_some(group, Arc::new(store), env.rank, env.rank, env.world_size, timeout)
    }

    /// A group of some processes, `world_size` of them: `rank` is this process among all, `index` its rank in
    /// the group.
    pub(crate) fn of_some(
        group: ProcessGroup,
        store: Arc<Store>,
        rank: usize,
        index: usize,
        world_size: usize,
        timeout: Duration,
    ) -> Self {
        let health = Arc::new(Health { rank, failed: AtomicBool::new(false), store });
        let timeout = timeout.saturating_add(MARGIN);
        Self { index, world_size, timeout, group: Some(group), health }
    }

    pub(crate) fn health(&self) -> &Arc<Health> {
        &self.health
    }

    fn start(
        &self,
        operation: &'static str,
        tensors: &[&Tensor],
        start: impl FnOnce(&ProcessGroup) -> Result<Work, TorchError>,
    ) -> Result<InFlight, Error> {
        check_contiguous(self.health.rank, operation, tensors)?;
        let group = self.group.as_ref().expect("there until dropped");
        let work = start(group).map_err(|source| self.health.note(operation, source))?;
        let (timeout, health) = (self.timeout, Arc::clone(&self.health));
        Ok(InFlight { operation, work, timeout, health })
    }

    /// The lengths of all ranks' bytes.
    fn all_gather_lengths(&self, length: usize) -> Result<Vec<usize>, Error> {
        let own = Tensor::from_slice(&[i64::try_from(length).expect("lengths fit in 63 bits")]);
        let mut all = Tensor::zeros([self.tensor_size(1)], (Kind::Int64, Device::Cpu));
        self.all_gather(&mut all, &own)?;
        let lengths = Vec::<i64>::try_from(&all).expect("a vector of i64");
        Ok(lengths.into_iter().map(|length| usize::try_from(length).unwrap_or(0)).collect())
    }

    /// Elements of a tensor with `per_rank` for each rank.
    fn tensor_size(&self, per_rank: usize) -> i64 {
        i64::try_from(self.world_size * per_rank).expect("sizes fit in 63 bits")
    }
}

impl Communicator for Gloo {
    fn rank(&self) -> usize {
        self.index
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn start_all_reduce_sum(&self, tensor: &Tensor) -> Result<Box<dyn Pending>, Error> {
        let start = |group: &ProcessGroup| group.all_reduce(tensor, ReduceOp::Sum);
        Ok(Box::new(self.start("all-reduce (sum)", &[tensor], start)?))
    }

    fn start_broadcast(&self, tensor: &Tensor, root: usize) -> Result<Box<dyn Pending>, Error> {
        let start = |group: &ProcessGroup| group.broadcast(tensor, root);
        Ok(Box::new(self.start("broadcast", &[tensor], start)?))
    }

    fn all_gather(&self, output: &mut Tensor, input: &Tensor) -> Result<(), Error> {
        let start = |group: &ProcessGroup| group.all_gather(output, input);
        self.start("all-gather", &[output, input], start)?.finish()
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let lengths = self.all_gather_lengths(bytes.len())?;
        // gloo refuses empty tensors, and all ranks must contribute the same size.
        let width = lengths.iter().copied().max().unwrap_or(0).max(1);
        let mut padded = bytes.to_vec();
        padded.resize(width, 0);
        let own = Tensor::from_slice(&padded);
        let mut all = Tensor::zeros([self.tensor_size(width)], (Kind::Uint8, Device::Cpu));
        self.all_gather(&mut all, &own)?;
        let all = Vec::<u8>::try_from(&all).expect("a vector of u8");
        let parts = all.chunks(width).zip(lengths);
        Ok(parts.map(|(part, length)| part[..length].to_vec()).collect())
    }

    fn barrier(&self) -> Result<(), Error> {
        self.start("barrier", &[], ProcessGroup::barrier)?.finish()
    }

    fn announce_work(&self) {
        // Only the launcher reads it; without it no restart is tried.
        let _ = self.health.store.set(BEGAN_KEY, b"");
    }

    fn announce_permanent_failure(&self) {
        let _ = self.health.store.set(PERMANENT_KEY, b"");
    }
}

impl Drop for Gloo {
    fn drop(&mut self) {
        // After a failure, dropping the group would wait for operations that still run in it, up to
        // the timeout.
        match self.group.take() {
            Some(group) if self.health.failed.load(Ordering::Relaxed) => group.abandon(),
            group => drop(group),
        }
    }
}

impl Health {
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Records the failure and reports it to the launcher, best effort: the store may be gone as
    /// well.
    pub(crate) fn note(&self, operation: &'static str, source: TorchError) -> Error {
        if !self.failed.swap(true, Ordering::Relaxed) {
            let _ = self.store.set(&lost_peer_key(self.rank), source.to_string().as_bytes());
        }
        Error::Collective { rank: self.rank, operation, source }
    }
}

/// A collective in flight, with what is needed to report its failure.
struct InFlight {
    operation: &'static str,
    work: Work,
    timeout: Duration,
    health: Arc<Health>,
}

impl InFlight {
    fn finish(&self) -> Result<(), Error> {
        let outcome = self.work.wait(self.timeout);
        outcome.map_err(|source| self.health.note(self.operation, source))
    }
}

impl Pending for InFlight {
    fn wait(self: Box<Self>) -> Result<(), Error> {
        self.finish()
    }
}
