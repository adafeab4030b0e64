//! The kernels as machine code: compiled on first use, cached in the user's cache directory, loaded
//! once per process.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUmodule};
use cudarc::driver::{CudaContext, result};
use dflash_torch_sys::{Error, current_stream, open_library};
use sha2::{Digest, Sha256};

use super::launch::Size;
use super::nvrtc::Nvrtc;

const SOURCE: &str = include_str!("../../cuda/kernels.cu");

/// Shared memory in bytes that needs no opt-in.
const SHARED_UNASKED: usize = 48 << 10;

/// Loaded kernels per GPU; `None` if they are not available, after a warning.
static LOADED: Mutex<BTreeMap<usize, Option<Arc<Image>>>> = Mutex::new(BTreeMap::new());

struct Image {
    context: Arc<CudaContext>,
    module: CUmodule,
    functions: Mutex<BTreeMap<KernelInstance, Function>>,
}

#[derive(Clone, Copy)]
struct Function(CUfunction);

// SAFETY: driver handles may be used from any thread; the image stays loaded until exit.
unsafe impl Send for Image {}
// SAFETY: as above.
unsafe impl Sync for Image {}
// SAFETY: as above.
unsafe impl Send for Function {}

/// Whether the GPU `index` can run the kernels. The first call compiles or loads them, and warns
/// once if that fails.
pub(crate) fn usable(index: usize) -> bool {
    loaded(index).is_some()
}

fn loaded(index: usize) -> Option<Arc<Image>> {
    let mut all = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let image = all.entry(index).or_insert_with(|| match Image::load(index) {
        Ok(image) => Some(Arc::new(image)),
        Err(error) => {
            tracing::warn!(
                "GPU {index} computes norms, rotations and merges by libtorch's operations, which \
                 takes longer: {error}"
            );
            None
        }
    });
    image.clone()
}

/// Which function of the source: a kernel, and its instance for a type and a width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct KernelInstance {
    pub(super) name: &'static str,
    pub(super) instance: &'static str,
}

/// Launches the kernel `name` on the GPU `index`, on libtorch's current stream.
///
/// # Errors
/// The driver's error.
///
/// # Safety
/// `arguments` must point to the kernel's struct, whose pointers stay valid until the stream has
/// executed the launch.
pub(super) unsafe fn launch(
    index: usize,
    name: KernelInstance,
    size: Size,
    arguments: *mut c_void,
) -> Result<(), Error> {
    let image = loaded(index).expect("the kernels were asked for before");
    let stream = current_stream(index)?;
    // Another GPU may be current on this thread.
    image.context.bind_to_thread().map_err(driver("use the GPU"))?;
    let function = image.function(name, size.shared)?;
    // SAFETY: guaranteed by the caller; a function of a loaded module.
    unsafe {
        result::launch_kernel(
            function,
            (size.blocks, 1, 1),
            (size.threads, 1, 1),
            size.shared as u32,
            stream.cast(),
            &mut [arguments],
        )
    }
    .map_err(driver("start a kernel"))
}

impl Image {
    fn load(index: usize) -> Result<Self, Error> {
        // cudarc panics if the library is missing.
        open_library(c"libcuda.so.1", libc::RTLD_NOW)
            .map_err(|message| Error::Torch { operation: "open the driver", message })?;
        let context = CudaContext::new(index).map_err(driver("use the GPU"))?;
        let (major, minor) = context.compute_capability().map_err(driver("ask the GPU"))?;
        let compiled = Compiled { architecture: format!("sm_{major}{minor}"), cache: cache_dir() };
        let nvrtc = Nvrtc::find()?;
        let (image, kept) = compiled.image(&nvrtc)?;
        let module = match load_module(&image) {
            Err(error) if kept => {
                tracing::debug!("the cached kernels do not load and are recompiled: {error}");
                load_module(&compiled.compile(&nvrtc)?)?
            }
            outcome => outcome?,
        };
        Ok(Self { context, module, functions: Mutex::default() })
    }

    fn function(&self, name: KernelInstance, shared: usize) -> Result<CUfunction, Error> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let function = match functions.get(&name) {
            Some(known) => known.0,
            None => self.find(name)?,
        };
        functions.insert(name, Function(function));
        if shared > SHARED_UNASKED {
            let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: a function of a loaded module.
            unsafe { result::function::set_function_attribute(function, most, shared as i32) }
                .map_err(driver("take more shared memory"))?;
        }
        Ok(function)
    }

    fn find(&self, name: KernelInstance) -> Result<CUfunction, Error> {
        let KernelInstance { name, instance } = name;
        let symbol =
            CString::new(format!("dflash_gpu_{name}{instance}")).expect("names have no NUL");
        // SAFETY: a loaded module and a NUL-terminated name.
        unsafe { result::module::get_function(self.module, symbol) }
            .map_err(driver("find a kernel"))
    }
}

/// Loads machine code into the current context.
fn load_module(image: &[u8]) -> Result<CUmodule, Error> {
    // SAFETY: the driver validates the image and reads no further than its header says; the digest
    // in its file name vouches for it.
    unsafe { result::module::load_data(image.as_ptr().cast()) }.map_err(driver("load the kernels"))
}

fn driver(operation: &'static str) -> impl Fn(cudarc::driver::DriverError) -> Error {
    move |error| Error::Torch { operation, message: error.to_string() }
}

/// The kernels for one architecture, and where they are cached.
struct Compiled {
    /// Such as `sm_90`.
    architecture: String,
    /// `None` if the user has no cache directory.
    cache: Option<PathBuf>,
}

impl Compiled {
    /// The machine code, and whether it came from the cache.
    fn image(&self, nvrtc: &Nvrtc) -> Result<(Vec<u8>, bool), Error> {
        let path = self.path(&nvrtc.version()?);
        match path.as_deref().and_then(read) {
            Some(image) => Ok((image, true)),
            None => Ok((self.compile(nvrtc)?, false)),
        }
    }

    /// Compiles, and writes the cache.
    fn compile(&self, nvrtc: &Nvrtc) -> Result<Vec<u8>, Error> {
        let source = CString::new(SOURCE).expect("a source has no NUL");
        let image = nvrtc.compile(&source, &self.architecture)?;
        if let Some(path) = self.path(&nvrtc.version()?)
            && let Err(error) = keep(&path, &image)
        {
            tracing::debug!("the kernels are not kept for the next start: {error}");
        }
        Ok(image)
    }

    /// The file name digests everything that the code depends on.
    fn path(&self, version: &str) -> Option<PathBuf> {
        let mut digest = Sha256::new();
        for part in [SOURCE, &self.architecture, version] {
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
        let digest: String =
            digest.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        let name = format!("{}-{digest}.cubin", self.architecture);
        self.cache.as_ref().map(|cache| cache.join("dflash/kernels").join(name))
    }
}

/// The user's cache directory.
fn cache_dir() -> Option<PathBuf> {
    let directory =
        |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    directory("XDG_CACHE_HOME").or_else(|| directory("HOME").map(|home| home.join(".cache")))
}

/// Reads a cached image: the digest of the code, then the code. `None` if absent or damaged.
fn read(path: &Path) -> Option<Vec<u8>> {
    let file = std::fs::read(path).ok()?;
    let (digest, image) = file.split_at_checked(DIGEST)?;
    (digest == Sha256::digest(image).as_slice() && !image.is_empty()).then(|| image.to_vec())
}

fn keep(path: &Path, image: &[u8]) -> Result<(), dflash_io::Error> {
    let dir = path.parent().expect("a file of the cache lies in a directory");
    std::fs::create_dir_all(dir).map_err(dflash_io::Error::io("create", dir))?;
    let mut file = Sha256::digest(image).to_vec();
    file.extend(image);
    dflash_io::write_bytes(path, &file)
}

/// Bytes of a SHA-256.
const DIGEST: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    fn compiled(cache: &Path, architecture: &str) -> Compiled {
        Compiled { architecture: architecture.to_owned(), cache: Some(cache.to_owned()) }
    }

    #[test]
    fn what_is_kept_is_whole_and_known_by_all_that_made_it() {
        let cache = tempfile::tempdir().unwrap();
        let compiled = compiled(cache.path(), "sm_90");
        let path = compiled.path("13.0").unwrap();
        assert_eq!(read(&path), None);
        keep(&path, b"code").unwrap();
        assert_eq!(read(&path).unwrap(), b"code");
        assert_ne!(compiled.path("12.8").unwrap(), path);
        let mut file = std::fs::read(&path).unwrap();
        *file.last_mut().unwrap() ^= 1;
        std::fs::write(&path, &file).unwrap();
        assert_eq!(read(&path), None);
        std::fs::write(&path, &file[..7]).unwrap();
        assert_eq!(read(&path), None);
    }

    /// If NVRTC is installed it compiles the kernels, with or without a GPU, for each architecture
    /// that flash attention supports; otherwise the error names it.
    #[test]
    fn the_kernels_compile_and_are_compiled_once() {
        let nvrtc = match Nvrtc::find() {
            Ok(nvrtc) => nvrtc,
            Err(error) => {
                let error = error.to_string();
                assert!(error.starts_with("NVRTC cannot be used: libnvrtc"), "{error}");
                return;
            }
        };
        let cache = tempfile::tempdir().unwrap();
        for architecture in ["sm_80", "sm_89", "sm_90", "sm_100"] {
            let compiled = compiled(cache.path(), architecture);
            let (image, kept) = compiled.image(&nvrtc).unwrap();
            assert!(!kept && image.starts_with(b"\x7fELF"));
            for (name, _) in super::super::launch::kernels() {
                let name = format!("dflash_gpu_{name}\0");
                let found = image.windows(name.len()).any(|part| part == name.as_bytes());
                assert!(found, "{architecture}: {name}");
            }
            assert_eq!(compiled.image(&nvrtc).unwrap(), (image, true));
        }
        let broken = nvrtc.compile(c"__global__ void f() { nothing; }", "sm_90").unwrap_err();
        assert!(broken.to_string().contains("\"nothing\" is undefined"), "{broken}");
        let unknown = compiled(cache.path(), "sm_1").image(&nvrtc).unwrap_err().to_string();
        assert!(unknown.contains("gpu-architecture"), "{unknown}");
    }
}
