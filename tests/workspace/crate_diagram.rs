//! The diagram of crates in ARCHITECTURE.md is generated from Cargo's metadata: this test compares
//! it, and rewrites it with `DFLASH_WRITE_DOCS=1` (scripts/crate-diagram.sh).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::boundaries::{Graph, metadata, root};

const BEGIN: &str = "<!-- crates: begin -->\n";
const END: &str = "<!-- crates: end -->\n";

/// The folders below `crates/`, in the order of the pipeline.
const FOLDERS: [&str; 8] =
    ["base", "data", "states", "model", "train", "decode", "publish", "program"];

#[test]
fn the_diagram_of_crates_is_that_of_the_metadata() {
    let path = root().join("ARCHITECTURE.md");
    let page = fs::read_to_string(&path).expect("ARCHITECTURE.md");
    let (before, rest) = page.split_once(BEGIN).expect("the begin mark");
    let (_, after) = rest.split_once(END).expect("the end mark");
    let made = format!("{before}{BEGIN}{}{END}{after}", section(&Crates::of(&metadata())));
    if std::env::var_os("DFLASH_WRITE_DOCS").is_some() {
        fs::write(&path, &made).expect("ARCHITECTURE.md is writable");
        return;
    }
    let line = page.lines().zip(made.lines()).position(|(found, made)| found != made);
    assert!(
        page == made,
        "ARCHITECTURE.md differs from Cargo's metadata at line {}; run scripts/crate-diagram.sh",
        line.unwrap_or_default() + 1
    );
}

/// The crates under `crates/`, by name.
struct Crates(BTreeMap<String, Crate>);

struct Crate {
    description: String,
    /// The folder below `crates/`.
    folder: String,
    needs: BTreeSet<String>,
}

impl Crates {
    fn of(metadata: &Value) -> Self {
        let graph = Graph::parse(metadata);
        let crates_dir = root().join("crates");
        let packages = metadata["packages"].as_array().expect("packages");
        let ours = packages.iter().filter_map(|package| {
            let manifest = Path::new(package["manifest_path"].as_str()?);
            let folder = manifest.parent()?.parent()?.strip_prefix(&crates_dir).ok()?;
            let name = package["name"].as_str()?.to_owned();
            let needs = graph.direct(&name).iter().filter(|it| it.starts_with("dflash"));
            let made = Crate {
                description: package["description"].as_str().unwrap_or_default().to_owned(),
                folder: folder.display().to_string(),
                needs: needs.cloned().collect(),
            };
            assert!(FOLDERS.contains(&made.folder.as_str()), "add {} to FOLDERS", made.folder);
            Some((name, made))
        });
        Self(ours.collect())
    }

    /// The dependencies of `name` that its other dependencies do not imply.
    fn arrows(&self, name: &str) -> Vec<&str> {
        let needs = &self.0[name].needs;
        let follows = |it: &&String| needs.iter().any(|other| self.reaches(other, it));
        needs.iter().filter(|it| !follows(it)).map(|it| short(it)).collect()
    }

    fn reaches(&self, from: &str, to: &str) -> bool {
        self.0[from].needs.iter().any(|next| next == to || self.reaches(next, to))
    }

    /// The number of crates on the longest path below `name`.
    fn height(&self, name: &str) -> usize {
        self.0[name].needs.iter().map(|next| 1 + self.height(next)).max().unwrap_or(0)
    }

    /// From the bottom layer up, and by name within a layer.
    fn in_order(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.0.keys().map(String::as_str).collect();
        names.sort_by_key(|name| (self.height(name), *name));
        names
    }
}

fn short(name: &str) -> &str {
    name.strip_prefix("dflash-").unwrap_or(name)
}

fn section(crates: &Crates) -> String {
    let mut text = "\n```mermaid\nflowchart TD\n".to_owned();
    for name in crates.in_order().into_iter().rev() {
        let arrows = crates.arrows(name);
        if !arrows.is_empty() {
            writeln!(text, "  {} --> {}", short(name), arrows.join(" & ")).unwrap();
        }
    }
    text += "```\n\n| folder | crate, from the bottom layer | holds |\n|---|---|---|\n";
    for folder in FOLDERS {
        let mut shown = format!("`{folder}/`");
        for name in crates.in_order().into_iter().filter(|name| crates.0[*name].folder == folder) {
            writeln!(text, "| {shown} | `{name}` | {} |", crates.0[name].description).unwrap();
            shown.clear();
        }
    }
    text + "\n"
}

#[test]
fn an_arrow_that_follows_from_others_is_left_out() {
    let made = |needs: &[&str]| Crate {
        description: String::new(),
        folder: String::new(),
        needs: needs.iter().map(ToString::to_string).collect(),
    };
    let crates = Crates(BTreeMap::from([
        ("dflash-a".to_owned(), made(&[])),
        ("dflash-b".to_owned(), made(&["dflash-a"])),
        ("dflash-c".to_owned(), made(&["dflash-a", "dflash-b"])),
    ]));
    assert_eq!(crates.arrows("dflash-c"), ["b"]);
    assert_eq!(crates.in_order(), ["dflash-a", "dflash-b", "dflash-c"]);
}
