//! From what the user asks for to a device of this machine and the kind to compute in.

use dflash_settings::{Device as Asked, Dtype, Invalid};
use dflash_torch_sys::trace;
use tch::kind::Element;
use tch::{Cuda, Device, Kind, Tensor};

/// The device that is asked for, and the kind of weights and activations on it: bfloat16 on a GPU
/// and float32 on a CPU, unless `dtype` says otherwise. `local` is the number of this process among
/// those of the machine that each take a GPU.
///
/// # Errors
/// A GPU that libtorch does not see.
pub fn place(asked: Asked, dtype: Dtype, local: usize) -> Result<(Device, Kind), Invalid> {
    let devices = if Cuda::is_available() { Cuda::device_count().max(0) as usize } else { 0 };
    let device = match asked {
        Asked::Cpu => Device::Cpu,
        Asked::Auto if devices == 0 => Device::Cpu,
        Asked::Auto | Asked::Cuda(None) if devices > 0 => Device::Cuda(local % devices),
        Asked::Cuda(Some(number)) if number < devices => Device::Cuda(number),
        Asked::Auto | Asked::Cuda(_) => {
            let expected = format!("libtorch sees {devices} CUDA devices here; pass --device cpu");
            return Err(Invalid::new("device", asked, expected));
        }
    };
    let kind = match (dtype, device) {
        (Dtype::Float32, _) | (Dtype::Auto, Device::Cpu) => Kind::Float,
        (Dtype::Bfloat16, _) | (Dtype::Auto, _) => Kind::BFloat16,
    };
    Ok((device, kind))
}

/// A device as flags name it, such as `cpu` or `cuda:1`.
pub fn device_name(device: Device) -> String {
    match device {
        Device::Cpu => "cpu".to_owned(),
        Device::Cuda(number) => format!("cuda:{number}"),
        Device::Mps => "mps".to_owned(),
        Device::Vulkan => "vulkan".to_owned(),
    }
}

/// A kind of numbers as flags name it, such as `bfloat16`.
pub fn kind_name(kind: Kind) -> String {
    match kind {
        Kind::Float => "float32".to_owned(),
        Kind::Double => "float64".to_owned(),
        Kind::Half => "float16".to_owned(),
        kind => format!("{kind:?}").to_lowercase(),
    }
}

/// `values` on `device`, one-dimensional. A GPU copies them from pinned memory when it comes to that, and
/// nothing waits for it.
pub fn upload<T: Element>(values: &[T], device: Device) -> Tensor {
    let host = Tensor::from_slice(values);
    let Device::Cuda(_) = device else { return host.to_device(device) };
    let kind = host.kind();
    // A pretended GPU takes any memory for pinned. Else libtorch keeps pinned memory that is dropped
    // until the copies from it are done.
    let host = if trace::is_pretended() { host } else { host.internal_pin_memory(device) };
    host.to_device_(device, kind, true, false)
}

/// The kernel's high-water mark of this process's resident memory, MiB.
pub fn peak_resident_mib() -> Option<f64> {
    status_mib("VmHWM:")
}

/// This process's resident memory, MiB.
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
        assert_eq!(cpu(Dtype::Auto), (Device::Cpu, Kind::Float));
        assert_eq!(cpu(Dtype::Bfloat16), (Device::Cpu, Kind::BFloat16));
        let refused = place(Asked::Cuda(Some(99)), Dtype::Auto, 0).unwrap_err().to_string();
        assert!(refused.starts_with("--device is cuda:99, but libtorch sees"), "{refused}");
    }
}
