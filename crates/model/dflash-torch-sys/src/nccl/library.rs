//! The NCCL functions in use, as declared in NCCL 2's nccl.h.

use std::ffi::{CStr, c_char, c_int, c_void};

use super::ID_BYTES;
use crate::Error;
use crate::cuda::{function, open_library};

/// The name by which libtorch's CUDA library loads it.
const LIBRARY: &CStr = c"libnccl.so.2";

/// Symbol exported by a library that works on host memory; NVIDIA's has no such symbol.
const TAKES_HOST_MEMORY: &CStr = c"dflash_nccl_takes_host_memory";

/// `ncclRemoteError`: a peer died or the network failed.
const REMOTE: Status = 6;

/// `ncclInProgress`: not an error.
pub(super) const IN_PROGRESS: Status = 7;

pub(super) type Status = c_int;
pub(super) type Comm = *mut c_void;
pub(super) type Stream = *mut c_void;

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub(super) [c_char; ID_BYTES]);

/// Input, output, element count, element type, operation (or root), group, stream.
type Collective =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> Status;

#[derive(Clone, Copy)]
pub(super) struct Library {
    pub(super) get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> Status,
    pub(super) init_rank: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> Status,
    pub(super) abort: unsafe extern "C" fn(Comm) -> Status,
    pub(super) async_error: unsafe extern "C" fn(Comm, *mut Status) -> Status,
    pub(super) all_reduce: Collective,
    pub(super) reduce_scatter: Collective,
    pub(super) all_gather:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, Stream) -> Status,
    pub(super) broadcast: Collective,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    last_error: unsafe extern "C" fn(Comm) -> *const c_char,
    /// Whether it accepts CPU tensors.
    pub(super) takes_host_memory: bool,
}

impl Library {
    pub(super) fn open() -> Result<Self, Error> {
        Self::open_named(LIBRARY)
    }

    fn open_named(name: &CStr) -> Result<Self, Error> {
        let handle = open_library(name, libc::RTLD_NOW | libc::RTLD_LOCAL)
            .map_err(|reason| Error::NoNccl { reason })?;
        let absent = |reason| Error::NoNccl { reason };
        // SAFETY: the field types match the declarations in nccl.h.
        unsafe {
            Ok(Self {
                get_unique_id: function(handle, c"ncclGetUniqueId").map_err(absent)?,
                init_rank: function(handle, c"ncclCommInitRank").map_err(absent)?,
                abort: function(handle, c"ncclCommAbort").map_err(absent)?,
                async_error: function(handle, c"ncclCommGetAsyncError").map_err(absent)?,
                error_string: function(handle, c"ncclGetErrorString").map_err(absent)?,
                last_error: function(handle, c"ncclGetLastError").map_err(absent)?,
                all_reduce: function(handle, c"ncclAllReduce").map_err(absent)?,
                reduce_scatter: function(handle, c"ncclReduceScatter").map_err(absent)?,
                all_gather: function(handle, c"ncclAllGather").map_err(absent)?,
                broadcast: function(handle, c"ncclBroadcast").map_err(absent)?,
                takes_host_memory: !libc::dlsym(handle, TAKES_HOST_MEMORY.as_ptr()).is_null(),
            })
        }
    }

    /// Converts a nonzero status to an error: NCCL's name for it, and its last message about `comm`
    /// (null if there is none yet).
    pub(super) fn check(
        &self,
        operation: &'static str,
        comm: Comm,
        status: Status,
    ) -> Result<(), Error> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: NCCL returns a static string for every status; for a communicator, null or a
        // string that is valid until its next error.
        let (name, last) =
            unsafe { (text((self.error_string)(status)), text((self.last_error)(comm))) };
        let last = last.lines().next().unwrap_or_default().trim();
        let mut message = name;
        if !last.is_empty() {
            message = format!("{message}: {last}");
        }
        message.push_str(
            "; NCCL_DEBUG=INFO in the environment shows more, and --backend gloo does without NCCL",
        );
        Err(match status {
            REMOTE => Error::NcclPeer { operation, message },
            _ => Error::Nccl { operation, message },
        })
    }
}

/// # Safety
/// `pointer` must be null or a NUL-terminated string.
unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: guaranteed by the caller.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_and_another_not_taken_for_it() {
        let check = |name: &CStr, expected: &str| {
            let error = Library::open_named(name).err().unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(c"libnccl-of-nobody.so.2", "NCCL cannot be used: libnccl-of-nobody.so.2");
        check(c"libc.so.6", "ncclGetUniqueId");
    }
}
