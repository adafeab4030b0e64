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

/// File name of the engine, which is installed beside the front program.
pub const NAME: &str = "dflash-engine";

/// Groups of variables that libraries read when they are loaded, so that they must be set before the
/// engine starts. If the user sets one of a group, the whole group is left alone.
const LIBRARY_SETTINGS: [&[(&str, &str)]; 2] = [
    // Server and trainer share the cores of a machine. libgomp's threads spin long at their barriers
    // by default, which under that load made a forward pass on two threads ten times slower than on
    // one. Not to spin at all makes the short products of decoding three times slower on a quiet
    // machine. A thousand turns, a few microseconds, do well in both (LOG.md).
    &[("OMP_WAIT_POLICY", "PASSIVE"), ("GOMP_SPINCOUNT", "1000")],
    // Activations come and go by the hundred megabytes. In large pages a training step takes 6 to
    // 8% less time, for a percent more memory; what is freed stays with the process for the next
    // step, where it would otherwise be given back and cleared again (LOG.md). A libc that does not
    // know the names ignores them.
    &[("GLIBC_TUNABLES", MALLOC)],
];

/// Large pages; blocks below 1 GiB from the heap, which is trimmed when 4 GiB at its end are free.
const MALLOC: &str = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1073741824:\
                      glibc.malloc.trim_threshold=4294967296";

/// oneDNN keeps the code that it makes for each shape of a product, a thousand of them by default. A
/// server's batches nearly all have shapes of their own: those of the last few are enough for the
/// layers of one, and the rest is memory that grows with every request (LOG.md).
const PRIMITIVE_CACHE: &str = "ONEDNN_PRIMITIVE_CACHE_CAPACITY";
/// Its older name, which oneDNN reads as well.
const OLDER_NAME: &str = "DNNL_PRIMITIVE_CACHE_CAPACITY";

/// Rows differ in size from step to step. Segments that grow keep libtorch's allocator for GPUs from holding
/// pieces that no later row fits; on a CPU it does nothing.
const SEGMENTS: (&str, &str) = ("PYTORCH_ALLOC_CONF", "expandable_segments:True");
/// Its older name, which libtorch reads as well.
const OLDER_SEGMENTS: &str = "PYTORCH_CUDA_ALLOC_CONF";

/// Whether this program is the engine.
pub(crate) fn is_this_program() -> bool {
    std::env::current_exe().is_ok_and(|path| path.file_name().is_some_and(|name| name == NAME))
}

/// How many shapes of products oneDNN keeps code for; `None` where it may decide.
fn kept_shapes(command: &cli::Command) -> Option<&'static str> {
    match command {
        cli::Command::HiddenServer(_) => Some("16"),
        // Steps of as many sequences have the same shapes, of two models.
        cli::Command::Serve(_) => Some("128"),
        _ => None,
    }
}

/// Finds libtorch and becomes the engine, with the same arguments.
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

/// The engine with `args`, ready to start: libtorch found, the environment set. The level of the
/// processor's instructions is that of the environment.
///
/// # Errors
/// No engine beside this program, no libtorch, or a level that this machine lacks.
pub fn command(args: impl IntoIterator<Item = OsString>) -> Result<Command, Error> {
    command_at(None, args)
}

/// As [`command`], at a level that the settings ask for, if they do.
fn command_at(
    level: Option<CpuLevel>,
    args: impl IntoIterator<Item = OsString>,
) -> Result<Command, Error> {
    let front = std::env::current_exe().map_err(|source| Error::CurrentExe { source })?;
    let engine = beside(&front)?;
    let libtorch = libtorch::Search::from_env(&front).find()?.root;
    let mut command = Command::new(engine);
    command.arg0(name::invoked()).args(args);
    // Workers that the engine starts inherit all of these.
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

/// For the engine: refuses a level of the processor's instructions that the environment does not name. The
/// front sets it there, with the variables that libtorch and its libraries have read by now.
///
/// # Errors
/// [`Error::StartedAlone`], and a variable that names no level of this machine.
pub fn check_level(command: &cli::Command) -> Result<(), Error> {
    let in_force = CpuLevel::from_env()?;
    match command.cpu_level() {
        Some(level) if in_force != Some(level) => Err(Error::StartedAlone { level }),
        _ => Ok(()),
    }
}

/// The engine beside the front program.
///
/// # Errors
/// [`Error::NoEngine`].
pub fn beside(front: &Path) -> Result<PathBuf, Error> {
    let path = front.with_file_name(NAME);
    if path.is_file() { Ok(path) } else { Err(Error::NoEngine { path }) }
}

/// libtorch first, so that an older one on the user's path does not get in the way.
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
