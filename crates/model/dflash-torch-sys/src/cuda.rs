//! Loads libtorch's CUDA library at startup instead of linking it, so that one program runs on
//! machines with and without a GPU. It is loaded if an NVIDIA driver is present; on such a machine
//! the search for libtorch therefore prefers one with CUDA libraries.

use std::ffi::{CStr, CString, c_int, c_void};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::driver::CudaContext;

use crate::{Error, ffi};

const LIBRARY: &str = "libtorch_cuda.so";

/// Result of loading libtorch's CUDA library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CudaLibrary {
    /// Loaded; `tch::Cuda::is_available` tells whether there is a device.
    Loaded,
    /// This libtorch has no CUDA library.
    Absent,
    /// It does not load, usually because NVIDIA's libraries are not installed. Has the loader's
    /// message.
    Failed(String),
}

/// Loads the `libtorch_cuda.so` next to the libtorch in use, if there is one.
///
/// Call this before any other libtorch function: libtorch checks for CUDA once and caches the
/// answer. The library stays loaded, and later calls return the first result. Loading takes about a
/// second. Also disables cuDNN attention, which builds a new plan for each new length.
pub fn load_cuda() -> CudaLibrary {
    let opened = || {
        // SAFETY: sets a flag of the process.
        unsafe { ffi::dflash_leave_out_cudnn_attention() };
        match libtorch_dir().map(|dir| dir.join(LIBRARY)) {
            Some(path) if path.is_file() => open(&path),
            _ => CudaLibrary::Absent,
        }
    };
    OPENED.get_or_init(opened).clone()
}

static OPENED: OnceLock<CudaLibrary> = OnceLock::new();

/// The result of [`load_cuda`]; `None` if it has not been called.
pub fn opened_cuda() -> Option<CudaLibrary> {
    OPENED.get().cloned()
}

fn open(path: &Path) -> CudaLibrary {
    let Ok(name) = CString::new(path.as_os_str().as_bytes()) else {
        return CudaLibrary::Absent;
    };
    match open_library(&name, libc::RTLD_NOW | libc::RTLD_GLOBAL) {
        Ok(_) => CudaLibrary::Loaded,
        Err(reason) => CudaLibrary::Failed(reason),
    }
}

/// Opens a library that stays loaded until the process exits.
///
/// # Errors
/// The loader's message.
pub fn open_library(name: &CStr, flags: c_int) -> Result<*mut c_void, String> {
    // SAFETY: runs the library's initialisers, as linking it would.
    let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
    if handle.is_null() { Err(loader_message()) } else { Ok(handle) }
}

/// The function `name` of an open library.
///
/// # Errors
/// The loader's message.
///
/// # Safety
/// `F` must be a function pointer of the symbol's type.
pub unsafe fn function<F: Copy>(handle: *mut c_void, name: &CStr) -> Result<F, String> {
    // SAFETY: an open library and a NUL-terminated name; all function pointers have the same size.
    unsafe {
        let found = libc::dlsym(handle, name.as_ptr());
        if found.is_null() {
            return Err(loader_message());
        }
        assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
        Ok(std::mem::transmute_copy(&found))
    }
}

/// Peak bytes of this process's tensors on the GPU `index`.
///
/// # Errors
/// A libtorch without CUDA, or no such GPU.
pub fn peak_device_bytes(index: usize) -> Result<u64, Error> {
    let index = i32::try_from(index).unwrap_or(i32::MAX);
    let mut bytes = 0;
    // SAFETY: the out pointer is a local.
    let failure = unsafe { ffi::dflash_peak_device_bytes(index, &mut bytes) };
    ffi::checked("read the GPU's memory statistics", failure)?;
    Ok(bytes.unsigned_abs())
}

/// Free memory on the GPU `index` in bytes, according to the driver.
///
/// # Errors
/// No driver, or no such GPU.
pub fn free_device_bytes(index: usize) -> Result<u64, Error> {
    let asked = CudaContext::new(index).and_then(|context| context.mem_get_info());
    let operation = "read the GPU's free memory";
    let (free, _) =
        asked.map_err(|error| Error::Torch { operation, message: error.to_string() })?;
    Ok(free as u64)
}

/// libtorch's current stream on the GPU `index`, as a driver handle.
pub fn current_stream(index: usize) -> Result<*mut c_void, Error> {
    let index = i32::try_from(index).unwrap_or(i32::MAX);
    let mut stream = std::ptr::null_mut();
    // SAFETY: the out pointer is a local.
    let failure = unsafe { ffi::dflash_current_stream(index, &mut stream) };
    ffi::checked("ask for the current stream", failure).map(|()| stream)
}

/// The directory of the loaded libtorch_cpu.
pub fn libtorch_dir() -> Option<PathBuf> {
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: any symbol defined by libtorch_cpu works; `found` is written on success and its name
    // lives as long as the library.
    let file = unsafe {
        let symbol = libc::dlsym(libc::RTLD_DEFAULT, LIBTORCH_SYMBOL.as_ptr());
        if symbol.is_null() || libc::dladdr(symbol, found.as_mut_ptr()) == 0 {
            return None;
        }
        CStr::from_ptr(found.assume_init().dli_fname)
    };
    let path = PathBuf::from(std::ffi::OsString::from_vec(file.to_bytes().to_vec()));
    path.parent().map(Path::to_owned)
}

/// `at::show_config()`: called by the shim, so every program of ours references it.
const LIBTORCH_SYMBOL: &CStr = c"_ZN2at11show_configB5cxx11Ev";

fn loader_message() -> String {
    // SAFETY: dlerror's text is valid until this thread's next call of the loader.
    unsafe {
        let message = libc::dlerror();
        if message.is_null() {
            return "the loader gave no reason".to_owned();
        }
        CStr::from_ptr(message).to_string_lossy().into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_of_libtorch_holds_libtorch_cpu() {
        let dir = libtorch_dir().unwrap();
        assert!(dir.join("libtorch_cpu.so").is_file(), "{}", dir.display());
    }

    #[test]
    fn loading_agrees_with_what_lies_on_disk() {
        let present = libtorch_dir().unwrap().join(LIBRARY).is_file();
        match load_cuda() {
            CudaLibrary::Absent => assert!(!present),
            CudaLibrary::Loaded => assert!(present),
            CudaLibrary::Failed(message) => {
                assert!(present);
                assert!(message.contains("lib"), "{message}");
            }
        }
    }

    #[test]
    fn cudnn_is_left_out_of_attention() {
        load_cuda();
        // SAFETY: reads a flag of the process.
        assert!(!unsafe { ffi::dflash_uses_cudnn_attention() });
    }

    #[test]
    fn memory_is_known_where_there_is_a_gpu() {
        let found = peak_device_bytes(0);
        assert_eq!(found.is_ok(), tch::Cuda::is_available(), "{found:?}");
    }

    #[test]
    fn a_file_that_is_not_a_library_is_named() {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda.rs");
        let outcome = open(Path::new(source));
        let CudaLibrary::Failed(message) = outcome else { panic!("{outcome:?}") };
        assert!(message.contains("cuda.rs"), "{message}");
    }
}
