//! The collectives that training needs, as a trait: world size 1 is an implementation of
//! it ([`Single`](crate::Single)), not an `if` in the training loop.

use tch::{Device, Tensor};

use crate::Error;

/// A member of a group of processes that train together.
///
/// All ranks must call the same collectives in the same order. Tensors are contiguous and on a
/// device that [`Communicator::takes`] accepts; f32, f64, bf16, f16 and i64 can be summed. A sum
/// has the same bits on every rank.
///
/// # Errors
/// [`Error::Collective`] if a peer died or did not answer in time. After an error the group is
/// broken: the process should end.
pub trait Communicator: Send {
    /// This process's rank, 0-based.
    fn rank(&self) -> usize;

    /// Number of processes in the group.
    fn world_size(&self) -> usize;

    /// Whether it accepts tensors on `device` directly; it accepts all CPU tensors.
    fn takes(&self, device: Device) -> bool {
        device == Device::Cpu
    }

    /// Starts summing `tensor` over all ranks, in place. It must not be read or written
    /// before [`Pending::wait`] has returned.
    fn start_all_reduce_sum(&self, tensor: &Tensor) -> Result<Box<dyn Pending>, Error>;

    /// Sums `tensor` over all ranks, in place.
    fn all_reduce_sum(&self, tensor: &mut Tensor) -> Result<(), Error> {
        self.start_all_reduce_sum(tensor)?.wait()
    }

    /// Starts overwriting `tensor` with that of rank `root`; same shape and type on all ranks. It
    /// must not be read (at the root: written) before [`Pending::wait`] has returned.
    fn start_broadcast(&self, tensor: &Tensor, root: usize) -> Result<Box<dyn Pending>, Error>;

    /// Overwrites `tensor` with that of rank `root`; same shape and type in all ranks.
    fn broadcast(&self, tensor: &mut Tensor, root: usize) -> Result<(), Error> {
        self.start_broadcast(tensor, root)?.wait()
    }

    /// Writes the `input`s (n elements each) of all ranks in their order to `output`
    /// (world size x n elements).
    fn all_gather(&self, output: &mut Tensor, input: &Tensor) -> Result<(), Error>;

    /// The `bytes` of all ranks, in their order; lengths may differ.
    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error>;

    /// Returns when all ranks have called it.
    fn barrier(&self) -> Result<(), Error>;

    /// Fails if completed results may be worthless because the group was aborted meanwhile: on a
    /// GPU the device waits, not the host, and after a peer's end it continues with whatever data
    /// there is. Call it once the host has read a value that depends on the results, before the
    /// value is used.
    fn check(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Tells the launcher that this rank's settings are valid and its work is in progress: if it
    /// fails later, a restart may help. Best effort.
    fn announce_work(&self);

    /// Revokes that: a restart would fail in the same way. Best effort.
    fn announce_permanent_failure(&self);
}

/// A collective in flight.
pub trait Pending {
    /// Waits until the result is in the tensor that it was started with; on a GPU, makes the
    /// computation wait for it.
    ///
    /// # Errors
    /// As the collective's.
    fn wait(self: Box<Self>) -> Result<(), Error>;
}

/// Collectives access a tensor's memory from start to end, whatever its strides.
pub(crate) fn check_contiguous(
    rank: usize,
    operation: &'static str,
    tensors: &[&Tensor],
) -> Result<(), Error> {
    let Some(tensor) = tensors.iter().find(|tensor| !tensor.is_contiguous()) else {
        return Ok(());
    };
    let (shape, strides) = (tensor.size(), tensor.stride());
    Err(Error::NotContiguous { rank, operation, shape, strides })
}
