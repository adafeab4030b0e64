//! Capabilities of the machine and the process's use of them: peak speed, peak memory.

use std::path::Path;

use dflash_settings::Invalid;
use dflash_tensor::peak_resident_mib;
use tch::Device;

use crate::gpus::Gpu;

/// The driver's directory of GPUs, each with a file of facts.
const DRIVER: &str = "/proc/driver/nvidia/gpus";

/// Peak of a rank's device in TFLOP/s: the user's value, or looked up by the GPU's name. A CPU's
/// peak depends on its clock under load and is not guessed.
pub(crate) fn peak_of(device: Device, given: Option<f64>) -> Option<f64> {
    let known = || match device {
        Device::Cuda(_) => Some(Gpu::named(gpu_name().as_deref()?)?.tflops),
        _ => None,
    };
    given.or_else(known)
}

/// The name of this machine's GPUs as reported by the driver; `None` without GPUs, or if they
/// differ, since the driver's order is not the process's.
pub fn gpu_name() -> Option<String> {
    name_in(Path::new(DRIVER))
}

fn name_in(driver: &Path) -> Option<String> {
    let mut names: Vec<String> = std::fs::read_dir(driver)
        .ok()?
        .filter_map(|gpu| std::fs::read_to_string(gpu.ok()?.path().join("information")).ok())
        .filter_map(|facts| {
            let model = facts.lines().find_map(|line| line.strip_prefix("Model:"))?;
            Some(model.trim().to_owned())
        })
        .collect();
    names.dedup();
    if names.len() == 1 { names.pop() } else { None }
}

/// Peak memory of this process on `device`, MiB: resident memory on a CPU, tensor memory on a GPU.
pub(crate) fn peak_memory_mib(device: Device) -> Option<f64> {
    match device {
        Device::Cuda(index) => {
            Some(dflash_torch_sys::peak_device_bytes(index).ok()? as f64 / f64::from(1 << 20))
        }
        _ => peak_resident_mib(),
    }
}

/// Refuses a setting (`key` with `value`) that needs more memory than the machine has, since a
/// failed allocation would end the process.
pub(crate) fn check_memory(bytes: f64, key: &'static str, value: usize) -> Result<(), Invalid> {
    let Some(all) = memory_bytes().filter(|&all| bytes > all) else { return Ok(()) };
    let expected = format!(
        "this takes at least {:.0} GB of memory, and the machine has {:.0} GB",
        bytes / 1e9,
        all / 1e9
    );
    Err(Invalid::new(key, value, expected))
}

/// The machine's memory in bytes.
pub(crate) fn memory_bytes() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
    let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024.0)
}

/// Manufacturer's name of the device: the last bits of results may differ between devices.
pub(crate) fn processor(device: Device) -> Option<String> {
    if let Device::Cuda(_) = device {
        return gpu_name();
    }
    let facts = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let model = facts.lines().find_map(|line| line.strip_prefix("model name"))?;
    Some(model.trim_start_matches([' ', '\t', ':']).trim().to_owned())
}

/// The CPU instruction level in use, which also affects last bits; `None` on a GPU.
pub(crate) fn cpu_level(device: Device) -> Option<String> {
    (device == Device::Cpu).then(|| dflash_kernels::cpu_level().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_named_by_the_driver_when_they_are_alike() {
        let driver = tempfile::tempdir().unwrap();
        assert_eq!(name_in(driver.path()), None);
        let add = |bus: &str, model: &str| {
            let dir = driver.path().join(bus);
            std::fs::create_dir(&dir).unwrap();
            let facts = format!("Model: \t\t {model}\nIRQ:   \t\t 16\n");
            std::fs::write(dir.join("information"), facts).unwrap();
        };
        add("0000:01:00.0", "NVIDIA H200");
        add("0000:02:00.0", "NVIDIA H200");
        assert_eq!(name_in(driver.path()).as_deref(), Some("NVIDIA H200"));
        add("0000:03:00.0", "NVIDIA L4");
        assert_eq!(name_in(driver.path()), None);
    }

    #[test]
    fn what_no_machine_holds_is_refused() {
        assert_eq!(check_memory(1e6, "num_layers", 5), Ok(()));
        let refused = check_memory(1e18, "num_layers", 5).unwrap_err().to_string();
        let expected = "--num-layers is 5, but this takes at least 1000000000 GB of memory";
        assert!(refused.starts_with(expected), "{refused}");
    }

    #[test]
    fn this_process_takes_memory() {
        assert!(peak_memory_mib(Device::Cpu).unwrap() > 1.0);
        assert_eq!(peak_of(Device::Cpu, Some(2.5)), Some(2.5));
        assert_eq!(peak_of(Device::Cpu, None), None);
    }
}
