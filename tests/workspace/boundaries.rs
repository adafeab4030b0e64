//! ARCHITECTURE.md's rules about crates, checked against cargo's metadata and the sources.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The dependencies of each package, without those of tests and build scripts.
pub(crate) struct Graph(BTreeMap<String, BTreeSet<String>>);

/// Output of `cargo metadata` for this platform: dependencies of others may not be fetched.
pub(crate) fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--offline", "--filter-platform", &host()])
        .arg("--manifest-path")
        .arg(root().join("Cargo.toml"))
        .output()
        .expect("cargo starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("cargo writes JSON")
}

impl Graph {
    fn read() -> Self {
        Self::parse(&metadata())
    }

    pub(crate) fn parse(metadata: &Value) -> Self {
        let nodes = metadata["resolve"]["nodes"].as_array().expect("nodes");
        let mut graph: BTreeMap<_, _> =
            nodes.iter().map(|node| (name_of(&node["id"]), ordinary(node))).collect();
        // Cargo merges the features that packages enable; another test checks who enables this one.
        if let Some(settings) = graph.get_mut("dflash-settings") {
            settings.remove("clap");
        }
        Self(graph)
    }

    /// All direct and indirect dependencies of `package`.
    fn reach(&self, package: &str) -> BTreeSet<String> {
        assert!(self.0.contains_key(package), "no package {package}");
        let mut found = BTreeSet::new();
        let mut open = vec![package.to_owned()];
        while let Some(next) = open.pop() {
            for needed in &self.0[&next] {
                if found.insert(needed.clone()) {
                    open.push(needed.clone());
                }
            }
        }
        found
    }

    /// The direct dependencies of `package`.
    pub(crate) fn direct(&self, package: &str) -> &BTreeSet<String> {
        &self.0[package]
    }

    fn ours(&self) -> impl Iterator<Item = &String> {
        self.0.keys().filter(|name| name.starts_with("dflash"))
    }
}

/// The compiler's host platform, such as `x86_64-unknown-linux-gnu`.
fn host() -> String {
    let output = Command::new("rustc").arg("-vV").output().expect("rustc starts");
    let text = String::from_utf8(output.stdout).expect("rustc writes text");
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.expect("rustc names its host").to_owned()
}

/// The package's name in a package id: `path+file:///x/name#0.1.0` or `...#name@0.1.0`.
fn name_of(id: &Value) -> String {
    let id = id.as_str().expect("package ids are strings");
    let (place, tail) = id.rsplit_once('#').expect("package ids have a fragment");
    match tail.split_once('@') {
        Some((name, _)) => name.to_owned(),
        None => place.rsplit('/').next().unwrap_or(place).to_owned(),
    }
}

fn ordinary(node: &Value) -> BTreeSet<String> {
    let is_ordinary = |dependency: &&Value| {
        let kinds = dependency["dep_kinds"].as_array().expect("kinds");
        kinds.iter().any(|kind| kind["kind"].is_null())
    };
    let dependencies = node["deps"].as_array().expect("deps").iter();
    dependencies.filter(is_ordinary).map(|dependency| name_of(&dependency["pkg"])).collect()
}

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the tree").to_owned()
}

/// All Rust files of our crates, with paths from the root.
fn sources() -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    collect(&root().join("crates"), &mut found);
    found
}

/// The folders of our crates, `crates/FOLDER/NAME`.
fn crate_dirs() -> Vec<PathBuf> {
    let inside = |dir: PathBuf| fs::read_dir(dir).expect("readable");
    let folders = inside(root().join("crates")).map(|entry| entry.expect("readable").path());
    folders.flat_map(inside).map(|entry| entry.expect("readable").path()).collect()
}

fn collect(dir: &Path, found: &mut Vec<(PathBuf, String)>) {
    for entry in fs::read_dir(dir).expect("readable") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            collect(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).expect("UTF-8");
            found.push((path.strip_prefix(root()).expect("below").to_owned(), text));
        }
    }
}

const SUBCOMMANDS: [&str; 7] = [
    "dflash-prepare",
    "dflash-hidden-server",
    "dflash-train",
    "dflash-decode",
    "dflash-export",
    "dflash-push",
    "dflash-report",
];

/// Exception: evaluation pages use the charts of `report`.
#[test]
fn subcommand_crates_never_depend_on_each_other() {
    let graph = Graph::read();
    for crate_name in SUBCOMMANDS {
        let reach = graph.reach(crate_name);
        let charts = |other: &str| crate_name == "dflash-decode" && other == "dflash-report";
        let others: Vec<_> =
            SUBCOMMANDS.iter().filter(|other| reach.contains(**other) && !charts(other)).collect();
        assert!(others.is_empty(), "{crate_name} depends on {others:?}");
    }
}

#[test]
fn the_front_and_the_formats_do_without_libtorch() {
    let graph = Graph::read();
    let without = [
        "dflash",
        "dflash-chat",
        "dflash-cpu",
        "dflash-data",
        "dflash-eval",
        "dflash-formats",
        "dflash-hidden-states",
        "dflash-http",
        "dflash-hub",
        "dflash-identity",
        "dflash-io",
        "dflash-prepare",
        "dflash-push",
        "dflash-report",
        "dflash-run",
        "dflash-settings",
    ];
    for crate_name in without {
        let reach = graph.reach(crate_name);
        for torch in ["tch", "torch-sys", "dflash-torch-sys", "dflash-kernels"] {
            assert!(!reach.contains(torch), "{crate_name} depends on {torch}");
        }
    }
}

#[test]
fn the_model_knows_no_rank_no_socket_and_no_command_line() {
    let graph = Graph::read();
    for model in ["dflash-tensor", "dflash-target", "dflash-draft"] {
        let reach = graph.reach(model);
        for foreign in ["dflash-dist", "clap", "axum", "reqwest", "tokio", "dflash-hidden-states"] {
            assert!(!reach.contains(foreign), "{model} depends on {foreign}");
        }
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "it is a table")]
fn libraries_depend_on_what_the_layers_allow() {
    let graph = Graph::read();
    let allowed = [
        ("dflash-io", &[][..]),
        ("dflash-cpu", &[]),
        ("dflash-chat", &[]),
        ("dflash-hub", &["dflash-io", "dflash-settings"]),
        ("dflash-torch-sys", &[]),
        ("dflash-kernels", &["dflash-cpu", "dflash-io", "dflash-torch-sys"]),
        ("dflash-formats", &["dflash-io"]),
        ("dflash-identity", &["dflash-formats", "dflash-io"]),
        ("dflash-data", &["dflash-identity", "dflash-io"]),
        ("dflash-settings-derive", &[]),
        ("dflash-settings", &["dflash-cpu", "dflash-settings-derive"]),
        (
            "dflash-hidden-states",
            &["dflash-formats", "dflash-identity", "dflash-io", "dflash-settings"],
        ),
        ("dflash-dist", &["dflash-io", "dflash-settings", "dflash-torch-sys"]),
        (
            "dflash-tensor",
            &[
                "dflash-formats",
                "dflash-io",
                "dflash-kernels",
                "dflash-settings",
                "dflash-torch-sys",
            ],
        ),
        (
            "dflash-target",
            &[
                "dflash-formats",
                "dflash-io",
                "dflash-kernels",
                "dflash-settings",
                "dflash-tensor",
                "dflash-torch-sys",
            ],
        ),
        (
            "dflash-draft",
            &[
                "dflash-formats",
                "dflash-kernels",
                "dflash-settings",
                "dflash-tensor",
                "dflash-torch-sys",
            ],
        ),
        (
            "dflash-prepare",
            &[
                "dflash-chat",
                "dflash-data",
                "dflash-hub",
                "dflash-identity",
                "dflash-io",
                "dflash-settings",
            ],
        ),
        ("dflash-run", &["dflash-identity", "dflash-io", "dflash-settings"]),
        (
            "dflash-push",
            &[
                "dflash-formats",
                "dflash-hub",
                "dflash-identity",
                "dflash-io",
                "dflash-run",
                "dflash-settings",
            ],
        ),
        ("dflash-report", &["dflash-http", "dflash-io", "dflash-run"]),
        (
            "dflash-eval",
            &[
                "dflash-chat",
                "dflash-hub",
                "dflash-identity",
                "dflash-io",
                "dflash-report",
                "dflash-run",
                "dflash-settings",
            ],
        ),
        (
            "dflash-hidden-server",
            &[
                "dflash-dist",
                "dflash-hidden-states",
                "dflash-http",
                "dflash-identity",
                "dflash-settings",
                "dflash-target",
                "dflash-tensor",
                "dflash-torch-sys",
            ],
        ),
        ("dflash-http", &["dflash-io"]),
        ("dflash-serve", &["dflash-chat", "dflash-decode", "dflash-http", "dflash-settings"]),
        (
            "dflash-decode",
            &[
                "dflash-chat",
                "dflash-draft",
                "dflash-eval",
                "dflash-hub",
                "dflash-identity",
                "dflash-io",
                "dflash-kernels",
                "dflash-run",
                "dflash-settings",
                "dflash-target",
                "dflash-tensor",
                "dflash-torch-sys",
            ],
        ),
        (
            "dflash-export",
            &[
                "dflash-chat",
                "dflash-draft",
                "dflash-formats",
                "dflash-identity",
                "dflash-io",
                "dflash-settings",
                "dflash-target",
                "dflash-tensor",
            ],
        ),
        (
            "dflash-demo-target",
            &[
                "dflash-chat",
                "dflash-data",
                "dflash-draft",
                "dflash-formats",
                "dflash-io",
                "dflash-prepare",
                "dflash-settings",
                "dflash-target",
                "dflash-tensor",
                "dflash-train",
            ],
        ),
        (
            "dflash-train",
            &[
                "dflash-chat",
                "dflash-data",
                "dflash-dist",
                "dflash-draft",
                "dflash-hidden-states",
                "dflash-identity",
                "dflash-io",
                "dflash-kernels",
                "dflash-run",
                "dflash-settings",
                "dflash-target",
                "dflash-tensor",
                "dflash-torch-sys",
            ],
        ),
        (
            "dflash",
            &[
                "dflash-cpu",
                "dflash-eval",
                "dflash-hub",
                "dflash-io",
                "dflash-prepare",
                "dflash-push",
                "dflash-report",
                "dflash-settings",
            ],
        ),
    ];
    for (crate_name, allowed) in allowed {
        let ours = graph.direct(crate_name).iter().filter(|name| name.starts_with("dflash"));
        let beyond: Vec<_> = ours.filter(|name| !allowed.contains(&name.as_str())).collect();
        assert!(beyond.is_empty(), "{crate_name} may not depend on {beyond:?}");
    }
    let listed: Vec<_> = allowed.iter().map(|(name, _)| *name).collect();
    every_crate_has_a_place(&graph, &listed);
}

fn every_crate_has_a_place(graph: &Graph, listed: &[&str]) {
    let others = [
        "dflash-engine",
        "dflash-tests",
        "dflash-golden",
        "dflash-test-place",
        "dflash-test-support",
    ];
    for name in graph.ours() {
        let known = listed.contains(&name.as_str()) || others.contains(&name.as_str());
        assert!(
            known,
            "{name} has no place in the layers; add it here and run scripts/crate-diagram.sh"
        );
    }
}

#[test]
fn reference_vectors_are_for_tests_alone() {
    let graph = Graph::read();
    for name in graph.ours() {
        assert!(!graph.direct(name).contains("dflash-golden"), "{name} is built with the vectors");
    }
}

#[test]
fn only_the_programs_know_clap_and_anyhow() {
    let graph = Graph::read();
    for name in graph.ours().filter(|name| !["dflash", "dflash-engine"].contains(&name.as_str())) {
        for foreign in ["clap", "anyhow"] {
            assert!(!graph.direct(name).contains(foreign), "{name} depends on {foreign}");
        }
    }
}

#[test]
fn settings_are_flags_for_the_programs_alone() {
    for path in crate_dirs() {
        let manifest = fs::read_to_string(path.join("Cargo.toml")).expect("a manifest");
        let turns_on = manifest.lines().any(|line| {
            line.starts_with("dflash-settings")
                && line.contains("features")
                && line.contains("clap")
        });
        assert_eq!(turns_on, path.ends_with("dflash"), "{}", path.display());
    }
}

#[test]
fn unsafe_code_lives_in_the_shim_and_one_module() {
    let home = |path: &Path| {
        path.starts_with("crates/model/dflash-torch-sys")
            || path.starts_with("crates/model/dflash-kernels")
            || path == Path::new("crates/train/dflash-dist/src/launcher/process.rs")
    };
    for (path, text) in sources().iter().filter(|(path, _)| !home(path)) {
        let lifts = text.contains("allow(unsafe_code") || text.contains("expect(unsafe_code");
        assert!(!lifts, "{} lifts the ban on unsafe code", path.display());
    }
}

/// A caller that queries libtorch for devices itself would silently compute on the CPU if libtorch
/// does not see the machine's GPUs.
#[test]
fn one_place_asks_which_gpus_there_are() {
    let home = |path: &Path| {
        path == Path::new("crates/model/dflash-tensor/src/placement.rs")
            // what doctor reports
            || path.ends_with("engine_info.rs")
            || path.starts_with("crates/model/dflash-torch-sys")
            || path.starts_with("crates/model/dflash-kernels")
            || path.components().any(|part| part.as_os_str() == "tests")
    };
    for (path, text) in sources().iter().filter(|(path, _)| !home(path)) {
        for question in ["cuda_if_available", "Cuda::is_available", "Cuda::device_count"] {
            assert!(!text.contains(question), "{} asks {question}", path.display());
        }
    }
}

#[test]
fn every_crate_takes_the_workspace_lints() {
    for path in crate_dirs() {
        let manifest = path.join("Cargo.toml");
        let text = fs::read_to_string(&manifest).expect("a manifest");
        assert!(text.contains("[lints]\nworkspace = true"), "{}", manifest.display());
    }
}

#[test]
fn files_stay_readable() {
    for (path, text) in sources() {
        assert!(path.file_name().is_none_or(|name| name != "mod.rs"), "{}", path.display());
        let lines = text.lines().count();
        assert!(lines <= 600, "{} has {lines} lines; split it", path.display());
        assert!(text.starts_with("//!"), "{} does not say what it is for", path.display());
    }
}

#[test]
fn names_are_read_from_every_form_of_package_id() {
    let name = |id: &str| name_of(&Value::from(id));
    assert_eq!(name("path+file:///x/dflash-data#0.1.0"), "dflash-data");
    assert_eq!(name("path+file:///x/tests#dflash-tests@0.1.0"), "dflash-tests");
    assert_eq!(name("registry+https://example.org/index#serde@1.0.2"), "serde");
}
