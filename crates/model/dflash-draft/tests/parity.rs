//! Draft and objective compared with reference vectors: every file and case, on all paths. The
//! vectors are in float32, from a CPU.

#[path = "parity/heads.rs"]
mod heads;
#[path = "parity/rules.rs"]
mod rules;
#[path = "parity/speculators.rs"]
mod speculators;
#[path = "parity/vectors.rs"]
mod vectors;
#[path = "parity/zlab.rs"]
mod zlab;

use std::path::Path;

use dflash_golden::{Entry, entries, rule_trials};
use dflash_tensor::Kernels;
use libtest_mimic::{Arguments, Trial};

fn main() {
    let mut trials = rule_trials(env!("CARGO_PKG_NAME"), &rules::CHECKS);
    for entry in entries("zlab", Some("safetensors")) {
        trials.extend(on_all_paths("zlab", &entry, zlab::check));
    }
    for entry in entries("speculators", Some("safetensors")) {
        trials.extend(on_all_paths("speculators", &entry, speculators::check));
    }
    for entry in entries("heads", Some("safetensors")) {
        trials.push(heads::refusal(entry));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

const PATHS: [Kernels; 3] = [Kernels::Fast, Kernels::Portable, Kernels::Emulated];

fn on_all_paths(kind: &str, entry: &Entry, check: fn(&Path, Kernels)) -> Vec<Trial> {
    let trial = |kernels| {
        let path = entry.path.clone();
        Trial::test(format!("{kind}::{}::{kernels:?}", entry.name), move || {
            check(&path, kernels);
            Ok(())
        })
    };
    PATHS.map(trial).into()
}
