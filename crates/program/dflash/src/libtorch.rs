//! Searches for a usable libtorch, in this order:
//!
//! 1. `DFLASH_LIBTORCH`, then `LIBTORCH`. An explicit path is used or refused, never silently
//!    replaced.
//! 2. The torch package of the environment that the program is installed in: that of the `python3`
//!    next to it, then the one under `lib/python3*` of the same prefix. A wheel depends on it.
//! 3. `.deps/libtorch` next to the program or in a parent directory, where `make setup` links it.
//! 4. `dflash/libtorch-2.11.0/torch` in the user's cache, where `make setup` installs it.
//! 5. The torch package of `VIRTUAL_ENV`, of `CONDA_PREFIX`, and of `python3` on the path.
//!
//! On a machine with an NVIDIA driver, a libtorch with CUDA libraries takes precedence over an
//! earlier one without: otherwise the CPU build that `make setup` installs would hide the complete
//! Python torch of a GPU machine.

use std::env;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::Error;

mod python;

/// The libtorch release that the engine's bindings are generated for.
pub const VERSION: &str = "2.11.0";
/// Releases with the same interface as [`VERSION`].
const SERIES: &str = "2.11.";
/// The libraries that the engine links; these load the rest.
const LIBRARIES: [&str; 3] = ["libtorch.so", "libtorch_cpu.so", "libc10.so"];
/// Where `make setup` installs libtorch inside the user's cache.
const CACHED: &str = "dflash/libtorch-2.11.0/torch";
/// Exists wherever the NVIDIA kernel driver is loaded, including in containers.
const DRIVER: &str = "/dev/nvidiactl";

/// Why a directory is not a usable libtorch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Flaw {
    /// The directory does not exist.
    Missing,
    /// A library is missing from `lib/`.
    Incomplete {
        /// The library's file name.
        library: &'static str,
    },
    /// Neither `version.py` nor `build-version` contains a version.
    Unversioned,
    /// It is another release.
    Version {
        /// The release found.
        found: String,
    },
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => write!(f, "no such directory"),
            Self::Incomplete { library } => write!(f, "lib/{library} is missing"),
            Self::Unversioned => write!(f, "not a libtorch: no version.py and no build-version"),
            Self::Version { found } => write!(f, "version {found}, expected {VERSION}"),
        }
    }
}

/// The searched places, each with its flaw.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report(Vec<(String, String)>);

impl Report {
    fn note(&mut self, place: impl fmt::Display, finding: impl fmt::Display) {
        self.0.push((place.to_string(), finding.to_string()));
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|(place, finding)| writeln!(f, "  {place}: {finding}"))
    }
}

/// A usable libtorch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The directory that holds `lib/`.
    pub root: PathBuf,
    /// Its release, such as `2.11.0+cpu`.
    pub version: String,
    /// The step of the search that found it.
    pub place: String,
}

/// Configuration of the search.
#[derive(Debug, Clone, Default)]
pub struct Search {
    /// Directories set by the user, with the variable.
    pub named: Vec<(&'static str, PathBuf)>,
    /// The program; its environment may contain torch, and its parent directories `.deps/libtorch`.
    pub program: PathBuf,
    /// The user's cache directory.
    pub cache: Option<PathBuf>,
    /// Interpreters whose torch package may be used, each with the place's name.
    pub pythons: Vec<(&'static str, PathBuf)>,
    /// Whether to prefer a libtorch with CUDA libraries.
    pub prefer_cuda: bool,
}

impl Search {
    /// The search for the environment and the location of `program`.
    pub fn from_env(program: &Path) -> Self {
        let named = ["DFLASH_LIBTORCH", "LIBTORCH"];
        let directory =
            |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        Self {
            named: named.into_iter().filter_map(|name| Some((name, directory(name)?))).collect(),
            program: program.to_owned(),
            cache: directory("XDG_CACHE_HOME")
                .or_else(|| directory("HOME").map(|home| home.join(".cache"))),
            pythons: python::interpreters(directory),
            prefer_cuda: has_driver(),
        }
    }

    /// The first usable libtorch.
    ///
    /// # Errors
    /// [`Error::WrongLibtorch`] if the user's directory is unusable, [`Error::NoLibtorch`] with
    /// every place if none is usable.
    pub fn find(&self) -> Result<Found, Error> {
        if let Some((variable, path)) = self.named.first() {
            return match check(path) {
                Ok(version) => {
                    Ok(Found { root: absolute(path), version, place: (*variable).to_owned() })
                }
                Err(flaw) => Err(Error::WrongLibtorch { variable, path: path.clone(), flaw }),
            };
        }
        self.first_usable()
    }

    fn first_usable(&self) -> Result<Found, Error> {
        let mut report = Report::default();
        report.note("DFLASH_LIBTORCH and LIBTORCH", "not set");
        let mut fallback = None;
        for place in self.places() {
            let Some(root) = place.locate() else {
                report.note(place, "none");
                continue;
            };
            match check(&root) {
                Ok(version) => {
                    let complete = !self.prefer_cuda || has_cuda(&root);
                    let found = Found { root, version, place: place.to_string() };
                    if complete {
                        return Ok(found);
                    }
                    fallback = fallback.or(Some(found));
                }
                Err(flaw) => report.note(root.display(), flaw),
            }
        }
        fallback.ok_or(Error::NoLibtorch { report })
    }

    fn places(&self) -> Vec<LibtorchPlace<'_>> {
        let program = &self.program;
        let mut places = vec![LibtorchPlace::Beside(program), LibtorchPlace::Above(program)];
        places.extend(self.cache.as_deref().map(LibtorchPlace::Cache));
        places.extend(self.pythons.iter().map(|(name, path)| LibtorchPlace::Python(name, path)));
        places
    }
}

/// One step of the search; expensive ones run only when reached.
enum LibtorchPlace<'a> {
    Beside(&'a Path),
    Above(&'a Path),
    Cache(&'a Path),
    Python(&'static str, &'a Path),
}

impl LibtorchPlace<'_> {
    fn locate(&self) -> Option<PathBuf> {
        match self {
            Self::Beside(program) => python::torch_beside(program),
            Self::Above(program) => program
                .ancestors()
                .skip(1)
                .map(|dir| dir.join(".deps/libtorch"))
                .find(|p| p.is_dir()),
            Self::Cache(cache) => Some(cache.join(CACHED)),
            Self::Python(_, interpreter) => python::torch_of(interpreter),
        }
    }
}

impl fmt::Display for LibtorchPlace<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Beside(program) => {
                write!(f, "torch package of the environment of {}", program.display())
            }
            Self::Above(program) => write!(f, ".deps/libtorch above {}", program.display()),
            Self::Cache(cache) => write!(f, "{}", cache.join(CACHED).display()),
            Self::Python(name, path) => write!(f, "torch package of {name} ({})", path.display()),
        }
    }
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// The release of the libtorch at `root`, if the engine can load it.
///
/// # Errors
/// The first flaw found.
pub fn check(root: &Path) -> Result<String, Flaw> {
    if !root.is_dir() {
        return Err(Flaw::Missing);
    }
    let found = version(root).ok_or(Flaw::Unversioned)?;
    if !found.starts_with(SERIES) {
        return Err(Flaw::Version { found });
    }
    match LIBRARIES.into_iter().find(|library| !root.join("lib").join(library).is_file()) {
        Some(library) => Err(Flaw::Incomplete { library }),
        None => Ok(found),
    }
}

/// The release of the libtorch at `root`: wheels carry `version.py`, C++ archives `build-version`.
fn version(root: &Path) -> Option<String> {
    if let Ok(text) = fs::read_to_string(root.join("version.py")) {
        let line = text.lines().find_map(|line| line.strip_prefix("__version__ = "))?;
        return Some(line.trim().trim_matches(['\'', '"']).to_owned());
    }
    let text = fs::read_to_string(root.join("build-version")).ok()?;
    Some(text.trim().to_owned())
}

/// Whether this machine has NVIDIA's driver.
pub fn has_driver() -> bool {
    Path::new(DRIVER).exists()
}

/// Whether cuBLAS is where libtorch_cuda looks for it: in the wheels' directories for CUDA 13 or
/// CUDA 12, or bundled as in the C++ archives.
pub fn has_cuda(root: &Path) -> bool {
    let beside = ["../nvidia/cu13/lib", "../nvidia/cublas/lib", "lib"];
    let libraries = ["libcublas.so.13", "libcublas.so.12"];
    let is_there = |dir: &str| libraries.iter().any(|name| root.join(dir).join(name).is_file());
    root.join("lib/libtorch_cuda.so").is_file() && beside.into_iter().any(is_there)
}

#[cfg(test)]
mod tests;
