//! NCCL between processes without GPUs: `nccl/libnccl.c`, which says how to make it fail.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

/// The C source.
const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/nccl/libnccl.c");

/// A `libnccl.so.2` for host memory, and the record of its calls; deleted when dropped.
pub struct HostNccl {
    dir: tempfile::TempDir,
}

impl HostNccl {
    /// Compiles it.
    ///
    /// # Panics
    /// If the C compiler fails, with its output.
    pub fn build() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let mut build = cc::Build::new();
        build.target(&triple).host(&triple).opt_level(2).cargo_metadata(false).warnings(true);
        let mut compile = build.get_compiler().to_command();
        compile.args(["-std=gnu11", "-shared", "-fPIC", "-o"]);
        let output = compile.arg(dir.path().join("libnccl.so.2")).arg(SOURCE).arg("-lrt").output();
        let output = output.expect("a C compiler");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Self { dir }
    }

    /// Makes `command` and its children find the library, and fail as `fault` says.
    pub fn serve<'a>(&self, command: &'a mut Command, fault: Option<&str>) -> &'a mut Command {
        let inherited = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let mut path = OsString::from(self.dir.path());
        path.push(":");
        path.push(inherited);
        command.env("LD_LIBRARY_PATH", path).env("DFLASH_TEST_NCCL_LOG", self.dir.path());
        command.envs(fault.map(|fault| ("DFLASH_TEST_NCCL_FAULT", fault)))
    }

    /// One line per call of the rank so far.
    pub fn calls(&self, rank: usize) -> Vec<String> {
        let log: PathBuf = self.dir.path().join(format!("rank-{rank}"));
        let text = std::fs::read_to_string(log).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}
