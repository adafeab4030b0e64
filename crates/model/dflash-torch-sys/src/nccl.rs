//! NCCL collectives between GPUs, loaded on demand instead of linked, since build machines have
//! neither CUDA nor NCCL.
//!
//! Functions are looked up in `libnccl.so.2`, which libtorch's CUDA library has already loaded.
//! cudarc's own loader does not know that name, so only its streams and events are used.
//! Collectives run on their own stream, after the computation submitted so far; the computation
//! waits for a collective only from [`NcclWork::wait`] on. The host never waits.
//!
//! NCCL has no timeouts and does not report the death of a peer on the same machine. So another
//! thread can monitor a group ([`NcclWatch`]) and abandon it: pending waits return, and every later
//! call and wait is an error.

mod library;
mod order;

use std::collections::VecDeque;
use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, DriverError};
use tch::{Device, Kind, Tensor};

use crate::cuda::open_library;
use crate::{Error, ReduceOp};
use library::{Comm, IN_PROGRESS, Library, Status, Stream, UniqueId};
use order::Order;

/// The driver, required by CUDA.
const DRIVER: &std::ffi::CStr = c"libcuda.so.1";

/// Size of NCCL's `ncclUniqueId`, created by rank 0 and passed by all ranks of a group.
pub const ID_BYTES: usize = 128;

/// How long abandoning a group waits for a running call before it aborts the communicator.
const CALLS_END: Duration = Duration::from_millis(500);

/// Checks that NCCL and the driver can be used on this machine.
///
/// # Errors
/// [`Error::NoNccl`] with the loader's reason.
pub fn find_nccl() -> Result<(), Error> {
    Library::open()?;
    // cudarc panics if the driver is missing.
    open_library(DRIVER, libc::RTLD_NOW).map_err(|reason| Error::NoNccl { reason })?;
    Ok(())
}

/// Whether the `libnccl.so.2` found works on host memory. NVIDIA's does not; the tests' fake does,
/// and then the same calls process CPU tensors.
pub fn nccl_takes_host_memory() -> bool {
    Library::open().is_ok_and(|library| library.takes_host_memory)
}

/// Creates the id of a new group, which all its ranks must pass to `join`.
///
/// # Errors
/// [`Error::NoNccl`], [`Error::Nccl`].
pub fn nccl_id() -> Result<[u8; ID_BYTES], Error> {
    let library = Library::open()?;
    let mut id = UniqueId([0; ID_BYTES]);
    // SAFETY: the out pointer is a local.
    let status = unsafe { (library.get_unique_id)(&mut id) };
    library.check("making an id", std::ptr::null_mut(), status)?;
    Ok(id.0.map(|byte| byte as u8))
}

/// One process's membership in a group of GPU processes, for contiguous tensors on its device.
///
/// All processes must start the same collectives in the same order.
pub struct NcclGroup {
    member: Arc<Member>,
    size: i64,
}

/// Monitors a group from another thread.
pub struct NcclWatch {
    member: Arc<Member>,
}

/// Shared by the calling and the monitoring thread.
struct Member {
    library: Library,
    comm: Comm,
    order: Order,
    /// Held during every call, so that the communicator is not aborted meanwhile.
    calls: Mutex<()>,
    /// Whether the communicator was aborted; NCCL must not see it again.
    ended: AtomicBool,
    /// Why the group was abandoned.
    given_up: OnceLock<String>,
    /// In start order.
    unfinished: Mutex<VecDeque<Unfinished>>,
}

/// A started collective that is not known to be complete.
struct Unfinished {
    operation: &'static str,
    begun: Instant,
    /// `None` while NCCL's call itself is running.
    done: Option<Arc<CudaEvent>>,
}

// SAFETY: one thread at a time calls the communicator, the holder of `calls`. NCCL permits reading
// the asynchronous error and aborting concurrently with a call.
unsafe impl Send for Member {}
// SAFETY: as above.
unsafe impl Sync for Member {}

impl NcclGroup {
    /// Joins the group `id` as `rank` of `size`, for tensors on `device`; waits for all ranks.
    ///
    /// # Errors
    /// [`Error::NoNccl`], [`Error::Nccl`]: for instance if two ranks use one GPU.
    pub fn join(
        id: &[u8; ID_BYTES],
        rank: usize,
        size: usize,
        device: Device,
    ) -> Result<Self, Error> {
        let library = Library::open()?;
        let order = match device {
            Device::Cuda(ordinal) => {
                find_nccl()?;
                Order::of_gpu(ordinal)?
            }
            _ if library.takes_host_memory => Order::Host,
            other => {
                let reason = format!("it carries GPU tensors, not those on {other:?}");
                return Err(Error::NoNccl { reason });
            }
        };
        let mut comm = std::ptr::null_mut();
        let id = UniqueId(id.map(|byte| byte as c_char));
        let (nranks, own) = (to_int(size), to_int(rank));
        // The communicator is bound to the current GPU.
        order.bind("join")?;
        // SAFETY: the out pointer is a local; the id is passed by value.
        let status = unsafe { (library.init_rank)(&mut comm, nranks, id, own) };
        library.check("joining", std::ptr::null_mut(), status)?;
        let member = Member {
            library,
            comm,
            order,
            calls: Mutex::default(),
            ended: AtomicBool::new(false),
            given_up: OnceLock::new(),
            unfinished: Mutex::default(),
        };
        Ok(Self { member: Arc::new(member), size: i64::from(nranks) })
    }

    /// A monitor for another thread.
    pub fn watch(&self) -> NcclWatch {
        NcclWatch { member: Arc::clone(&self.member) }
    }

    /// Checks that the group has not been abandoned. Only then are awaited results valid. Call this
    /// after the host has read a value that depends on them.
    ///
    /// # Errors
    /// [`Error::NcclGivenUp`].
    pub fn check(&self) -> Result<(), Error> {
        self.member.check_given_up("the work")
    }

    /// Reduces `tensor` over all ranks, in place on every rank.
    ///
    /// # Errors
    /// [`Error::Nccl`], as for all collectives, also if types or sizes differ; [`Error::NcclPeer`]
    /// if a peer or the network failed; [`Error::NcclGivenUp`].
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<NcclWork, Error> {
        let op = if op == ReduceOp::Max { 2 } else { 0 };
        let (data, kind) = (tensor.data_ptr(), self.kind_of("all-reduce", tensor)?);
        let Member { library, comm, .. } = &*self.member;
        // SAFETY (here and below): contiguous memory on the group's device, of the stated size and
        // type, kept alive by the work.
        self.start("all-reduce", &[tensor], |stream| unsafe {
            (library.all_reduce)(data, data, tensor.numel(), kind, op, *comm, stream)
        })
    }

    /// Overwrites `tensor` on all ranks with that of `root`.
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<NcclWork, Error> {
        let (data, kind) = (tensor.data_ptr(), self.kind_of("broadcast", tensor)?);
        let root = to_int(root);
        let Member { library, comm, .. } = &*self.member;
        self.start("broadcast", &[tensor], |stream| unsafe {
            (library.broadcast)(data, data, tensor.numel(), kind, root, *comm, stream)
        })
    }

    /// Concatenates the `input`s of all ranks in `output`.
    pub fn all_gather(&self, output: &Tensor, input: &Tensor) -> Result<NcclWork, Error> {
        self.check_sizes("all-gather", output, input)?;
        let kind = self.kind_of("all-gather", input)?;
        let (from, to, count) = (input.data_ptr(), output.data_ptr(), input.numel());
        let Member { library, comm, .. } = &*self.member;
        self.start("all-gather", &[output, input], |stream| unsafe {
            (library.all_gather)(from, to, count, kind, *comm, stream)
        })
    }

    /// Sums the `input`s over all ranks and writes this rank's part to `output`.
    pub fn reduce_scatter(&self, output: &Tensor, input: &Tensor) -> Result<NcclWork, Error> {
        self.check_sizes("reduce-scatter", input, output)?;
        let kind = self.kind_of("reduce-scatter", input)?;
        let (from, to, count) = (input.data_ptr(), output.data_ptr(), output.numel());
        let Member { library, comm, .. } = &*self.member;
        self.start("reduce-scatter", &[output, input], |stream| unsafe {
            (library.reduce_scatter)(from, to, count, kind, 0, *comm, stream)
        })
    }

    fn check_sizes(
        &self,
        operation: &'static str,
        large: &Tensor,
        small: &Tensor,
    ) -> Result<(), Error> {
        if large.numel() as i64 == small.numel() as i64 * self.size && large.kind() == small.kind()
        {
            return Ok(());
        }
        let (large, small) = (large.size(), small.size());
        let message = format!("{large:?} is not {} times {small:?} of the same type", self.size);
        Err(Error::Nccl { operation, message })
    }

    /// nccl.h's number of the tensor's element type; rejects tensors on other devices.
    fn kind_of(&self, operation: &'static str, tensor: &Tensor) -> Result<c_int, Error> {
        if !self.member.order.takes(tensor.device()) {
            let device = tensor.device();
            let message = format!("a tensor on {device:?}, but this group is for another device");
            return Err(Error::Nccl { operation, message });
        }
        number_of(operation, tensor.kind())
    }

    /// Starts `call` after the computation submitted so far.
    fn start(
        &self,
        operation: &'static str,
        tensors: &[&Tensor],
        call: impl FnOnce(Stream) -> Status,
    ) -> Result<NcclWork, Error> {
        let done = self.member.call(operation, call)?;
        let tensors = tensors.iter().map(|tensor| tensor.shallow_clone()).collect();
        Ok(NcclWork { operation, done, member: Arc::clone(&self.member), _tensors: tensors })
    }
}

impl Member {
    /// Runs `call`, visible to monitors; returns the event that marks its completion.
    fn call(
        &self,
        operation: &'static str,
        call: impl FnOnce(Stream) -> Status,
    ) -> Result<Option<Arc<CudaEvent>>, Error> {
        let stream = self.order.after_computation(operation)?;
        let _held = lock(&self.calls);
        self.check_given_up(operation)?;
        let begun = Instant::now();
        lock(&self.unfinished).push_back(Unfinished { operation, begun, done: None });
        let status = call(stream);
        let done = self.order.mark(operation);
        let mut unfinished = lock(&self.unfinished);
        let mut own = unfinished.pop_back().expect("calls are made one at a time");
        // A call during which the group was abandoned returns without a valid result.
        self.check_given_up(operation)?;
        self.library.check(operation, self.comm, status)?;
        let done = done?.map(Arc::new);
        if done.is_some() {
            own.done.clone_from(&done);
            unfinished.push_back(own);
        }
        Ok(done)
    }

    fn check_given_up(&self, operation: &'static str) -> Result<(), Error> {
        match self.given_up.get() {
            None => Ok(()),
            Some(reason) => Err(Error::NcclGivenUp { operation, reason: reason.clone() }),
        }
    }

    /// Aborts the communicator, once. Unlike destroying it, this does not wait for lost peers;
    /// relevant work has been waited for.
    fn end(&self) {
        if !self.ended.swap(true, Ordering::SeqCst) {
            // SAFETY: owned, aborted once. No call starts after `given_up` is set or during a drop;
            // aborting is meant to interrupt a call that still runs.
            unsafe { (self.library.abort)(self.comm) };
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.end();
    }
}

impl NcclWatch {
    /// Checks for errors that NCCL or the GPU report asynchronously.
    ///
    /// # Errors
    /// [`Error::Nccl`], [`Error::NcclPeer`].
    pub fn check(&self) -> Result<(), Error> {
        let Member { library, comm, ended, .. } = &*self.member;
        if ended.load(Ordering::SeqCst) {
            return Ok(());
        }
        let mut fault = IN_PROGRESS;
        // SAFETY: a live communicator, which only this thread aborts; the out pointer is a local.
        let status = unsafe { (library.async_error)(*comm, &mut fault) };
        let operation = "the group";
        library.check(operation, *comm, status)?;
        if fault == IN_PROGRESS { Ok(()) } else { library.check(operation, *comm, fault) }
    }

    /// The oldest incomplete collective and its start time.
    ///
    /// # Errors
    /// [`Error::Nccl`] if the GPU has failed.
    pub fn oldest_unfinished(&self) -> Result<Option<(&'static str, Instant)>, Error> {
        let mut unfinished = lock(&self.member.unfinished);
        while let Some(&Unfinished { operation, begun, ref done }) = unfinished.front() {
            let is_done = match done {
                None => false,
                Some(event) => order::is_done(event).map_err(driver(operation))?,
            };
            if !is_done {
                return Ok(Some((operation, begun)));
            }
            unfinished.pop_front();
        }
        Ok(None)
    }

    /// Abandons the group: pending waits return, and all calls and waits fail with `reason`.
    pub fn give_up(&self, reason: String) {
        let member = &*self.member;
        // The first reason is kept.
        let _ = member.given_up.set(reason);
        let asked = Instant::now();
        loop {
            let held = member.calls.try_lock();
            // A call that does not return is waiting for a lost peer; aborting ends it.
            if held.is_ok() || asked.elapsed() > CALLS_END {
                return member.end();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A started collective. Its tensors must not be accessed before [`NcclWork::wait`].
pub struct NcclWork {
    operation: &'static str,
    /// `None` if it was complete when the call returned.
    done: Option<Arc<CudaEvent>>,
    member: Arc<Member>,
    /// Keeps the allocator from reusing their memory.
    _tensors: Vec<Tensor>,
}

impl NcclWork {
    /// Makes later computation wait for the result; the host does not wait.
    ///
    /// # Errors
    /// [`Error::Nccl`] if the driver refuses, [`Error::NcclGivenUp`].
    pub fn wait(&self) -> Result<(), Error> {
        self.member.order.before_computation(self.operation, self.done.as_deref())?;
        self.member.check_given_up(self.operation)
    }
}

impl Drop for NcclWork {
    fn drop(&mut self) {
        // Memory freed below is reused in the computation stream's order.
        let _ = self.wait();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn driver(operation: &'static str) -> impl FnOnce(DriverError) -> Error {
    move |error| Error::Nccl { operation, message: error.to_string() }
}

/// nccl.h's number of an element type.
fn number_of(operation: &'static str, kind: Kind) -> Result<c_int, Error> {
    match kind {
        Kind::Int64 => Ok(4),
        Kind::Half => Ok(6),
        Kind::Float => Ok(7),
        Kind::Double => Ok(8),
        Kind::BFloat16 => Ok(9),
        kind => Err(Error::Nccl { operation, message: format!("no collective for {kind:?}") }),
    }
}

fn to_int(number: usize) -> c_int {
    c_int::try_from(number).expect("ranks fit in 31 bits")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finding_agrees_with_joining() {
        // Without NCCL both give the reason; with NCCL this machine may still lack a GPU.
        if let Err(missing) = find_nccl() {
            let refused = NcclGroup::join(&[0; ID_BYTES], 0, 1, Device::Cuda(0)).err().unwrap();
            assert_eq!(refused.to_string(), missing.to_string());
        }
    }

    #[test]
    fn only_types_that_can_be_summed_are_taken() {
        assert_eq!(number_of("all-reduce", Kind::Float).unwrap(), 7);
        let error = number_of("all-reduce", Kind::Bool).unwrap_err().to_string();
        assert!(error.contains("all-reduce") && error.contains("Bool"), "{error}");
    }
}
