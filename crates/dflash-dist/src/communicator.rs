//! The collectives that training needs, as a trait: world size 1 is an implementation of
//! it ([`Single`](crate::Single)), not an `if` in the training loop.

use tch::{Device, Tensor};

use crate::Error;

/// A place in a group of processes that train together.
///
/// All ranks must call the same collectives in the same order. Tensors lie where
/// [`Communicator::takes`] says, and are contiguous; f32, f64, bf16, f16 and i64 can be reduced. Reductions give every rank
/// the same bytes. After an error the group is broken: the process should end.
pub trait Communicator: Send {
    /// This process, 0-based.
    fn rank(&self) -> usize;

    /// Processes in the group.
    fn world_size(&self) -> usize;

    /// Whether tensors on `device` can be handed over as they are; all can that lie on the CPU.
    fn takes(&self, device: Device) -> bool {
        device == Device::Cpu
    }

    /// Sums `tensor` over all ranks, in place.
    ///
    /// # Errors
    /// [`Error::Collective`] where a peer died or did not answer in time.
    fn all_reduce_sum(&self, tensor: &mut Tensor) -> Result<(), Error>;

    /// Takes the maximum of each element of `tensor` over all ranks, in place.
    ///
    /// # Errors
    /// [`Error::Collective`] where a peer died or did not answer in time.
    fn all_reduce_max(&self, tensor: &mut Tensor) -> Result<(), Error>;

    /// Starts summing `tensor` over all ranks, in place. It must not be read or written
    /// before [`Pending::wait`] has returned.
    ///
    /// # Errors
    /// [`Error::Collective`] where it cannot start; what fails later, `wait` reports.
    fn start_all_reduce_sum(&self, tensor: &Tensor) -> Result<Box<dyn Pending>, Error>;

    /// Overwrites `tensor` with that of rank `root`; same shape and type in all ranks.
    ///
    /// # Errors
    /// [`Error::Collective`] where a peer died or did not answer in time.
    fn broadcast(&self, tensor: &mut Tensor, root: usize) -> Result<(), Error>;

    /// Sums `input` (world size x n elements) over all ranks and writes this rank's n of
    /// them, the rank-th part, to `output`.
    ///
    /// # Errors
    /// [`Error::Collective`] where a peer died or did not answer in time.
    fn reduce_scatter_sum(&self, output: &mut Tensor, input: &Tensor) -> Result<(), Error>;

    /// Writes the `input`s (n elements each) of all ranks in their order to `output`
    /// (world size x n elements).
    ///
    /// # Errors
    /// [`Error::Collective`] where a peer died or did not answer in time.
    fn all_gather(&self, output: &mut Tensor, input: &Tensor) -> Result<(), Error>;

    /// The `bytes` of all ranks, in their order; lengths may differ.
    ///
    /// # Errors
    /// [`Error::Collective`] where a peer died or did not answer in time.
    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error>;

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// [`Error::Collective`] where a peer died or did not answer in time.
    fn barrier(&self) -> Result<(), Error>;

    /// Tells whoever started this rank that its settings are good and its work is under way: when
    /// it fails later, starting it again may help. Best effort.
    fn announce_work(&self);

    /// Takes that back: started again from where this run stands, the work would fail in the same
    /// way. Best effort.
    fn announce_permanent_failure(&self);
}

/// A collective under way.
pub trait Pending {
    /// Waits until the result is in the tensor that it was started with; on a GPU, makes the
    /// computation wait for it.
    ///
    /// # Errors
    /// [`Error::Collective`] where a peer died or did not answer in time.
    fn wait(self: Box<Self>) -> Result<(), Error>;
}
