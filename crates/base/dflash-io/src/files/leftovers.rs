//! Leftovers of killed processes that were making a directory. Callers hold the lock of the
//! directory's name, so no other process is making it.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Error;

/// The ending of the name of a directory that was moved out of the way.
const OLD: &str = ".old";

/// Where the directory that the one at `aside` replaces is moved.
pub(crate) fn old_name(aside: &Path) -> PathBuf {
    let name = aside.file_name().unwrap_or_default().to_string_lossy();
    aside.with_file_name(format!("{name}{OLD}"))
}

/// Removes what earlier processes left of making `destination`.
///
/// # Errors
/// I/O.
pub(crate) fn sweep(destination: &Path) -> Result<(), Error> {
    for (path, process) in of(destination)? {
        // A running process is itself removing what it has there; see `remove_dir`.
        if !is_alive(process) {
            fs::remove_dir_all(&path).map_err(Error::io("remove", &path))?;
        }
    }
    Ok(())
}

/// Restores what a process moved away from the name `destination` if it was killed before it put a
/// replacement there.
///
/// # Errors
/// I/O.
pub(crate) fn restore(destination: &Path) -> Result<(), Error> {
    if destination.exists() {
        return Ok(());
    }
    let is_old = |path: &Path| path.to_string_lossy().ends_with(OLD);
    let lost =
        of(destination)?.into_iter().find(|(path, process)| is_old(path) && !is_alive(*process));
    match lost {
        Some((path, _)) => {
            fs::rename(&path, destination).map_err(Error::io("restore", destination))
        }
        None => Ok(()),
    }
}

/// The directories beside `destination` that are named like directories under construction, with
/// their processes.
fn of(destination: &Path) -> Result<Vec<(PathBuf, u32)>, Error> {
    let parent = match destination.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let name = destination.file_name().unwrap_or_default().to_string_lossy();
    let entries = match fs::read_dir(parent) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(Error::io("read", parent))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(Error::io("read", parent))?;
        let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let process = process_of(&entry.file_name().to_string_lossy(), &name);
        if let (true, Some(process)) = (is_dir, process) {
            found.push((entry.path(), process));
        }
    }
    Ok(found)
}

/// The process in `.NAME.PROCESS-NUMBER.tmp`, which may end in [`OLD`].
fn process_of(found: &str, name: &str) -> Option<u32> {
    let inner = found.strip_prefix('.')?.strip_prefix(name)?.strip_prefix('.')?;
    let inner = inner.strip_suffix(OLD).unwrap_or(inner).strip_suffix(".tmp")?;
    let (process, number) = inner.split_once('-')?;
    number.parse::<u64>().ok()?;
    process.parse().ok()
}

/// Whether a process of this machine has this id, as far as can be determined.
fn is_alive(process: u32) -> bool {
    Path::new("/proc/self").exists() && Path::new("/proc").join(process.to_string()).exists()
}
