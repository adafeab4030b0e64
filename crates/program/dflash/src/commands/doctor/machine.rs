//! Checks the machine: processor, memory, C library, driver, disk, ports.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use sysinfo::{CpuRefreshKind, MemoryRefreshKind, RefreshKind, System};

use super::finding::Finding;

const GIB: u64 = 1 << 30;
/// The demo's target, drafter and data need less; the weights alone of an 8-billion-parameter
/// target need 16 GB.
const SMALL_DISK: u64 = 20 * GIB;
/// Too little for anything useful.
const FULL_DISK: u64 = GIB / 2;
/// Enough for libtorch, a small target and a drafter in float32.
const SMALL_MEMORY: u64 = 4 * GIB;

/// Checks everything.
pub(super) fn look(dir: &Path, ports: &[u16]) -> Vec<Finding> {
    let kinds = RefreshKind::nothing()
        .with_cpu(CpuRefreshKind::nothing())
        .with_memory(MemoryRefreshKind::everything());
    let system = System::new_with_specifics(kinds);
    let mut findings = vec![processor(&system), memory(&system), libc()];
    findings.push(disk("disk", dir));
    findings.push(disk("temporary", &std::env::temp_dir()));
    findings.extend(ports.iter().map(|port| free_port(*port)));
    findings
}

fn processor(system: &System) -> Finding {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let brand = system.cpus().first().map(|cpu| cpu.brand().trim().to_owned()).unwrap_or_default();
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let features = features(&text);
    let found = format!("{threads} threads, {brand}, {}", features.join(" "));
    if cfg!(target_arch = "x86_64") && !features.contains(&"avx2") {
        return Finding::warning(
            "processor",
            found,
            "without AVX2 a CPU computes several times slower",
        );
    }
    Finding::ok("processor", found)
}

/// The processor features that matter for matmul speed.
fn features(cpuinfo: &str) -> Vec<&'static str> {
    const WANTED: [&str; 7] =
        ["avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16"];
    let line = cpuinfo.lines().find_map(|line| {
        line.strip_prefix("flags").or_else(|| line.strip_prefix("Features"))?.split_once(':')
    });
    let present: Vec<&str> = line.map_or(Vec::new(), |(_, all)| all.split_whitespace().collect());
    WANTED.into_iter().filter(|name| present.contains(name)).collect()
}

fn memory(system: &System) -> Finding {
    // A container may be limited to less memory than the machine has.
    let limit = system.cgroup_limits().map(|limits| (limits.total_memory, limits.free_memory));
    let machine = (system.total_memory(), system.available_memory());
    let (total, free) = limit.filter(|limit| limit.0 > 0 && limit.0 < machine.0).unwrap_or(machine);
    let found = format!("{} of {} free", gib(free), gib(total));
    if total < SMALL_MEMORY {
        return Finding::warning("memory", found, "enough for the demo alone");
    }
    Finding::ok("memory", found)
}

fn libc() -> Finding {
    let output = Command::new("getconf").arg("GNU_LIBC_VERSION").output();
    let text = output.ok().filter(|output| output.status.success());
    let text = text.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    // The C library is new enough for this program, and for the engine if that starts.
    Finding::ok("C library", text.unwrap_or_else(|| "not known (no getconf)".to_owned()))
}

/// The driver's release and the GPUs, as reported by the kernel module.
pub(super) fn driver() -> String {
    let version = fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let release = driver_release(&version).map_or("driver".to_owned(), |r| format!("driver {r}"));
    let entries = fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten();
    let model = |text: String| {
        let line = text.lines().find_map(|line| line.strip_prefix("Model:"))?;
        Some(line.trim().to_owned())
    };
    let models: Vec<String> = entries
        .filter_map(|entry| model(fs::read_to_string(entry.path().join("information")).ok()?))
        .collect();
    if models.is_empty() { release } else { format!("{release}, {}", models.join(", ")) }
}

/// Extracts `580.82.07` from `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed ...`.
fn driver_release(version: &str) -> Option<&str> {
    version
        .lines()
        .next()?
        .split_whitespace()
        .find(|word| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.'))
}

fn disk(what: &'static str, dir: &Path) -> Finding {
    let whole = std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
    let shown = whole.display();
    let room = match rustix::fs::statvfs(dir) {
        Ok(room) => room.f_bavail * room.f_frsize,
        Err(error) => {
            let found = format!("{shown}: {error}");
            return Finding::missing(what, found, "name an existing directory (--dir, TMPDIR)");
        }
    };
    if let Err(error) = try_to_write(dir) {
        let found = format!("{shown} cannot be written: {error}");
        return Finding::missing(what, found, "name a writable directory (--dir, TMPDIR)");
    }
    let found = format!("{} free at {shown}", gib(room));
    // Temporary files are small.
    match what {
        _ if room < FULL_DISK => Finding::missing(what, found, "make room"),
        "disk" if room < SMALL_DISK => {
            Finding::warning(what, found, "enough for small targets; --dir checks another disk")
        }
        _ => Finding::ok(what, found),
    }
}

pub(super) fn try_to_write(dir: &Path) -> std::io::Result<()> {
    let path = dir.join(format!(".dflash-doctor-{}", std::process::id()));
    fs::File::create_new(&path)?;
    fs::remove_file(path)
}

fn free_port(port: u16) -> Finding {
    match TcpListener::bind(("0.0.0.0", port)) {
        Ok(_) => Finding::ok("port", format!("{port} is free")),
        Err(error) => Finding::warning(
            "port",
            format!("{port}: {error}"),
            "choose another with --port (0 takes a free one)",
        ),
    }
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / GIB as f64)
}

#[cfg(test)]
mod tests {
    use super::super::finding::Status;
    use super::*;

    #[test]
    fn features_are_whole_words_of_the_flags() {
        let text = "processor\t: 0\nflags\t\t: fpu avx avx2 avx512f_x amx_bf16\nbugs\t\t: sve\n";
        assert_eq!(features(text), ["avx2", "amx_bf16"]);
        assert_eq!(features("Features\t: fp asimd sve\n"), ["asimd", "sve"]);
        assert!(features("").is_empty());
    }

    #[test]
    fn the_driver_s_release_is_found() {
        let text =
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed Aug 27\nGCC: 12.2";
        assert_eq!(driver_release(text), Some("580.82.07"));
        assert_eq!(driver_release("NVRM version: none"), None);
    }

    #[test]
    fn a_taken_port_and_a_missing_directory_are_said() {
        let taken = TcpListener::bind(("0.0.0.0", 0)).unwrap();
        let port = taken.local_addr().unwrap().port();
        assert_eq!(free_port(port).status, Status::Warning);
        drop(taken);
        assert_eq!(free_port(port).status, Status::Ok);
        assert_eq!(disk("disk", Path::new("/nowhere")).status, Status::Missing);
        assert_eq!(disk("disk", Path::new("/proc")).status, Status::Missing);
        let dir = tempfile::tempdir().unwrap();
        assert_ne!(disk("temporary", dir.path()).status, Status::Missing);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
