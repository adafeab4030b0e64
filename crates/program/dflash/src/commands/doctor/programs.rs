//! Checks the programs and the libraries they load: engine, libtorch, CUDA, NCCL.

use std::process::Stdio;

use dflash::libtorch::{Found, Search, VERSION, has_cuda, has_driver};
use dflash::namesakes::{Namesake, REMEDY};
use dflash::{Error, engine};
use dflash_cpu::CpuLevel;
use serde::Deserialize;

use super::finding::Finding;

const PIP: &str = "`pip install torch==2.11.0` in the environment of dflash";

/// Output of `dflash engine-info`.
#[derive(Debug, Deserialize)]
struct EngineInfo {
    version: String,
    libtorch: String,
    threads: usize,
    cpu_level: CpuLevel,
    libtorch_level: String,
    mkl_level: Option<String>,
    cuda_library: String,
    cuda_failure: Option<String>,
    cuda_devices: i64,
    nccl_failure: Option<String>,
}

/// Checks what the programs need to start, by starting the engine.
pub(super) fn look() -> Vec<Finding> {
    let mut findings = vec![Finding::ok("dflash", env!("CARGO_PKG_VERSION"))];
    findings.extend(
        Namesake::find().map(|other| Finding::warning("other dflash", other.to_string(), REMEDY)),
    );
    let libtorch = std::env::current_exe().map(|program| Search::from_env(&program).find());
    match libtorch {
        Ok(Ok(found)) => {
            let text = format!("{} at {} ({})", found.version, found.root.display(), found.place);
            findings.push(Finding::ok("libtorch", text));
            look_at_engine(&mut findings, &found);
        }
        Ok(Err(error)) => {
            let remedy = remedy(&error);
            findings.push(Finding::missing("libtorch", error.to_string(), remedy));
        }
        Err(error) => findings.push(Finding::missing(
            "libtorch",
            format!("this program cannot find itself: {error}"),
            "mount /proc",
        )),
    }
    findings
}

/// What helps: where a variable names a wrong libtorch nothing that is installed does, until it is unset.
fn remedy(error: &Error) -> String {
    let install = format!("{PIP}, or `make setup` in the source tree");
    let Error::WrongLibtorch { variable, .. } = error else { return install };
    let searched = std::env::current_exe()
        .map(|program| Search { named: Vec::new(), ..Search::from_env(&program) }.find());
    match searched {
        Ok(Ok(Found { version, root, .. })) => {
            format!("`unset {variable}`: libtorch {version} at {} is used then", root.display())
        }
        _ => format!("`unset {variable}`, then {install}"),
    }
}

fn look_at_engine(findings: &mut Vec<Finding>, libtorch: &Found) {
    match ask_engine() {
        Ok(info) => {
            findings.push(engine_finding(&info));
            findings.push(level_finding(&info));
            findings.extend(gpu_findings(&info, libtorch));
        }
        Err(reason) => findings.push(Finding::missing(
            "engine",
            reason,
            "install dflash and dflash-engine side by side, from one release",
        )),
    }
}

/// Starts the engine and reads its answer; on failure returns the reason, which often comes from
/// the dynamic loader.
fn ask_engine() -> Result<EngineInfo, String> {
    let mut command = engine::command(["engine-info".into()]).map_err(|error| error.to_string())?;
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{program} does not start: {error}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{program} ended with {}: {}", output.status, said.trim()));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| format!("{program}: {error}"))
}

fn engine_finding(info: &EngineInfo) -> Finding {
    let front = env!("CARGO_PKG_VERSION");
    let EngineInfo { version, libtorch, threads, .. } = info;
    let text = format!("{version}, runs with libtorch {libtorch} on {threads} threads");
    if version != front {
        let text = format!("{text}; dflash is {front}");
        return Finding::missing("engine", text, "install both programs from one release");
    }
    if !libtorch.starts_with(VERSION.trim_end_matches('0')) {
        return Finding::missing("engine", text, PIP);
    }
    Finding::ok("engine", text)
}

/// The CPU instruction level in use, and the levels available.
fn level_finding(info: &EngineInfo) -> Finding {
    let EngineInfo { cpu_level, libtorch_level, mkl_level, .. } = info;
    let here: Vec<&str> = CpuLevel::here().into_iter().map(CpuLevel::name).collect();
    let mkl = mkl_level.as_ref().map_or_else(String::new, |level| format!(", MKL {level}"));
    let found =
        format!("{cpu_level} computes, of {}; libtorch {libtorch_level}{mkl}", here.join(", "));
    if *cpu_level != CpuLevel::best() {
        return Finding::warning(
            "level",
            found,
            "unset DFLASH_CPU_LEVEL to use all instructions of the processor",
        );
    }
    Finding::ok("level", found)
}

fn gpu_findings(info: &EngineInfo, libtorch: &Found) -> Vec<Finding> {
    if !has_driver() {
        return vec![Finding::ok("CUDA", "no NVIDIA driver: the CPU computes")];
    }
    let driver = super::machine::driver();
    let cuda = match (info.cuda_library.as_str(), info.cuda_devices) {
        ("loaded", 1..) => {
            Finding::ok("CUDA", format!("{driver}, {} GPUs usable", info.cuda_devices))
        }
        ("loaded", _) => Finding::warning(
            "CUDA",
            format!("{driver}, but libtorch sees no GPU, and --device auto is refused"),
            "CUDA_VISIBLE_DEVICES may hide them; otherwise update the driver to 580 or newer, which CUDA 13 \
             needs, or install torch 2.11.0 for an older CUDA (docs/install.md), or pass --device cpu",
        ),
        (_, _) => Finding::warning(
            "CUDA",
            format!("{driver}, but {}, and --device auto is refused", why_no_cuda(info, libtorch)),
            format!("{PIP}, with its dependencies, or pass --device cpu"),
        ),
    };
    let nccl = match &info.nccl_failure {
        None => Finding::ok("NCCL", "loads"),
        Some(reason) => Finding::warning(
            "NCCL",
            reason,
            "`pip install nvidia-nccl-cu13`; without it several GPUs exchange gradients over gloo",
        ),
    };
    vec![cuda, nccl]
}

fn why_no_cuda(info: &EngineInfo, libtorch: &Found) -> String {
    match &info.cuda_failure {
        Some(reason) => format!("libtorch's CUDA library does not load: {reason}"),
        None if has_cuda(&libtorch.root) => {
            "this libtorch's CUDA library was not opened".to_owned()
        }
        None => "this libtorch is built without CUDA".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Status;
    use super::*;

    fn info(libtorch: &str, version: &str) -> EngineInfo {
        let text = format!(
            r#"{{"version": "{version}", "libtorch": "{libtorch}", "threads": 2, "cuda_devices": 0,
                 "cpu_level": "baseline", "libtorch_level": "default", "mkl_level": null,
                 "cuda_library": "absent", "cuda_failure": null, "nccl_failure": "no file"}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn another_engine_or_libtorch_is_missing_the_right_one() {
        let own = env!("CARGO_PKG_VERSION");
        let status = |libtorch, version| engine_finding(&info(libtorch, version)).status;
        assert_eq!(status("2.11.0", own), Status::Ok);
        assert_eq!(status("2.11.1", own), Status::Ok);
        assert_eq!(status("2.12.0", own), Status::Missing);
        assert_eq!(status("2.11.0", "0.0.1"), Status::Missing);
    }
}
