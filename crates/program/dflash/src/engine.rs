//! Replaces the front program with the engine.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use dflash_cpu::CpuLevel;

use crate::cli;
use crate::command_line::CommandLine;
use crate::error::Error;
use crate::{libtorch, name, run_file};

/// File name of the engine, which is installed next to the front program.
pub const NAME: &str = "dflash-engine";

/// Environment variables that libraries read when they are loaded, and which must therefore be set
/// before the engine starts. If the user sets one of a group, the whole group is left alone.
const LIBRARY_SETTINGS: [&[(&str, &str)]; 2] = [
    // Server and trainer share the cores of a machine. libgomp's threads spin long at barriers by
    // default; under that load this made a forward pass on two threads ten times slower than on
    // one. Not spinning at all makes the short matmuls of decoding three times slower on an idle
    // machine. A spin count of 1,000, a few microseconds, does well in both cases (LOG.md).
    &[("OMP_WAIT_POLICY", "PASSIVE"), ("GOMP_SPINCOUNT", "1000")],
    // Activations are allocated and freed by hundreds of megabytes. Huge pages shorten a training
    // step by 6 to 8% for 1% more memory, and freed memory stays with the process for the next step
    // instead of being returned and cleared again (LOG.md). Other C libraries ignore these names.
    &[("GLIBC_TUNABLES", MALLOC)],
];

/// Huge pages; blocks below 1 GiB come from the heap, trimmed once 4 GiB at its end are free.
const MALLOC: &str = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1073741824:\
                      glibc.malloc.trim_threshold=4294967296";

/// oneDNN caches the code that it generates for each matmul shape, a thousand shapes by default.
/// Nearly every batch of a server has its own shape: a cache for the layers of the last few batches
/// is enough, and a larger one only grows memory with every request (LOG.md).
const PRIMITIVE_CACHE: &str = "ONEDNN_PRIMITIVE_CACHE_CAPACITY";
/// Its older name, which oneDNN also reads.
const OLDER_NAME: &str = "DNNL_PRIMITIVE_CACHE_CAPACITY";

/// Row sizes differ from step to step. Expandable segments keep libtorch's GPU allocator from
/// holding fragments that no later row fits; they have no effect on a CPU.
const SEGMENTS: (&str, &str) = ("PYTORCH_ALLOC_CONF", "expandable_segments:True");
/// Its older name, which libtorch also reads.
const OLDER_SEGMENTS: &str = "PYTORCH_CUDA_ALLOC_CONF";

pub(crate) fn is_this_program() -> bool {
    std::env::current_exe().is_ok_and(|path| path.file_name().is_some_and(|name| name == NAME))
}

/// Capacity of oneDNN's primitive cache; `None` for its default.
fn kept_shapes(command: &cli::Command) -> Option<&'static str> {
    match command {
        cli::Command::HiddenServer(_) => Some("16"),
        // Steps with the same number of sequences share shapes, for both models.
        cli::Command::Serve(_) => Some("128"),
        _ => None,
    }
}

/// Finds libtorch and replaces this process with the engine, with the same arguments.
///
/// The process id stays, so signals and the exit code are the engine's. Returns only on failure.
pub fn exec(line: &CommandLine) -> Error {
    match command_at(line.cli.command.cpu_level(), line.arguments.clone()) {
        Ok(mut command) => {
            command.envs(run_file::handover(line));
            let is_free = |name: &&str| std::env::var_os(name).is_none();
            if let Some(shapes) = kept_shapes(&line.cli.command)
                && [PRIMITIVE_CACHE, OLDER_NAME].iter().all(is_free)
            {
                command.env(PRIMITIVE_CACHE, shapes);
            }
            let path = PathBuf::from(command.get_program());
            Error::StartEngine { path, source: command.exec() }
        }
        Err(error) => error,
    }
}

/// The command that starts the engine with `args`: libtorch is found and the environment set. The
/// CPU instruction level is taken from the environment.
///
/// # Errors
/// No engine next to this program, no libtorch, or a level that this machine does not support.
pub fn command(args: impl IntoIterator<Item = OsString>) -> Result<Command, Error> {
    command_at(None, args)
}

/// As [`command`], at the level that the settings request, if any.
fn command_at(
    level: Option<CpuLevel>,
    args: impl IntoIterator<Item = OsString>,
) -> Result<Command, Error> {
    let front = std::env::current_exe().map_err(|source| Error::CurrentExe { source })?;
    let engine = beside(&front)?;
    let libtorch = libtorch::Search::from_env(&front).find()?.root;
    let mut command = Command::new(engine);
    command.arg0(name::invoked()).args(args);
    // Workers started by the engine inherit all of these.
    command.env("DFLASH_LIBTORCH", &libtorch);
    command.env(
        "LD_LIBRARY_PATH",
        library_path(&libtorch.join("lib"), std::env::var_os("LD_LIBRARY_PATH")),
    );
    let level = level.map_or_else(CpuLevel::from_env, |level| Ok(Some(level)))?;
    if let Some(level) = level {
        command.envs(level.environment(|name| std::env::var_os(name))?);
    }
    if [SEGMENTS.0, OLDER_SEGMENTS].iter().all(|name| std::env::var_os(name).is_none()) {
        command.env(SEGMENTS.0, SEGMENTS.1);
    }
    for group in LIBRARY_SETTINGS {
        if group.iter().all(|(name, _)| std::env::var_os(name).is_none()) {
            command.envs(group.iter().copied());
        }
    }
    Ok(command)
}

/// For the engine: refuses a CPU instruction level that differs from the environment's. The front
/// program sets it there, with the variables that libtorch and its libraries have already read.
///
/// # Errors
/// [`Error::StartedAlone`], or the variable names no level that this machine supports.
pub fn check_level(command: &cli::Command) -> Result<(), Error> {
    let in_force = CpuLevel::from_env()?;
    match command.cpu_level() {
        Some(level) if in_force != Some(level) => Err(Error::StartedAlone { level }),
        _ => Ok(()),
    }
}

/// The engine next to the front program.
///
/// # Errors
/// [`Error::NoEngine`].
pub fn beside(front: &Path) -> Result<PathBuf, Error> {
    let path = front.with_file_name(NAME);
    if path.is_file() { Ok(path) } else { Err(Error::NoEngine { path }) }
}

/// Puts libtorch first, so that an older one on the user's path does not take precedence.
fn library_path(lib: &Path, before: Option<OsString>) -> OsString {
    let mut path = lib.as_os_str().to_owned();
    if let Some(before) = before.filter(|before| !before.is_empty()) {
        path.push(OsStr::new(":"));
        path.push(before);
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libtorch_leads_the_library_path() {
        let path =
            |before: Option<&str>| library_path(Path::new("/t/lib"), before.map(OsString::from));
        assert_eq!(path(None), "/t/lib");
        assert_eq!(path(Some("")), "/t/lib");
        assert_eq!(path(Some("/old")), "/t/lib:/old");
    }

    #[test]
    fn a_missing_engine_is_named() {
        let error = beside(Path::new("/nowhere/dflash")).unwrap_err().to_string();
        assert!(error.starts_with("/nowhere/dflash-engine is missing"), "{error}");
    }
}
