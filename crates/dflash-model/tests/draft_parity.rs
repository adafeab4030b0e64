//! The draft and its objective against reference vectors: every file and every case found.
//!
//! The folder is `DFLASH_GOLDEN`, or `../shared/golden` beside the repository. Where neither
//! exists the tests count as ignored. The vectors were made by z-lab's reference model and by
//! speculators, in float32 on a CPU.

#[path = "draft_parity/golden.rs"]
mod golden;
#[path = "draft_parity/rules.rs"]
mod rules;
#[path = "draft_parity/speculators.rs"]
mod speculators;
#[path = "draft_parity/zlab.rs"]
mod zlab;

use libtest_mimic::{Arguments, Trial};

fn main() {
    let arguments = Arguments::from_args();
    let Some(root) = golden::root() else {
        eprintln!(
            "no reference vectors: set DFLASH_GOLDEN or put them at ../shared/golden; skipped"
        );
        let skipped = Trial::test("reference_vectors", || Ok(())).with_ignored_flag(true);
        libtest_mimic::run(&arguments, vec![skipped]).exit();
    };
    let mut trials = Vec::new();
    for path in golden::files(&root.join("zlab"), "safetensors") {
        let name = format!("zlab::{}", golden::stem(&path));
        trials.push(trial(name, path, zlab::check));
    }
    for path in golden::files(&root.join("speculators"), "safetensors") {
        let name = format!("speculators::{}", golden::stem(&path));
        trials.push(trial(name, path, speculators::check));
    }
    for path in golden::files(&root.join("speculators"), "json") {
        trials.extend(rules::trials(&path));
    }
    libtest_mimic::run(&arguments, trials).exit();
}

fn trial(name: String, path: std::path::PathBuf, check: fn(&std::path::Path)) -> Trial {
    Trial::test(name, move || {
        check(&path);
        Ok(())
    })
}
