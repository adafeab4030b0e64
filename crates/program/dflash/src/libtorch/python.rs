//! The torch package of an installed Python, found without importing it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Importing torch takes seconds; finding its import specification takes milliseconds.
const SCRIPT: &str = "import importlib.util as u
s = u.find_spec('torch')
print(next(iter(s.submodule_search_locations or []), '') if s else '')";

/// The interpreters to ask, by name of the place: the active environments, then the path.
pub(super) fn interpreters(
    directory: impl Fn(&'static str) -> Option<PathBuf>,
) -> Vec<(&'static str, PathBuf)> {
    let environment = |name| Some((name, directory(name)?.join("bin/python3")));
    let mut found: Vec<_> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(environment).collect();
    found.push(("python3 on the path", PathBuf::from("python3")));
    found
}

/// The torch package of the environment that `program` is installed in, as `PREFIX/bin/dflash`. A
/// virtual environment's interpreter is next to it; with `pip install --user` and Debian's pip the
/// interpreter is elsewhere.
pub(super) fn torch_beside(program: &Path) -> Option<PathBuf> {
    let bin = program.parent()?;
    let interpreter = bin.join("python3");
    let asked = interpreter.is_file().then(|| torch_of(&interpreter)).flatten();
    asked.or_else(|| torch_under(&bin.parent()?.join("lib")))
}

/// A torch package in `lib/python3*/{site,dist}-packages`; the last Python by name counts.
fn torch_under(lib: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(lib).ok()?;
    let pythons = entries.filter_map(|entry| {
        let path = entry.ok()?.path();
        path.file_name()?.to_str()?.starts_with("python3").then_some(path)
    });
    let packages =
        |python: PathBuf| ["site-packages", "dist-packages"].map(|kind| python.join(kind));
    pythons.flat_map(packages).map(|dir| dir.join("torch")).filter(|dir| dir.is_dir()).max()
}

/// The directory of the torch package that `interpreter` would import.
pub(super) fn torch_of(interpreter: &Path) -> Option<PathBuf> {
    // -I: keep the current directory and PYTHONPATH from providing another `torch`.
    let output = Command::new(interpreter)
        .args(["-I", "-c", SCRIPT])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim()).filter(|path| output.status.success() && !path.is_empty()).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn active_environments_come_before_the_path() {
        let found = interpreters(|name| (name == "CONDA_PREFIX").then(|| PathBuf::from("/c")));
        let paths: Vec<_> = found.iter().map(|(_, path)| path.to_str().unwrap()).collect();
        assert_eq!(paths, ["/c/bin/python3", "python3"]);
    }

    /// Writes a fake interpreter that finds `torch`.
    fn interpreter(path: &Path, torch: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("#!/bin/sh\necho {}\n", torch.display())).unwrap();
        fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
    }

    #[test]
    fn the_python_beside_the_program_comes_before_the_packages_of_its_prefix() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("bin/dflash");
        assert_eq!(torch_beside(&program), None);
        let lib = dir.path().join("lib");
        fs::create_dir_all(lib.join("python3.11/dist-packages/numpy")).unwrap();
        fs::create_dir_all(lib.join("perl5/site-packages/torch")).unwrap();
        assert_eq!(torch_beside(&program), None);
        let package = lib.join("python3.12/site-packages/torch");
        fs::create_dir_all(&package).unwrap();
        assert_eq!(torch_beside(&program), Some(package));
        interpreter(&dir.path().join("bin/python3"), Path::new("/site/torch"));
        // A test that forks at this moment may keep the new script open for writing.
        let asked = (0..100).any(|_| torch_beside(&program) == Some("/site/torch".into()));
        assert!(asked);
    }

    #[test]
    fn an_interpreter_that_fails_has_no_torch() {
        assert_eq!(torch_of(Path::new("/nowhere/python3")), None);
        assert_eq!(torch_of(Path::new("/bin/false")), None);
    }

    #[test]
    fn the_interpreters_answer_is_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("python3");
        interpreter(&script, Path::new("/site/torch"));
        // A test that forks at this moment may keep the new script open for writing, and until that
        // process exits or execs nobody can execute it.
        let answer = (0..100).find_map(|_| torch_of(&script));
        assert_eq!(answer, Some(PathBuf::from("/site/torch")));
    }
}
