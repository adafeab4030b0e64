//! Targets against all reference vectors (float32, from a CPU), on all paths.

#[path = "parity/target_heads.rs"]
mod target_heads;
#[path = "parity/targets.rs"]
mod targets;

use std::path::Path;

use dflash_golden::Entry;
use dflash_tensor::Kernels;
use libtest_mimic::{Arguments, Trial};

fn main() {
    let mut trials = targets::trials();
    trials.extend(target_heads::trials());
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
