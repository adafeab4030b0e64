//! Maps the `--device` and `--dtype` settings to a device and a type on this machine.

use std::path::Path;

use dflash_settings::{Device as Asked, Dtype, Invalid};
use dflash_torch_sys::{CudaLibrary, opened_cuda, trace};
use tch::kind::Element;
use tch::{Cuda, Device, Kind, Tensor};

/// Exists wherever NVIDIA's kernel driver is loaded, including in containers.
const DEVICE_NODE: &str = "/dev/nvidiactl";
/// GPUs visible to the process, by number or name; an invalid first entry hides all.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// Where something is computed, and in which kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceKind {
    /// The device that holds the tensors.
    pub device: Device,
    /// The kind of weights and activations.
    pub kind: Kind,
}

impl DeviceKind {
    /// float32 on the CPU.
    pub const CPU_F32: Self = Self { device: Device::Cpu, kind: Kind::Float };

    /// As `tch` takes them to create a tensor.
    pub fn options(self) -> (Kind, Device) {
        (self.kind, self.device)
    }
}

/// The requested device and the type of weights and activations: bfloat16 on a GPU and float32 on a
/// CPU, unless `dtype` says otherwise. `local` is the index of this process among those on the
/// machine that use one GPU each.
///
/// # Errors
/// A GPU that libtorch does not see. Also `auto` on a machine whose GPUs libtorch does not see,
/// which would otherwise silently compute on the CPU.
pub fn place(asked: Asked, dtype: Dtype, local: usize) -> Result<DeviceKind, Invalid> {
    let device = Gpus::here().device(asked, local)?;
    let kind = match (dtype, device) {
        (Dtype::Float32, _) | (Dtype::Auto, Device::Cpu) => Kind::Float,
        (Dtype::Bfloat16, _) | (Dtype::Auto, _) => Kind::BFloat16,
    };
    Ok(DeviceKind { device, kind })
}

/// How many one-GPU processes `asked` has room for; `None` on a CPU.
///
/// # Errors
/// As [`place`].
pub fn gpus_for(asked: Asked) -> Result<Option<usize>, Invalid> {
    let gpus = Gpus::here();
    match gpus.device(asked, 0) {
        Ok(Device::Cpu) => Ok(None),
        // Without any GPU, the caller reports the error.
        Err(error) if asked == Asked::Auto => Err(error),
        _ => Ok(Some(gpus.seen)),
    }
}

/// The machine's GPUs, and how many libtorch sees.
#[derive(Debug)]
struct Gpus {
    seen: usize,
    /// Whether the machine has GPUs that are not hidden from this process.
    are_there: bool,
    /// Result of loading libtorch's CUDA library.
    library: Option<CudaLibrary>,
}

impl Gpus {
    fn here() -> Self {
        let seen = if Cuda::is_available() { Cuda::device_count().max(0) as usize } else { 0 };
        let visible = std::env::var(VISIBLE).ok();
        let are_there = are_there(Path::new(DEVICE_NODE), visible.as_deref());
        Self { seen, are_there, library: opened_cuda() }
    }

    fn device(&self, asked: Asked, local: usize) -> Result<Device, Invalid> {
        let seen = self.seen;
        match asked {
            Asked::Cpu => Ok(Device::Cpu),
            Asked::Auto if seen == 0 && !self.are_there => Ok(Device::Cpu),
            Asked::Auto | Asked::Cuda(None) if seen > 0 => Ok(Device::Cuda(local % seen)),
            Asked::Cuda(Some(number)) if number < seen => Ok(Device::Cuda(number)),
            Asked::Auto | Asked::Cuda(_) => Err(Invalid::new("device", asked, self.why_not())),
        }
    }

    /// Why no GPU, or not this one, is usable, and the remedy.
    fn why_not(&self) -> String {
        let seen = self.seen;
        if seen > 0 || !self.are_there {
            return format!("libtorch sees {seen} CUDA devices here; pass --device cpu");
        }
        let whole = "install it with its CUDA libraries (`pip install torch==2.11.0`, or `make setup` \
                     again on this machine)";
        let (cause, remedies) = match &self.library {
            Some(CudaLibrary::Loaded) => (
                "this libtorch sees none of them: torch 2.11.0 as PyPI has it is built for CUDA 13, \
                 which needs NVIDIA driver 580 or newer"
                    .to_owned(),
                "update the driver, or install torch 2.11.0 for an older CUDA (docs/install.md)"
                    .to_owned(),
            ),
            Some(CudaLibrary::Failed(reason)) => {
                (format!("libtorch's CUDA library does not load: {reason}"), whole.to_owned())
            }
            Some(CudaLibrary::Absent) | None => {
                ("this libtorch is built without CUDA".to_owned(), whole.to_owned())
            }
        };
        format!(
            "the machine has NVIDIA GPUs and {cause}; {remedies}, or pass --device cpu ({VISIBLE}= \
             where a command has no such flag)"
        )
    }
}

/// Whether there are visible GPUs: the driver's device node exists, and `visible`, if set, does not
/// start with an invalid entry.
fn are_there(node: &Path, visible: Option<&str>) -> bool {
    let first = visible.map(|list| list.split(',').next().unwrap_or("").trim());
    let hidden = first.is_some_and(|first| ["", "-1", "NoDevFiles", "void"].contains(&first));
    node.exists() && !hidden
}

/// A device as the flags spell it, such as `cpu` or `cuda:1`.
pub fn device_name(device: Device) -> String {
    match device {
        Device::Cpu => "cpu".to_owned(),
        Device::Cuda(number) => format!("cuda:{number}"),
        Device::Mps => "mps".to_owned(),
        Device::Vulkan => "vulkan".to_owned(),
    }
}

/// A type as the flags spell it, such as `bfloat16`.
pub fn kind_name(kind: Kind) -> String {
    match kind {
        Kind::Float => "float32".to_owned(),
        Kind::Double => "float64".to_owned(),
        Kind::Half => "float16".to_owned(),
        kind => format!("{kind:?}").to_lowercase(),
    }
}

/// `values` as a one-dimensional tensor on `device`. Copies to a GPU are asynchronous, from pinned
/// memory.
pub fn upload<T: Element>(values: &[T], device: Device) -> Tensor {
    let host = Tensor::from_slice(values);
    let Device::Cuda(_) = device else { return host.to_device(device) };
    let kind = host.kind();
    // A fake CUDA device accepts any memory as pinned. Otherwise libtorch keeps freed pinned memory
    // until its pending copies are done.
    let host = if trace::is_fake_cuda() { host } else { host.internal_pin_memory(device) };
    host.to_device_(device, kind, true, false)
}

/// Peak resident memory of this process, MiB.
pub fn peak_resident_mib() -> Option<f64> {
    status_mib("VmHWM:")
}

/// Resident memory of this process, MiB.
pub fn resident_mib() -> Option<f64> {
    status_mib("VmRSS:")
}

fn status_mib(key: &str) -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with(key))?;
    let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_kinds_have_the_names_of_flags() {
        assert_eq!([Device::Cpu, Device::Cuda(1)].map(device_name), ["cpu", "cuda:1"]);
        let kinds = [Kind::Float, Kind::BFloat16, Kind::Double, Kind::Int64].map(kind_name);
        assert_eq!(kinds, ["float32", "bfloat16", "float64", "int64"]);
    }

    #[test]
    fn what_is_uploaded_keeps_kind_and_values() {
        let found = upload(&[3i64, -1], Device::Cpu);
        assert_eq!(Vec::<i64>::try_from(found).unwrap(), [3, -1]);
        assert_eq!(upload::<f64>(&[], Device::Cpu).size(), [0]);
    }

    #[test]
    fn a_device_is_had_or_refused() {
        let cpu = |dtype| place(Asked::Cpu, dtype, 3).unwrap();
        assert_eq!(cpu(Dtype::Auto), DeviceKind::CPU_F32);
        let half = DeviceKind { device: Device::Cpu, kind: Kind::BFloat16 };
        assert_eq!(cpu(Dtype::Bfloat16), half);
        let refused = place(Asked::Cuda(Some(99)), Dtype::Auto, 0).unwrap_err().to_string();
        assert!(refused.starts_with("--device is cuda:99, but "), "{refused}");
    }

    /// The device node exists (any file will do), and libtorch sees no device.
    #[test]
    fn gpus_that_libtorch_does_not_see_are_not_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let node = dir.path().join("nvidiactl");
        assert!(!are_there(&node, None));
        std::fs::write(&node, "").unwrap();
        assert!(are_there(&node, None) && are_there(&node, Some("0,1")));
        assert!(are_there(&node, Some("GPU-8932f937")));
        for hidden in ["", "-1", "NoDevFiles", " -1,0"] {
            assert!(!are_there(&node, Some(hidden)), "{hidden}");
        }
        let gpus = |seen, are_there, library| Gpus { seen, are_there, library };
        let refused = |gpus: &Gpus, asked, expected: &[&str]| {
            let error = gpus.device(asked, 0).unwrap_err().to_string();
            expected.iter().for_each(|part| assert!(error.contains(part), "{part}: {error}"));
        };
        let old_driver = gpus(0, true, Some(CudaLibrary::Loaded));
        let remedies = [
            "--device is auto",
            "driver 580",
            "update the driver",
            "for an older CUDA",
            "--device cpu",
        ];
        refused(&old_driver, Asked::Auto, &remedies);
        refused(&old_driver, Asked::Cuda(None), &["driver 580"]);
        assert_eq!(old_driver.device(Asked::Cpu, 0).unwrap(), Device::Cpu);
        let failed = gpus(0, true, Some(CudaLibrary::Failed("libcudart.so.13 is missing".into())));
        refused(
            &failed,
            Asked::Auto,
            &["libcudart.so.13 is missing", "pip install", "--device cpu"],
        );
        refused(&gpus(0, true, Some(CudaLibrary::Absent)), Asked::Auto, &["built without CUDA"]);
        let none = gpus(0, false, None);
        assert_eq!(none.device(Asked::Auto, 0).unwrap(), Device::Cpu);
        refused(&none, Asked::Cuda(Some(1)), &["libtorch sees 0 CUDA devices here"]);
        let two = gpus(2, true, Some(CudaLibrary::Loaded));
        assert_eq!(two.device(Asked::Auto, 3).unwrap(), Device::Cuda(1));
        refused(&two, Asked::Cuda(Some(2)), &["libtorch sees 2 CUDA devices here"]);
    }
}
