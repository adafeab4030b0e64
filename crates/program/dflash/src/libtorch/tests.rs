//! Searches over synthetic directory trees.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::*;

/// A directory that looks like libtorch `version`, with CUDA libraries next to it if `cuda`.
fn libtorch(root: &Path, version: &str, cuda: bool) -> PathBuf {
    let lib = root.join("lib");
    fs::create_dir_all(&lib).unwrap();
    for name in LIBRARIES {
        fs::write(lib.join(name), "").unwrap();
    }
    fs::write(root.join("version.py"), format!("x = 1\n__version__ = '{version}'\n")).unwrap();
    if cuda {
        fs::write(lib.join("libtorch_cuda.so"), "").unwrap();
        fs::write(lib.join("libcublas.so.13"), "").unwrap();
    }
    root.to_owned()
}

/// A search that sees only what a test adds.
fn blank(dir: &TempDir) -> Search {
    Search { program: dir.path().join("bin/dflash"), ..Search::default() }
}

#[test]
fn a_wheel_and_an_archive_of_the_series_are_usable() {
    let dir = tempfile::tempdir().unwrap();
    let root = libtorch(&dir.path().join("a"), "2.11.0+cu130", false);
    assert_eq!(check(&root), Ok("2.11.0+cu130".into()));
    fs::remove_file(root.join("version.py")).unwrap();
    assert_eq!(check(&root), Err(Flaw::Unversioned));
    fs::write(root.join("build-version"), "2.11.1+cpu\n").unwrap();
    assert_eq!(check(&root), Ok("2.11.1+cpu".into()));
}

#[test]
fn each_flaw_is_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(check(&dir.path().join("none")), Err(Flaw::Missing));
    let old = libtorch(&dir.path().join("old"), "2.9.1", false);
    assert_eq!(check(&old), Err(Flaw::Version { found: "2.9.1".into() }));
    let torn = libtorch(&dir.path().join("torn"), "2.11.0", false);
    fs::remove_file(torn.join("lib/libc10.so")).unwrap();
    assert_eq!(check(&torn), Err(Flaw::Incomplete { library: "libc10.so" }));
}

#[test]
fn a_named_directory_is_used_or_refused_but_never_replaced() {
    let dir = tempfile::tempdir().unwrap();
    libtorch(&dir.path().join(".deps/libtorch"), "2.11.0", false);
    let named = libtorch(&dir.path().join("named"), "2.11.0", false);
    let mut search = blank(&dir);
    search.named = vec![("LIBTORCH", named.clone())];
    assert_eq!(search.find().unwrap().root, named);
    fs::write(named.join("version.py"), "__version__ = '2.4.0'").unwrap();
    let message = search.find().unwrap_err().to_string();
    assert!(message.contains("LIBTORCH=") && message.contains("2.4.0"), "{message}");
}

#[test]
fn the_program_s_own_environment_comes_first() {
    let dir = tempfile::tempdir().unwrap();
    libtorch(&dir.path().join(".deps/libtorch"), "2.11.0", false);
    let program = dir.path().join("venv/bin/dflash");
    let search = Search { program, ..Search::default() };
    assert!(search.find().unwrap().place.starts_with(".deps/libtorch above"));
    let package = dir.path().join("venv/lib/python3.12/site-packages/torch");
    let own = libtorch(&package, "2.11.1+cpu", false);
    let found = search.find().unwrap();
    assert_eq!((found.root, found.version.as_str()), (own, "2.11.1+cpu"));
    assert!(found.place.starts_with("torch package of the environment of"), "{}", found.place);
    fs::write(package.join("version.py"), "__version__ = '2.12.0'").unwrap();
    assert!(search.find().unwrap().place.starts_with(".deps/libtorch above"));
}

#[test]
fn what_setup_linked_comes_before_what_it_cached() {
    let dir = tempfile::tempdir().unwrap();
    let cached = libtorch(&dir.path().join("cache").join(CACHED), "2.11.0", false);
    let mut search = blank(&dir);
    search.program = dir.path().join("tree/target/release/dflash");
    search.cache = Some(dir.path().join("cache"));
    assert_eq!(search.find().unwrap().root, cached);
    let linked = libtorch(&dir.path().join("tree/.deps/libtorch"), "2.11.0", false);
    assert_eq!(search.find().unwrap().root, linked);
}

#[test]
fn with_a_driver_the_place_with_cuda_wins() {
    let dir = tempfile::tempdir().unwrap();
    let plain = libtorch(&dir.path().join(".deps/libtorch"), "2.11.0", false);
    let cuda = libtorch(&dir.path().join("cache").join(CACHED), "2.11.0", true);
    let mut search = blank(&dir);
    search.cache = Some(dir.path().join("cache"));
    assert_eq!(search.find().unwrap().root, plain);
    search.prefer_cuda = true;
    assert_eq!(search.find().unwrap().root, cuda);
    fs::remove_file(cuda.join("lib/libcublas.so.13")).unwrap();
    assert_eq!(search.find().unwrap().root, plain);
}

#[test]
fn the_message_lists_every_place_and_the_remedies() {
    let dir = tempfile::tempdir().unwrap();
    libtorch(&dir.path().join("cache").join(CACHED), "2.10.0", false);
    let mut search = blank(&dir);
    search.cache = Some(dir.path().join("cache"));
    search.pythons = vec![("python3 on the path", PathBuf::from("/nowhere/python3"))];
    let message = search.find().unwrap_err().to_string();
    for part in [
        "not set",
        "torch package of the environment of",
        ".deps/libtorch above",
        "version 2.10.0, expected 2.11.0",
    ] {
        assert!(message.contains(part), "{part} in {message}");
    }
    for part in ["torch package of python3", "make setup", "pip install torch==2.11.0"] {
        assert!(message.contains(part), "{part} in {message}");
    }
}
