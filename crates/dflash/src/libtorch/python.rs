//! The torch package of an installed Python, found without importing it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Importing torch takes seconds; its import specification takes milliseconds.
const SCRIPT: &str = "import importlib.util as u
s = u.find_spec('torch')
print(next(iter(s.submodule_search_locations or []), '') if s else '')";

/// The interpreters worth asking, by name of the place: the active environments, then the path.
pub(super) fn interpreters(
    directory: impl Fn(&'static str) -> Option<PathBuf>,
) -> Vec<(&'static str, PathBuf)> {
    let environment = |name| Some((name, directory(name)?.join("bin/python3")));
    let mut found: Vec<_> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(environment).collect();
    found.push(("python3 on the path", PathBuf::from("python3")));
    found
}

/// The directory of the torch package that `interpreter` would import.
pub(super) fn torch_of(interpreter: &Path) -> Option<PathBuf> {
    // -I: neither the current directory nor PYTHONPATH may slip in another `torch`.
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

    #[test]
    fn an_interpreter_that_fails_has_no_torch() {
        assert_eq!(torch_of(Path::new("/nowhere/python3")), None);
        assert_eq!(torch_of(Path::new("/bin/false")), None);
    }

    #[test]
    fn the_interpreters_answer_is_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("python3");
        std::fs::write(&script, "#!/bin/sh\necho /site/torch\n").unwrap();
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
        // A process that another test forks right now may hold the fresh script open for writing,
        // and until it ends nobody can execute it.
        let answer = (0..100).find_map(|_| torch_of(&script));
        assert_eq!(answer, Some(PathBuf::from("/site/torch")));
    }
}
