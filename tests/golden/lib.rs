//! Reference vectors, and a test for every case.
//!
//! The repository's own vectors are next to this file; README.md there says where each comes from.
//! Tests run without the repository find them in the folder named by `DFLASH_GOLDEN_OWN`.
//! `DFLASH_GOLDEN` names an additional folder of the same layout. A kind without any case in the
//! repository, or a rule that nothing checks, is a failure: parity never passes because nothing was
//! found.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libtest_mimic::Trial;
use serde_json::Value;

/// How a section of `speculators/*.json` is checked.
enum Rule {
    /// By the tests of these packages.
    CheckedBy(&'static [&'static str]),
    /// Not at all, for this reason; the tests of this package report it.
    LeftOut(&'static str, &'static str),
}

use Rule::{CheckedBy, LeftOut};

const DATA: &str = "dflash-data";
const DRAFT: &str = "dflash-draft";
const TRAIN: &str = "dflash-train";

/// The section with the provenance of a rules file.
const NOTE: &str = "provenance";

/// All other sections that such a file may have.
const RULES: [(&str, Rule); 15] = [
    ("anchor_candidates", CheckedBy(&[DATA])),
    ("block_indices", CheckedBy(&[DRAFT])),
    ("attention_masks", CheckedBy(&[DRAFT])),
    ("fixed_exp_decay", CheckedBy(&[DRAFT])),
    ("dpace_weights", CheckedBy(&[DRAFT])),
    ("elementwise_losses", CheckedBy(&[DRAFT])),
    ("compute_metrics", CheckedBy(&[DRAFT])),
    ("vocab_mapping", CheckedBy(&[DATA, DRAFT])),
    ("packing", LeftOut(DATA, "rows are packed in the order of the epoch, theirs by length")),
    ("collate", CheckedBy(&[DATA])),
    ("train_val_split", CheckedBy(&[DATA])),
    ("offline_shards", LeftOut(DATA, "no command writes hidden states shard by shard")),
    ("lr_schedule", CheckedBy(&[TRAIN])),
    ("muon", CheckedBy(&[TRAIN])),
    ("adamw", CheckedBy(&[TRAIN])),
];

/// A file or directory of vectors.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Part of its test's name.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
    /// Whether it is the repository's own, rather than from `DFLASH_GOLDEN`.
    pub own: bool,
}

/// One case of a rule.
#[derive(Debug)]
pub struct Case {
    /// Name in messages: file, section, and the case's index or key.
    pub name: String,
    /// Its key in a map section, otherwise its index.
    pub key: String,
    /// The case itself.
    pub value: Value,
    /// The section, which may hold data shared by its cases.
    pub section: Value,
    /// The whole file.
    pub file: Arc<Value>,
}

/// Checks a case; panics if the case does not hold.
pub type Check = fn(&Case);

/// All entries of a kind (`targets`, `zlab`, ...): files with this extension, or directories.
///
/// # Panics
/// If the repository has none, or `DFLASH_GOLDEN` is not a folder of vectors.
pub fn entries(kind: &str, extension: Option<&str>) -> Vec<Entry> {
    let own = folder("DFLASH_GOLDEN_OWN").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let mut entries = list(&own.join(kind), extension, true);
    assert!(!entries.is_empty(), "{} holds no vectors", own.join(kind).display());
    if let Some(added) = folder("DFLASH_GOLDEN") {
        let kinds = ["targets", "targets2", "target_heads", "zlab", "speculators", "heads"];
        let any = kinds.iter().any(|kind| added.join(kind).is_dir());
        assert!(any, "DFLASH_GOLDEN={} has none of {}", added.display(), kinds.join(", "));
        entries.extend(list(&added.join(kind), extension, false));
    }
    entries
}

fn folder(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from)
}

fn list(dir: &Path, extension: Option<&str>, own: bool) -> Vec<Entry> {
    let entries = std::fs::read_dir(dir).into_iter().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("readable").path()).collect();
    paths.retain(|path| match extension {
        Some(extension) => path.extension().is_some_and(|found| found == extension),
        None => path.is_dir(),
    });
    paths.sort();
    let named = |path: PathBuf| {
        let stem = path.file_stem().expect("a listed file has a name").to_string_lossy();
        let name = if own { stem.into_owned() } else { format!("added::{stem}") };
        Entry { name, path, own }
    };
    paths.into_iter().map(named).collect()
}

/// A test for every case of the rules that `package` checks, and an ignored one with the reason for
/// every section left out.
///
/// # Panics
/// If `checks` are not those expected of `package`, or a section is unknown or empty.
pub fn rule_trials(package: &str, checks: &[(&str, Check)]) -> Vec<Trial> {
    let expected: BTreeSet<&str> = RULES
        .iter()
        .filter(|(_, rule)| matches!(rule, CheckedBy(packages) if packages.contains(&package)))
        .map(|(kind, _)| *kind)
        .collect();
    let checked: BTreeSet<&str> = checks.iter().map(|(kind, _)| *kind).collect();
    assert_eq!(checked, expected, "the rules that {package} checks");
    let mut found = BTreeSet::new();
    let mut trials = Vec::new();
    for entry in entries("speculators", Some("json")) {
        let text = std::fs::read_to_string(&entry.path).expect("readable");
        let file: Arc<Value> = Arc::new(serde_json::from_str(&text).expect("JSON"));
        let sections = file.as_object().expect("sections by name").iter();
        for (kind, section) in sections.filter(|(kind, _)| *kind != NOTE) {
            let name = format!("{}::{kind}", entry.name);
            if let Some((_, check)) = checks.iter().find(|(checked, _)| checked == kind) {
                let cases = cases(&name, section, &file);
                assert!(!cases.is_empty(), "{name} has no cases");
                found.extend(entry.own.then(|| kind.clone()));
                trials.extend(cases.into_iter().map(|case| trial(case, *check)));
            } else if let Some(reason) = reason_left_out(package, kind, entry.own) {
                trials.push(left_out(&name, reason));
            }
        }
    }
    for kind in expected {
        assert!(found.contains(kind), "the repository's vectors have no case of {kind}");
    }
    trials
}

/// Why a section is not checked; `None` if another package checks it.
fn reason_left_out(package: &str, kind: &str, own: bool) -> Option<&'static str> {
    match RULES.iter().find(|(known, _)| *known == kind) {
        Some((_, LeftOut(says_so, reason))) => (*says_so == package).then_some(*reason),
        Some((_, CheckedBy(_))) => None,
        None => {
            assert!(!own, "{kind}: say in RULES who checks it, or why nobody does");
            Some("a kind that no test knows")
        }
    }
}

/// An ignored test whose name says what is left out and why.
pub fn left_out(name: &str, reason: &str) -> Trial {
    Trial::test(format!("{name} left out: {reason}"), || Ok(())).with_ignored_flag(true)
}

fn trial(case: Case, check: Check) -> Trial {
    Trial::test(case.name.clone(), move || {
        check(&case);
        Ok(())
    })
}

/// The cases of a section: a list, a list under `cases`, a map under `losses`, or itself.
fn cases(name: &str, section: &Value, file: &Arc<Value>) -> Vec<Case> {
    let list = section.as_array().or_else(|| section["cases"].as_array());
    let named: Vec<(String, &Value)> = match (list, section["losses"].as_object()) {
        (Some(list), _) => (0..).map(|i: usize| i.to_string()).zip(list).collect(),
        (None, Some(map)) => map.iter().map(|(key, value)| (key.clone(), value)).collect(),
        (None, None) => vec![("0".into(), section)],
    };
    let case = |(key, value): (String, &Value)| Case {
        name: format!("{name}::{key}"),
        key,
        value: value.clone(),
        section: section.clone(),
        file: file.clone(),
    };
    named.into_iter().map(case).collect()
}
