//! Collectives between GPU processes: GPU tensors over NCCL, CPU tensors over gloo.
//!
//! NCCL is used if every rank can use it and a sum over all ranks comes out right; otherwise GPU
//! tensors go through the host, and rank 0 says why. The ten NCCL functions that we call are looked
//! up in `libnccl.so.2` at run time: cudarc has an `nccl` module, but its loader never tries that
//! name, the only one that torch's wheels install.
//!
//! NCCL has no timeouts and may not notice that a peer has died. So every step includes a gloo
//! collective, which finds a hanging rank before the GPUs wait for it, and a thread watches the
//! group ([`crate::watch`]). It aborts the group, after which results are worthless although no
//! call failed; so the step checks the group before it moves weights.
//!
//! Tests use a fake NCCL, which carries CPU tensors through the same calls in the same order.

use std::sync::Arc;
use std::time::Duration;

use dflash_settings::Backend;
use dflash_torch_sys::{
    Error as TorchError, ID_BYTES, NcclGroup, NcclWork, ReduceOp, find_nccl, nccl_id,
    nccl_takes_host_memory,
};
use tch::{Device, Kind, Tensor};

use crate::communicator::check_contiguous;
use crate::gloo::Health;
use crate::lifeline::{Lifeline, LifelineAddress};
use crate::rendezvous::ConnectOptions;
use crate::watch::Watch;
use crate::{Communicator, Error, Gloo, Pending};

/// Number of elements of the trial sum.
const TRIAL: i64 = 1024;

/// A member of a group of GPU processes.
pub struct Nccl {
    /// Ends before the group does.
    _watch: Watch,
    group: NcclGroup,
    gloo: Gloo,
    device: Device,
}

/// Refuses NCCL if tensors are not on a GPU.
pub(crate) fn check(options: &ConnectOptions) -> Result<(), Error> {
    let on_gpu = matches!(options.device, Device::Cuda(_));
    if options.backend != Backend::Nccl || on_gpu || nccl_takes_host_memory() {
        return Ok(());
    }
    Err(Error::NoNccl { reason: "it carries GPU tensors, and this run is on the CPU".to_owned() })
}

/// The group, with NCCL for GPU tensors if requested and working.
pub(crate) fn join_or_stage(
    gloo: Gloo,
    options: &ConnectOptions,
    place: LifelineAddress,
) -> Result<Box<dyn Communicator>, Error> {
    let wanted = match options.backend {
        Backend::Gloo => false,
        Backend::Nccl => true,
        Backend::Auto => matches!(options.device, Device::Cuda(_)),
    };
    if !wanted {
        return Ok(Box::new(gloo));
    }
    match join(&gloo, options, place)? {
        Ok((group, watch)) => {
            Ok(Box::new(Nccl { _watch: watch, group, gloo, device: options.device }))
        }
        Err(reason) if options.backend == Backend::Nccl => Err(Error::NoNccl { reason }),
        Err(reason) => {
            if gloo.rank() == 0 {
                tracing::warn!("gradients go through the host (gloo), which is slower: {reason}");
            }
            Ok(Box::new(gloo))
        }
    }
}

/// Joins the group and tries a sum; the inner error, the same on all ranks, says why it does not
/// work. Before each call that waits for peers, all ranks agree to make it.
fn join(
    gloo: &Gloo,
    options: &ConnectOptions,
    place: LifelineAddress,
) -> Result<Result<(NcclGroup, Watch), String>, Error> {
    let found = match options.device {
        Device::Cuda(_) => find_nccl(),
        _ => Ok(()),
    };
    let found = found.and_then(|()| if gloo.rank() == 0 { nccl_id() } else { Ok([0; ID_BYTES]) });
    let (id, problem) = match found {
        Ok(id) => (id, None),
        Err(error) => ([0; ID_BYTES], Some(error)),
    };
    if let Some(reason) = any_problem(gloo, problem.map(Problem::Own))? {
        return Ok(Err(reason));
    }
    let ids = gloo.all_gather_bytes(&id)?;
    let id = ids[0].as_slice().try_into().expect("as many bytes as rank 0 sent");
    let joined = NcclGroup::join(id, gloo.rank(), gloo.world_size(), options.device);
    let (group, problem) = match joined {
        Ok(group) => (Some(group), None),
        Err(error) => (None, Some(error)),
    };
    let reason = any_problem(gloo, problem.map(Problem::Own))?;
    let group = match (group, reason) {
        (Some(group), None) => group,
        (_, reason) => return Ok(Err(reason.unwrap_or_default())),
    };
    let watch = watch(gloo, &group, place, options.collective_timeout)?;
    let problem = trial(&group, gloo.rank(), gloo.world_size(), options.device).err();
    if problem.is_some() {
        // The others may be waiting in their trial; this notifies them.
        drop(watch);
        let reason = any_problem(gloo, problem)?;
        return Ok(Err(reason.unwrap_or_default()));
    }
    match any_problem(gloo, None)? {
        Some(reason) => Ok(Err(reason)),
        None => Ok(Ok((group, watch))),
    }
}

/// Watches the group; if the lifeline cannot be opened, without detecting the end of peers.
fn watch(
    gloo: &Gloo,
    group: &NcclGroup,
    place: LifelineAddress,
    timeout: Duration,
) -> Result<Watch, Error> {
    let lifeline = Lifeline::open(gloo, place)?.unwrap_or_else(|reason| {
        if gloo.rank() == 0 {
            tracing::warn!(
                "a rank that dies is noticed late, by --collective-timeout or the launcher: ranks \
                 cannot connect to rank 0 ({reason}); GLOO_SOCKET_IFNAME names the network interface"
            );
        }
        Lifeline::default()
    });
    Ok(Watch::start(group.watch(), lifeline, timeout))
}

/// Why a rank cannot join its group.
#[derive(Debug)]
enum Problem {
    Own(TorchError),
    /// NCCL's sum is wrong.
    WrongSum(String),
}

impl Problem {
    /// For the other ranks: whether it is a consequence of another rank's problem, and its text.
    fn told(&self) -> String {
        match self {
            Self::Own(error @ (TorchError::NcclGivenUp { .. } | TorchError::NcclPeer { .. })) => {
                format!("{CONSEQUENCE}{error}")
            }
            Self::Own(error) => format!("{CAUSE}{error}"),
            Self::WrongSum(text) => format!("{CAUSE}{text}"),
        }
    }
}

/// Prefix of a rank's report if another rank caused its problem.
const CONSEQUENCE: char = '-';
const CAUSE: char = '+';

/// The problem to report among those of all ranks, with its rank; all ranks get the same result.
fn any_problem(gloo: &Gloo, own: Option<Problem>) -> Result<Option<String>, Error> {
    let own = own.map(|problem| problem.told()).unwrap_or_default();
    Ok(problem_to_name(&gloo.all_gather_bytes(own.as_bytes())?))
}

/// The first cause, or the first consequence if no cause is known.
fn problem_to_name(all: &[Vec<u8>]) -> Option<String> {
    let of = |sign: char| all.iter().position(|told| told.first() == Some(&(sign as u8)));
    let rank = of(CAUSE).or_else(|| of(CONSEQUENCE))?;
    Some(format!("rank {rank}: {}", String::from_utf8_lossy(&all[rank][1..])))
}

/// Sums rank + 1 over all ranks.
fn trial(group: &NcclGroup, rank: usize, size: usize, device: Device) -> Result<(), Problem> {
    let own = Tensor::full([TRIAL], rank as i64 + 1, (Kind::Float, device));
    let summed = group.all_reduce(&own, ReduceOp::Sum).and_then(|work| work.wait());
    summed.map_err(Problem::Own)?;
    let expected = (size * (size + 1) / 2) as f64;
    let (least, most) = (own.min().double_value(&[]), own.max().double_value(&[]));
    group.check().map_err(Problem::Own)?;
    if least != expected || most != expected {
        let text = format!("NCCL's sum is {least} to {most}, not {expected}");
        return Err(Problem::WrongSum(text));
    }
    Ok(())
}

impl Nccl {
    fn is_ours(&self, tensor: &Tensor) -> bool {
        tensor.device() == self.device
    }

    fn start(
        &self,
        operation: &'static str,
        tensors: &[&Tensor],
        start: impl FnOnce(&NcclGroup) -> Result<NcclWork, TorchError>,
    ) -> Result<OnGpu, Error> {
        check_contiguous(self.gloo.rank(), operation, tensors)?;
        let health = Arc::clone(self.gloo.health());
        let work = start(&self.group).map_err(|source| failed(&health, operation, source))?;
        Ok(OnGpu { health, operation, work })
    }
}

impl Communicator for Nccl {
    fn rank(&self) -> usize {
        self.gloo.rank()
    }

    fn world_size(&self) -> usize {
        self.gloo.world_size()
    }

    fn takes(&self, device: Device) -> bool {
        device == self.device || device == Device::Cpu
    }

    fn start_all_reduce_sum(&self, tensor: &Tensor) -> Result<Box<dyn Pending>, Error> {
        if !self.is_ours(tensor) {
            return self.gloo.start_all_reduce_sum(tensor);
        }
        let start = |group: &NcclGroup| group.all_reduce(tensor, ReduceOp::Sum);
        Ok(Box::new(self.start("all-reduce (sum)", &[tensor], start)?))
    }

    fn start_broadcast(&self, tensor: &Tensor, root: usize) -> Result<Box<dyn Pending>, Error> {
        if !self.is_ours(tensor) {
            return self.gloo.start_broadcast(tensor, root);
        }
        let start = |group: &NcclGroup| group.broadcast(tensor, root);
        Ok(Box::new(self.start("broadcast", &[tensor], start)?))
    }

    fn all_gather(&self, output: &mut Tensor, input: &Tensor) -> Result<(), Error> {
        if !self.is_ours(input) {
            return self.gloo.all_gather(output, input);
        }
        let start = |group: &NcclGroup| group.all_gather(output, input);
        self.start("all-gather", &[output, input], start)?.finish()
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        self.gloo.all_gather_bytes(bytes)
    }

    fn barrier(&self) -> Result<(), Error> {
        self.gloo.barrier()
    }

    fn check(&self) -> Result<(), Error> {
        self.group.check().map_err(|source| failed(self.gloo.health(), "a collective", source))
    }

    fn announce_work(&self) {
        self.gloo.announce_work();
    }

    fn announce_permanent_failure(&self) {
        self.gloo.announce_permanent_failure();
    }
}

/// A collective on the GPU's own stream.
struct OnGpu {
    health: Arc<Health>,
    operation: &'static str,
    work: NcclWork,
}

impl OnGpu {
    fn finish(&self) -> Result<(), Error> {
        self.work.wait().map_err(|source| failed(&self.health, self.operation, source))
    }
}

/// The error of a collective; if a peer caused it, it is reported to the launcher.
fn failed(health: &Health, operation: &'static str, source: TorchError) -> Error {
    match source {
        TorchError::NcclGivenUp { .. } | TorchError::NcclPeer { .. } => {
            health.note(operation, source)
        }
        source => Error::Collective { rank: health.rank(), operation, source },
    }
}

impl Pending for OnGpu {
    fn wait(self: Box<Self>) -> Result<(), Error> {
        self.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rank_that_knows_the_cause_speaks_for_all() {
        let check = |all: &[&str], expected: Option<&str>| {
            let all: Vec<Vec<u8>> = all.iter().map(|text| text.as_bytes().to_vec()).collect();
            assert_eq!(problem_to_name(&all).as_deref(), expected);
        };
        check(&["", "", ""], None);
        check(&["", "+no library", "+no driver"], Some("rank 1: no library"));
        check(&["-rank 2 has ended", "", "+no driver"], Some("rank 2: no driver"));
        check(&["", "-rank 0 has ended"], Some("rank 1: rank 0 has ended"));
    }
}
