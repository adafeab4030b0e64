//! Collectives between GPU processes: tensors on the GPU over NCCL, those on the CPU over gloo.
//!
//! NCCL is used if every rank can use it and a sum over all ranks comes out right; else GPU
//! tensors go through the host, and rank 0 says why. It has no timeout: a peer that hangs is found
//! by the gloo collective that is part of every step, one that dies by the launcher.

use dflash_settings::Backend;
use dflash_torch_sys::{
    Error as TorchError, ID_BYTES, NcclGroup, NcclWork, ReduceOp, find_nccl, nccl_id,
};
use tch::{Device, Kind, Tensor};

use crate::communicator::check_contiguous;
use crate::rendezvous::ConnectOptions;
use crate::{Communicator, Error, Gloo, Pending};

/// Elements of the sum that a group is tried with.
const TRIAL: i64 = 1024;

/// A member of a group of GPU processes.
pub struct Nccl {
    gloo: Gloo,
    group: NcclGroup,
    device: Device,
}

/// Refuses NCCL for what is not on a GPU.
pub(crate) fn check(options: &ConnectOptions) -> Result<(), Error> {
    if options.backend != Backend::Nccl || matches!(options.device, Device::Cuda(_)) {
        return Ok(());
    }
    Err(Error::NoNccl { reason: "it carries GPU tensors, and this run is on the CPU".to_owned() })
}

/// The group, with NCCL for GPU tensors if that is wanted and works.
pub(crate) fn join_or_stage(
    gloo: Gloo,
    options: &ConnectOptions,
) -> Result<Box<dyn Communicator>, Error> {
    let Device::Cuda(ordinal) = options.device else { return Ok(Box::new(gloo)) };
    if options.backend == Backend::Gloo {
        return Ok(Box::new(gloo));
    }
    match join(&gloo, ordinal)? {
        Ok(group) => Ok(Box::new(Nccl { gloo, group, device: options.device })),
        Err(reason) if options.backend == Backend::Nccl => Err(Error::NoNccl { reason }),
        Err(reason) => {
            if gloo.rank() == 0 {
                tracing::warn!("gradients go through the host (gloo), which is slower: {reason}");
            }
            Ok(Box::new(gloo))
        }
    }
}

/// Joins and tries the group; the inner error, the same on all ranks, says why it does not work.
/// Before each call that waits for peers, all ranks agree that all will make it.
fn join(gloo: &Gloo, ordinal: usize) -> Result<Result<NcclGroup, String>, Error> {
    let place = (gloo.rank(), gloo.world_size());
    let found = find_nccl().and_then(|()| if place.0 == 0 { nccl_id() } else { Ok([0; ID_BYTES]) });
    let (own, problem) = match found {
        Ok(id) => (id, None),
        Err(error) => ([0; ID_BYTES], Some(error.to_string())),
    };
    if let Some(reason) = any_problem(gloo, problem)? {
        return Ok(Err(reason));
    }
    let ids = gloo.all_gather_bytes(&own)?;
    let id = ids[0].as_slice().try_into().expect("as many bytes as rank 0 sent");
    let joined = NcclGroup::join(id, place, ordinal);
    if let Some(reason) = any_problem(gloo, joined.as_ref().err().map(ToString::to_string))? {
        return Ok(Err(reason));
    }
    let group = joined.expect("no rank had a problem");
    match any_problem(gloo, trial(&group, place, ordinal))? {
        Some(reason) => Ok(Err(reason)),
        None => Ok(Ok(group)),
    }
}

/// The first problem that a rank has, with its rank; all ranks get the same answer.
fn any_problem(gloo: &Gloo, own: Option<String>) -> Result<Option<String>, Error> {
    let all = gloo.all_gather_bytes(own.unwrap_or_default().as_bytes())?;
    Ok(first_problem(&all))
}

fn first_problem(all: &[Vec<u8>]) -> Option<String> {
    let rank = all.iter().position(|problem| !problem.is_empty())?;
    Some(format!("rank {rank}: {}", String::from_utf8_lossy(&all[rank])))
}

/// What is wrong with a sum of rank + 1 over all ranks, if anything.
fn trial(group: &NcclGroup, (rank, size): (usize, usize), ordinal: usize) -> Option<String> {
    let own = Tensor::full([TRIAL], rank as i64 + 1, (Kind::Float, Device::Cuda(ordinal)));
    let summed = group.all_reduce(&own, ReduceOp::Sum).and_then(|work| work.wait());
    if let Err(error) = summed {
        return Some(error.to_string());
    }
    let expected = (size * (size + 1) / 2) as f64;
    let (least, most) = (own.min().double_value(&[]), own.max().double_value(&[]));
    (least != expected || most != expected)
        .then(|| format!("NCCL's sum is {least} to {most}, not {expected}"))
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
        let rank = self.gloo.rank();
        check_contiguous(rank, operation, tensors)?;
        let work = start(&self.group);
        let work = work.map_err(|source| Error::Collective { rank, operation, source })?;
        Ok(OnGpu { rank, operation, work })
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

    fn broadcast(&self, tensor: &mut Tensor, root: usize) -> Result<(), Error> {
        if !self.is_ours(tensor) {
            return self.gloo.broadcast(tensor, root);
        }
        self.start("broadcast", &[tensor], |group| group.broadcast(tensor, root))?.finish()
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

    fn announce_work(&self) {
        self.gloo.announce_work();
    }

    fn announce_permanent_failure(&self) {
        self.gloo.announce_permanent_failure();
    }
}

/// A collective on the GPU's own stream.
struct OnGpu {
    rank: usize,
    operation: &'static str,
    work: NcclWork,
}

impl OnGpu {
    fn finish(&self) -> Result<(), Error> {
        let (rank, operation) = (self.rank, self.operation);
        self.work.wait().map_err(|source| Error::Collective { rank, operation, source })
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
    fn the_first_rank_with_a_problem_speaks_for_all() {
        let check = |all: &[&str], expected: Option<&str>| {
            let all: Vec<Vec<u8>> = all.iter().map(|text| text.as_bytes().to_vec()).collect();
            assert_eq!(first_problem(&all).as_deref(), expected);
        };
        check(&["", "", ""], None);
        check(&["", "no library", "no driver"], Some("rank 1: no library"));
    }
}
