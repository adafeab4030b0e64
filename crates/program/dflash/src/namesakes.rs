//! Another program of the name `dflash`: z-lab's Python package, the authors' own code, installs one. Whoever
//! has both must learn which one answers, because the commands differ.

use std::env;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// What both packages call their program.
const PROGRAM: &str = "dflash";
/// Enough of a script for its first line and its imports.
const SCRIPT_BYTES: usize = 2048;

/// Another `dflash`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Namesake {
    /// Its program comes first on the path.
    First {
        /// The program.
        path: PathBuf,
        /// The package's version, where its environment says it.
        version: Option<String>,
    },
    /// Its package is installed in the environment that this program is in, over whose program this one lies.
    Beside {
        /// Its `dist-info` directory.
        path: PathBuf,
        /// Its version.
        version: String,
    },
}

impl Namesake {
    /// The one that the environment has, if it has one.
    pub fn find() -> Option<Self> {
        let own = env::current_exe().ok()?;
        find(&env::var_os("PATH").unwrap_or_default(), &own)
    }
}

impl fmt::Display for Namesake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::First { path, version } => {
                let version = version.as_ref().map_or_else(String::new, |v| format!(" {v}"));
                let path = path.display();
                write!(
                    f,
                    "dflash on PATH: {path} is z-lab's dflash{version} (Python), not this program"
                )
            }
            Self::Beside { path, version } => write!(
                f,
                "z-lab's dflash {version} (Python) is installed in this environment too ({}), and both \
                 install a program dflash",
                path.display()
            ),
        }
    }
}

/// What to do about it.
pub const REMEDY: &str = "this program is also `dflash-train`: call it by that name, or install the two in \
                          environments of their own";

fn find(search_path: &std::ffi::OsStr, own: &Path) -> Option<Namesake> {
    let programs = env::split_paths(search_path).map(|dir| dir.join(PROGRAM));
    let first = programs.into_iter().find(|path| path.is_file());
    if let Some(path) = first.filter(|path| is_its_script(path)) {
        let version = package_beside(&path).map(|(_, version)| version);
        return Some(Namesake::First { path, version });
    }
    let (path, version) = package_beside(own)?;
    Some(Namesake::Beside { path, version })
}

/// Whether a program is what pip writes for a console script of the package `dflash`. Ours is machine code.
fn is_its_script(path: &Path) -> bool {
    let Ok(bytes) = fs::read(path) else { return false };
    let Ok(text) = std::str::from_utf8(&bytes[..bytes.len().min(SCRIPT_BYTES)]) else {
        return false;
    };
    let shebang = text.lines().next().filter(|line| line.starts_with("#!"));
    let imports = ["from dflash", "import dflash"].iter().any(|import| text.contains(import));
    shebang.is_some_and(|line| line.contains("python")) && imports
}

/// The package `dflash` in the environment of `PREFIX/bin/PROGRAM` that has a console script of this name, and
/// its version. A package of ours has none: its programs are files.
fn package_beside(program: &Path) -> Option<(PathBuf, String)> {
    let lib = program.parent()?.parent()?.join("lib");
    let pythons = fs::read_dir(lib).ok()?.flatten().map(|entry| entry.path());
    let pythons = pythons.filter(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"))
    });
    let packages =
        pythons.flat_map(|python| ["site-packages", "dist-packages"].map(|kind| python.join(kind)));
    packages.filter_map(|dir| fs::read_dir(dir).ok()).flatten().flatten().find_map(|entry| {
        let path = entry.path();
        let name = path.file_name()?.to_str()?.strip_prefix("dflash-")?.to_owned();
        let version = name.strip_suffix(".dist-info")?.to_owned();
        let scripts = fs::read_to_string(path.join("entry_points.txt")).ok()?;
        let has_script = scripts
            .lines()
            .any(|line| line.split_once('=').is_some_and(|(script, _)| script.trim() == PROGRAM));
        has_script.then_some((path, version))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An environment with z-lab's package; its program is a script if `with_script`.
    fn environment(with_script: bool) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let info = dir.path().join("lib/python3.12/site-packages/dflash-0.1.0.dist-info");
        fs::create_dir_all(&info).unwrap();
        fs::write(info.join("entry_points.txt"), "[console_scripts]\ndflash = dflash.cli:main\n")
            .unwrap();
        let program = dir.path().join("bin/dflash");
        fs::create_dir_all(program.parent().unwrap()).unwrap();
        let script =
            "#!/usr/bin/python3\nimport sys\nfrom dflash.cli import main\nsys.exit(main())\n";
        fs::write(&program, if with_script { script.as_bytes() } else { &b"\x7fELF\xff"[..] })
            .unwrap();
        (dir, program)
    }

    #[test]
    fn a_script_that_comes_first_is_named_with_its_version() {
        let (dir, program) = environment(true);
        let found =
            find(dir.path().join("bin").as_os_str(), Path::new("/opt/ours/dflash")).unwrap();
        assert_eq!(found, Namesake::First { path: program, version: Some("0.1.0".to_owned()) });
        assert!(found.to_string().contains("is z-lab's dflash 0.1.0 (Python)"), "{found}");
        let empty = tempfile::tempdir().unwrap();
        assert_eq!(find(empty.path().as_os_str(), Path::new("/opt/ours/dflash")), None);
    }

    #[test]
    fn a_package_in_the_same_environment_is_named() {
        let (dir, program) = environment(false);
        let found = find(dir.path().join("bin").as_os_str(), &program).unwrap();
        assert!(
            matches!(&found, Namesake::Beside { version, .. } if version == "0.1.0"),
            "{found:?}"
        );
        let entry = "lib/python3.12/site-packages/dflash-0.1.0.dist-info/entry_points.txt";
        fs::remove_file(dir.path().join(entry)).unwrap();
        assert_eq!(find(dir.path().join("bin").as_os_str(), &program), None);
    }
}
