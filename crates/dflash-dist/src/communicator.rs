//! The collectives that training needs, as a trait: world size 1 is an implementation of
//! it ([`Single`](crate::Single)), not an `if` in the training loop.

use tch::{Device, Tensor};

use crate::Error;

/// A place in a group of processes that train together.
///
/// All ranks must call the same collectives in the same order. Tensors are contiguous and where
/// [`Communicator::takes`] says; f32, f64, bf16, f16 and i64 can be summed. A sum has the same
/// bytes on every rank.
///
/// # Errors
/// [`Error::Collective`] when a peer died or did not answer in time. After an error the group is
/// broken: the process should end.
pub trait Communicator: Send {
    /// This process, 0-based.
    fn rank(&self) -> usize;

    /// Processes in the group.
    fn world_size(&self) -> usize;

    /// Whether it takes tensors on `device` as they are; it takes all that are on the CPU.
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

    /// Starts to overwrite `tensor` with that of rank `root`; same shape and type in all ranks. It must
    /// not be read (at the root: written) before [`Pending::wait`] has returned.
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

    /// Fails where results that were waited for may be worth nothing, because the group was given up
    /// meanwhile: on a GPU it is the device that waits, and after the end of a peer it goes on with
    /// what there is. Ask once the host has seen a value that follows from them, before it counts.
    fn check(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Tells the launcher that this rank's settings are good and its work is under way: when it
    /// fails later, starting it again may help. Best effort.
    fn announce_work(&self);

    /// Takes that back: a restart would fail in the same way. Best effort.
    fn announce_permanent_failure(&self);
}

/// A collective under way.
pub trait Pending {
    /// Waits until the result is in the tensor that it was started with; on a GPU, makes the
    /// computation wait for it.
    ///
    /// # Errors
    /// As the collective's.
    fn wait(self: Box<Self>) -> Result<(), Error>;
}

/// Collectives read a tensor's memory from its start to its end whatever its strides.
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
