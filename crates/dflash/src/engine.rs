//! Replaces the front program with the engine.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::Error;
use crate::libtorch;

/// File name of the engine, which lies beside the front program.
pub const NAME: &str = "dflash-engine";

/// How OpenMP's threads wait for each other. Read when the library is loaded, so it must be set
/// before the engine starts; a value of the user's wins.
const WAIT_POLICY: &str = "OMP_WAIT_POLICY";

/// Finds libtorch and becomes the engine, with the arguments after the program's name.
///
/// The process id stays, so signals and the exit code are the engine's. Returns only on failure.
pub fn exec(args: impl IntoIterator<Item = OsString>) -> Error {
    match command(args) {
        Ok(mut command) => {
            let path = PathBuf::from(command.get_program());
            Error::StartEngine { path, source: command.exec() }
        }
        Err(error) => error,
    }
}

fn command(args: impl IntoIterator<Item = OsString>) -> Result<Command, Error> {
    let front = std::env::current_exe().map_err(|source| Error::CurrentExe { source })?;
    let engine = beside(&front)?;
    let libtorch = libtorch::Search::from_env(&front).find()?;
    let mut command = Command::new(engine);
    command.arg0("dflash").args(args);
    // Workers that the engine starts inherit all of these.
    command.env("DFLASH_LIBTORCH", &libtorch);
    command.env(
        "LD_LIBRARY_PATH",
        library_path(&libtorch.join("lib"), std::env::var_os("LD_LIBRARY_PATH")),
    );
    // Server and trainer share the cores of a machine. libgomp's threads spin at their barriers by
    // default, which under that load made a forward pass on two threads ten times slower than on
    // one; waiting passively cost nothing measurable.
    if std::env::var_os(WAIT_POLICY).is_none() {
        command.env(WAIT_POLICY, "PASSIVE");
    }
    Ok(command)
}

fn beside(front: &Path) -> Result<PathBuf, Error> {
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
