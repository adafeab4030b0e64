//! NVIDIA's runtime compiler, loaded dynamically.
//!
//! cudarc wraps it too, but its loader tries neither the names used by pip packages, such as
//! `libnvrtc.so.13`, nor their directory.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::null;

use dflash_torch_sys::{Error, function, libtorch_dir, open_library};

type Status = c_int;
type Program = *mut c_void;

/// Names for the dynamic loader's search path.
const NAMES: [&CStr; 3] = [c"libnvrtc.so.13", c"libnvrtc.so.12", c"libnvrtc.so"];

/// Directories of the pip packages, relative to libtorch's.
const BESIDE: [&str; 3] = [".", "../../nvidia/cu13/lib", "../../nvidia/cuda_nvrtc/lib"];

/// File name prefixes of the library and of its companion, which it opens by name.
const FILE: &str = "libnvrtc.so.";
const BUILTINS: &str = "libnvrtc-builtins.so.";

pub(super) struct Nvrtc {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    image_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    image: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
}

impl Nvrtc {
    /// Opens the one installed with libtorch, or else the system's.
    ///
    /// # Errors
    /// [`Error::NoNvrtc`].
    pub(super) fn find() -> Result<Self, Error> {
        let beside = libtorch_dir().and_then(|torch| beside(&torch));
        let mut reason = String::new();
        for name in beside.iter().map(CString::as_c_str).chain(NAMES) {
            match open_library(name, libc::RTLD_NOW | libc::RTLD_LOCAL) {
                Ok(handle) => return Self::of(handle),
                Err(refusal) if reason.is_empty() => reason = refusal,
                Err(_) => {}
            }
        }
        Err(Error::NoNvrtc { reason })
    }

    fn of(handle: *mut c_void) -> Result<Self, Error> {
        let absent = |reason| Error::NoNvrtc { reason };
        // SAFETY: the field types match the declarations in nvrtc.h.
        unsafe {
            Ok(Self {
                version: function(handle, c"nvrtcVersion").map_err(absent)?,
                create: function(handle, c"nvrtcCreateProgram").map_err(absent)?,
                destroy: function(handle, c"nvrtcDestroyProgram").map_err(absent)?,
                compile: function(handle, c"nvrtcCompileProgram").map_err(absent)?,
                log_size: function(handle, c"nvrtcGetProgramLogSize").map_err(absent)?,
                log: function(handle, c"nvrtcGetProgramLog").map_err(absent)?,
                image_size: function(handle, c"nvrtcGetCUBINSize").map_err(absent)?,
                image: function(handle, c"nvrtcGetCUBIN").map_err(absent)?,
                error_string: function(handle, c"nvrtcGetErrorString").map_err(absent)?,
            })
        }
    }

    /// The version, such as `13.0`.
    pub(super) fn version(&self) -> Result<String, Error> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: pointers to two locals.
        self.check("ask for the version", unsafe { (self.version)(&mut major, &mut minor) })?;
        Ok(format!("{major}.{minor}"))
    }

    /// Compiles `source` for `architecture`, such as `sm_90`.
    ///
    /// # Errors
    /// [`Error::Compile`], with the compiler's log.
    pub(super) fn compile(&self, source: &CStr, architecture: &str) -> Result<Vec<u8>, Error> {
        let mut program = std::ptr::null_mut();
        // SAFETY: NUL-terminated strings; no headers.
        self.check("begin", unsafe {
            let name = c"kernels.cu".as_ptr();
            (self.create)(&mut program, source.as_ptr(), name, 0, null(), null())
        })?;
        let image = self.build(program, architecture);
        // SAFETY: a program of this library, destroyed once.
        unsafe { (self.destroy)(&mut program) };
        image
    }

    fn build(&self, program: Program, architecture: &str) -> Result<Vec<u8>, Error> {
        let architecture = CString::new(format!("--gpu-architecture={architecture}"))
            .expect("the name of an architecture has no NUL");
        let options = [architecture.as_ptr(), c"--std=c++17".as_ptr()];
        // SAFETY: a live program; NUL-terminated strings.
        let status = unsafe { (self.compile)(program, options.len() as c_int, options.as_ptr()) };
        if status != 0 {
            let log = self.bytes(program, self.log_size, self.log).unwrap_or_default();
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
            return Err(Error::Compile { message: format!("{}: {log}", self.text(status)) });
        }
        self.bytes(program, self.image_size, self.image)
    }

    fn bytes(
        &self,
        program: Program,
        size: unsafe extern "C" fn(Program, *mut usize) -> Status,
        get: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    ) -> Result<Vec<u8>, Error> {
        let mut length = 0;
        // SAFETY: a live program and a buffer of the size it asks for.
        unsafe {
            self.check("ask for the result's size", size(program, &mut length))?;
            let mut bytes = vec![0; length];
            self.check("fetch the result", get(program, bytes.as_mut_ptr().cast()))?;
            Ok(bytes)
        }
    }

    fn check(&self, operation: &str, status: Status) -> Result<(), Error> {
        match status {
            0 => Ok(()),
            _ => Err(Error::Compile { message: format!("{operation}: {}", self.text(status)) }),
        }
    }

    fn text(&self, status: Status) -> String {
        // SAFETY: NVRTC returns a static string for every status.
        unsafe { CStr::from_ptr((self.error_string)(status)) }.to_string_lossy().into_owned()
    }
}

/// The library's path near libtorch. Also opens its companion, which the library later looks up by
/// name.
fn beside(torch: &Path) -> Option<CString> {
    let dir = BESIDE.iter().map(|place| torch.join(place)).find(|dir| file(dir, FILE).is_some())?;
    if let Some(builtins) = file(&dir, BUILTINS).and_then(text) {
        // If this fails, NVRTC reports it when it compiles.
        let _ = open_library(&builtins, libc::RTLD_NOW | libc::RTLD_GLOBAL);
    }
    file(&dir, FILE).and_then(text)
}

/// The first file in `dir` whose name starts with `start`.
fn file(dir: &Path, start: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(dir).ok()?;
    let begins = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.as_bytes().starts_with(start.as_bytes()))
    };
    entries.flatten().map(|entry| entry.path()).filter(begins).min()
}

fn text(path: PathBuf) -> Option<CString> {
    CString::new(path.as_os_str().as_bytes()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_found_in_pips_layout() {
        let root = tempfile::tempdir().unwrap();
        let torch = root.path().join("torch/lib");
        let nvidia = root.path().join("nvidia/cu13/lib");
        std::fs::create_dir_all(&torch).unwrap();
        assert_eq!(beside(&torch), None);
        std::fs::create_dir_all(&nvidia).unwrap();
        for name in ["libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc.alt.so.13"] {
            std::fs::write(nvidia.join(name), "no library").unwrap();
        }
        let found = beside(&torch).unwrap();
        assert!(found.to_str().unwrap().ends_with("nvidia/cu13/lib/libnvrtc.so.13"), "{found:?}");
    }

    #[test]
    fn another_library_is_not_taken_for_it() {
        let handle = open_library(c"libc.so.6", libc::RTLD_NOW).unwrap();
        let error = Nvrtc::of(handle).err().unwrap().to_string();
        assert!(error.contains("nvrtcVersion"), "{error}");
    }
}
