//! NVIDIA's collectives between GPUs, opened when they are needed instead of linked: a build machine
//! has neither CUDA nor NCCL.
//!
//! The functions are looked up in `libnccl.so.2`, which libtorch's CUDA half has loaded already;
//! cudarc's own loader does not know that name, so only its streams and events are used. A
//! collective runs on a stream of its own: it waits there for what the computation has written so
//! far, and the computation waits for it only from [`NcclWork::wait`] on. The host waits for
//! neither.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use tch::{Device, Kind, Tensor};

use crate::cuda::{loader_message, open_library};
use crate::{Error, ReduceOp};

/// The name under which libtorch's CUDA half asks for it.
const LIBRARY: &CStr = c"libnccl.so.2";

/// The driver, without which no CUDA works.
const DRIVER: &CStr = c"libcuda.so.1";

/// What rank 0 makes and all ranks of a group present: NCCL's `ncclUniqueId`.
pub const ID_BYTES: usize = 128;

type Status = c_int;
type Comm = *mut c_void;
type Stream = *mut c_void;

#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([c_char; ID_BYTES]);

/// The functions that we call; their types are those of nccl.h of NCCL 2.
#[derive(Clone, Copy)]
struct Library {
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> Status,
    init_rank: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> Status,
    abort: unsafe extern "C" fn(Comm) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    all_reduce: Collective,
    reduce_scatter: Collective,
    all_gather:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, Stream) -> Status,
    broadcast: Collective,
}

/// Input, output, elements, their type, the operation (the root for a broadcast), group, stream.
type Collective =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> Status;

impl Library {
    fn open(name: &CStr) -> Result<Self, Error> {
        let handle = open_library(name, libc::RTLD_NOW | libc::RTLD_LOCAL)
            .map_err(|reason| Error::NoNccl { reason })?;
        // SAFETY: the fields have the types that nccl.h gives the symbols.
        unsafe {
            Ok(Self {
                get_unique_id: function(handle, c"ncclGetUniqueId")?,
                init_rank: function(handle, c"ncclCommInitRank")?,
                abort: function(handle, c"ncclCommAbort")?,
                error_string: function(handle, c"ncclGetErrorString")?,
                all_reduce: function(handle, c"ncclAllReduce")?,
                reduce_scatter: function(handle, c"ncclReduceScatter")?,
                all_gather: function(handle, c"ncclAllGather")?,
                broadcast: function(handle, c"ncclBroadcast")?,
            })
        }
    }

    fn check(&self, operation: &'static str, status: Status) -> Result<(), Error> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: NCCL returns a static text for every status.
        let message = unsafe { CStr::from_ptr((self.error_string)(status)) };
        Err(Error::Nccl { operation, message: message.to_string_lossy().into_owned() })
    }
}

/// The function of that name.
///
/// # Safety
/// `F` must be a function pointer of the symbol's type.
unsafe fn function<F: Copy>(handle: *mut c_void, name: &CStr) -> Result<F, Error> {
    // SAFETY: an open library and a text; a function pointer is as large as any other.
    unsafe {
        let found = libc::dlsym(handle, name.as_ptr());
        if found.is_null() {
            return Err(Error::NoNccl { reason: loader_message() });
        }
        assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
        Ok(std::mem::transmute_copy(&found))
    }
}

/// Whether NCCL and the driver can be used on this machine.
///
/// # Errors
/// [`Error::NoNccl`] with the loader's reason.
pub fn find_nccl() -> Result<(), Error> {
    Library::open(LIBRARY)?;
    // cudarc panics without it.
    open_library(DRIVER, libc::RTLD_NOW).map_err(|reason| Error::NoNccl { reason })?;
    Ok(())
}

/// What the ranks of a new group must present; made by one of them.
///
/// # Errors
/// [`Error::NoNccl`], [`Error::Nccl`].
pub fn nccl_id() -> Result<[u8; ID_BYTES], Error> {
    let library = Library::open(LIBRARY)?;
    let mut id = UniqueId([0; ID_BYTES]);
    // SAFETY: the out pointer is a local.
    library.check("make an id", unsafe { (library.get_unique_id)(&mut id) })?;
    Ok(id.0.map(|byte| byte as u8))
}

/// One process's place in a group of GPU processes, for CUDA tensors that are contiguous.
///
/// All processes must start the same collectives in the same order. A peer that dies or hangs
/// leaves the GPU waiting: NCCL has no timeouts, so something beside it must.
pub struct NcclGroup {
    library: Library,
    comm: Comm,
    /// What the computation runs on.
    compute: Arc<CudaStream>,
    /// What the collectives run on.
    stream: Arc<CudaStream>,
    size: i64,
}

// SAFETY: a communicator may be used by any thread, one at a time; it is not Sync.
unsafe impl Send for NcclGroup {}

impl NcclGroup {
    /// Joins the group of `id` as `rank` of `size`, with the GPU `device`; returns when all have.
    ///
    /// # Errors
    /// [`Error::NoNccl`], [`Error::Nccl`]: two ranks on one GPU are refused, for instance.
    pub fn join(
        id: &[u8; ID_BYTES],
        (rank, size): (usize, usize),
        device: usize,
    ) -> Result<Self, Error> {
        find_nccl()?;
        let library = Library::open(LIBRARY)?;
        let context = CudaContext::new(device).map_err(driver("use the GPU"))?;
        let compute = context.default_stream();
        let stream = context.new_stream().map_err(driver("make a stream"))?;
        let mut comm = std::ptr::null_mut();
        let id = UniqueId(id.map(|byte| byte as c_char));
        let (nranks, own) = (to_int(size), to_int(rank));
        // The communicator is bound to the GPU that is current.
        context.bind_to_thread().map_err(driver("use the GPU"))?;
        // SAFETY: the out pointer is a local; the id is passed by value.
        library.check("join", unsafe { (library.init_rank)(&mut comm, nranks, id, own) })?;
        Ok(Self { library, comm, compute, stream, size: i64::from(nranks) })
    }

    /// Combines `tensor` over all ranks in place, in all of them.
    ///
    /// # Errors
    /// [`Error::Nccl`], as for all collectives, also where types or sizes do not fit.
    pub fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<NcclWork, Error> {
        let op = if op == ReduceOp::Max { 2 } else { 0 };
        let (data, kind) = (tensor.data_ptr(), kind_of("all-reduce", tensor)?);
        // SAFETY (here and below): contiguous memory of the GPU that the work keeps, of the size
        // and type that are named.
        self.start("all-reduce", &[tensor], |stream| unsafe {
            (self.library.all_reduce)(data, data, tensor.numel(), kind, op, self.comm, stream)
        })
    }

    /// Overwrites `tensor` in all ranks with that of `root`.
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<NcclWork, Error> {
        let (data, kind) = (tensor.data_ptr(), kind_of("broadcast", tensor)?);
        let root = to_int(root);
        self.start("broadcast", &[tensor], |stream| unsafe {
            (self.library.broadcast)(data, data, tensor.numel(), kind, root, self.comm, stream)
        })
    }

    /// Writes the `input`s of all ranks, one after the other, into `output`.
    pub fn all_gather(&self, output: &Tensor, input: &Tensor) -> Result<NcclWork, Error> {
        self.check_sizes("all-gather", output, input)?;
        let kind = kind_of("all-gather", input)?;
        let (from, to, count) = (input.data_ptr(), output.data_ptr(), input.numel());
        self.start("all-gather", &[output, input], |stream| unsafe {
            (self.library.all_gather)(from, to, count, kind, self.comm, stream)
        })
    }

    /// Sums the `input`s over all ranks and writes this rank's part into `output`.
    pub fn reduce_scatter(&self, output: &Tensor, input: &Tensor) -> Result<NcclWork, Error> {
        self.check_sizes("reduce-scatter", input, output)?;
        let kind = kind_of("reduce-scatter", input)?;
        let (from, to, count) = (input.data_ptr(), output.data_ptr(), output.numel());
        self.start("reduce-scatter", &[output, input], |stream| unsafe {
            (self.library.reduce_scatter)(from, to, count, kind, 0, self.comm, stream)
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

    /// Starts `call` behind what the computation has done so far.
    fn start(
        &self,
        operation: &'static str,
        tensors: &[&Tensor],
        call: impl FnOnce(Stream) -> Status,
    ) -> Result<NcclWork, Error> {
        self.stream.join(&self.compute).map_err(driver(operation))?;
        // The contexts of other GPUs may have been current on this thread.
        self.stream.context().bind_to_thread().map_err(driver(operation))?;
        self.library.check(operation, call(self.stream.cu_stream().cast()))?;
        let done = self.stream.record_event(None).map_err(driver(operation))?;
        let tensors = tensors.iter().map(|tensor| tensor.shallow_clone()).collect();
        Ok(NcclWork { operation, done, compute: Arc::clone(&self.compute), _tensors: tensors })
    }
}

impl Drop for NcclGroup {
    fn drop(&mut self) {
        // SAFETY: owned, ended once. Unlike destroying, aborting does not wait for lost peers; the
        // work that counts has been waited for.
        unsafe { (self.library.abort)(self.comm) };
    }
}

/// A collective that was started. Its tensors must not be read or written before
/// [`NcclWork::wait`].
pub struct NcclWork {
    operation: &'static str,
    done: CudaEvent,
    compute: Arc<CudaStream>,
    /// The allocator must not hand their memory to others meanwhile.
    _tensors: Vec<Tensor>,
}

impl NcclWork {
    /// Makes the computation wait for the result from here on; the host goes on.
    ///
    /// # Errors
    /// [`Error::Nccl`] where the driver refuses.
    pub fn wait(&self) -> Result<(), Error> {
        self.compute.wait(&self.done).map_err(driver(self.operation))
    }
}

impl Drop for NcclWork {
    fn drop(&mut self) {
        // Memory that is freed below is used again in the order of the computation's stream.
        let _ = self.wait();
    }
}

fn driver(operation: &'static str) -> impl FnOnce(DriverError) -> Error {
    move |error| Error::Nccl { operation, message: error.to_string() }
}

/// nccl.h's number of an element type.
fn kind_of(operation: &'static str, tensor: &Tensor) -> Result<c_int, Error> {
    let refuse = |message: String| Err(Error::Nccl { operation, message });
    if !matches!(tensor.device(), Device::Cuda(_)) {
        return refuse(format!("a tensor on {:?}, but NCCL takes those of a GPU", tensor.device()));
    }
    match tensor.kind() {
        Kind::Int64 => Ok(4),
        Kind::Half => Ok(6),
        Kind::Float => Ok(7),
        Kind::Double => Ok(8),
        Kind::BFloat16 => Ok(9),
        kind => refuse(format!("no collective for {kind:?}")),
    }
}

fn to_int(number: usize) -> c_int {
    c_int::try_from(number).expect("ranks fit in 31 bits")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_and_another_not_taken_for_it() {
        let check = |name: &CStr, expected: &str| {
            let error = Library::open(name).err().unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(c"libnccl-of-nobody.so.2", "NCCL cannot be used: libnccl-of-nobody.so.2");
        check(c"libc.so.6", "ncclGetUniqueId");
    }

    #[test]
    fn finding_agrees_with_joining() {
        // Without NCCL both say why; with it this machine may still lack a GPU.
        if let Err(missing) = find_nccl() {
            let refused = NcclGroup::join(&[0; ID_BYTES], (0, 1), 0).err().unwrap();
            assert_eq!(refused.to_string(), missing.to_string());
        }
    }

    #[test]
    fn tensors_of_the_cpu_are_refused() {
        let tensor = Tensor::zeros([2], (Kind::Float, Device::Cpu));
        let error = kind_of("all-reduce", &tensor).unwrap_err().to_string();
        assert!(error.contains("all-reduce") && error.contains("Cpu"), "{error}");
    }
}
