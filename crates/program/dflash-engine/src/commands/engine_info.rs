//! `dflash engine-info`: what the loaded libraries report about themselves, for `dflash doctor`.

use dflash_kernels::cpu_level;
use dflash_torch_sys::{
    CudaLibrary, LibraryLevels, find_nccl, library_levels, libtorch_version, load_cuda,
};
use serde_json::{Value, json};

/// Prints one JSON object. Tries to open the CUDA library even without a driver, so that the object
/// says why CUDA is unusable.
pub(crate) fn run() -> anyhow::Result<()> {
    let (library, reason) = match load_cuda() {
        CudaLibrary::Loaded => ("loaded", None),
        CudaLibrary::Absent => ("absent", None),
        CudaLibrary::Failed(reason) => ("failed", Some(reason)),
    };
    let nccl = find_nccl().err().map_or(Value::Null, |error| json!(error.to_string()));
    let LibraryLevels { libtorch, mkl } = library_levels()?;
    let info = json!({
        "cpu_level": cpu_level(),
        "libtorch_level": libtorch,
        "mkl_level": mkl,
        "version": env!("CARGO_PKG_VERSION"),
        "libtorch": libtorch_version()?,
        "threads": tch::get_num_threads(),
        "cuda_library": library,
        "cuda_failure": reason,
        "cuda_devices": tch::Cuda::device_count(),
        "nccl_failure": nccl,
    });
    println!("{info}");
    Ok(())
}
