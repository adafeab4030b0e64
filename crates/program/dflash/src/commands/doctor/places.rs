//! The places that commands write to without being told: caches, which lie in the home directory unless
//! variables say otherwise.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use dflash_hub::cache_dir;

use super::finding::Finding;

/// Looks at each.
pub(super) fn look() -> Vec<Finding> {
    let hub = place(
        "Hub cache",
        "models and datasets of the Hub are kept",
        &cache_dir(),
        "name a writable directory with HF_HOME (or HF_HUB_CACHE)",
    );
    let caches = match user_cache() {
        Some(cache) => place(
            "cache",
            "compiled GPU kernels and `make setup`'s libtorch are kept",
            &cache.join("dflash"),
            "name a writable directory with XDG_CACHE_HOME, or set HOME to one",
        ),
        None => Finding::missing(
            "cache",
            "neither HOME nor XDG_CACHE_HOME is set, so that GPU kernels are compiled anew in every process",
            "set HOME, or XDG_CACHE_HOME to a writable directory",
        ),
    };
    vec![hub, caches]
}

fn user_cache() -> Option<PathBuf> {
    let directory = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    directory("XDG_CACHE_HOME").or_else(|| directory("HOME").map(|home| home.join(".cache")))
}

/// Whether files can be made in `dir`, which need not be there yet.
fn place(what: &'static str, purpose: &str, dir: &Path, remedy: &str) -> Finding {
    let shown = dir.display();
    match try_below(dir) {
        Ok(()) => Finding::ok(what, format!("{shown}, where {purpose}, is writable")),
        Err(error) => {
            let found = format!("{shown}, where {purpose}, cannot be written: {error}");
            Finding::missing(what, found, remedy)
        }
    }
}

/// Tries in the nearest directory that is there: what is missing above it would be made in it.
fn try_below(dir: &Path) -> std::io::Result<()> {
    let dir = std::path::absolute(dir)?;
    let there = dir.ancestors().find(|dir| fs::symlink_metadata(dir).is_ok());
    super::machine::try_to_write(there.unwrap_or(Path::new("/")))
}

#[cfg(test)]
mod tests {
    use super::super::finding::Status;
    use super::*;

    #[test]
    fn a_place_that_is_not_there_yet_is_tried_where_it_would_be_made() {
        let dir = tempfile::tempdir().unwrap();
        let status = |path: &Path| place("cache", "things are kept", path, "name another").status;
        assert_eq!(status(&dir.path().join("not/yet/there")), Status::Ok);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
        assert_eq!(status(Path::new("/proc/none/cache")), Status::Missing);
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        assert_eq!(status(&file.join("cache")), Status::Missing);
    }
}
