//! docs/newcomer.md: its commands, run as they stand, from conversations to a measured drafter. A
//! command that is added to the page is run as well.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::pipeline::{scratch, target};
use crate::program::{Finished, path, run};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the tree").to_owned()
}

/// The page's shell blocks, one behind the other.
fn script() -> String {
    let text = fs::read_to_string(root().join("docs/newcomer.md")).unwrap();
    let blocks: Vec<&str> = text
        .split("\n```sh\n")
        .skip(1)
        .map(|block| block.split_once("\n```").expect("a block ends").0)
        .collect();
    assert!(blocks.len() >= 6, "only {} blocks were found", blocks.len());
    format!("set -euo pipefail\n{}\n", blocks.join("\n"))
}

/// Runs the page in `dir`, with other values for some of its names.
fn follow(dir: &str, names: &[(&str, &str)]) -> Finished {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let program = path();
    let programs = program.parent().unwrap().display().to_string();
    let mut command = Command::new("bash");
    command.args(["-c", &script()]).current_dir(dir).envs(names.iter().copied());
    command.env("PORT", port.to_string()).env("STEPS", "3");
    command.env("PATH", format!("{programs}:{}", std::env::var("PATH").unwrap()));
    let finished = run(&mut command).ok();
    // The page ends the server that it started.
    TcpListener::bind(("127.0.0.1", port)).expect("the server's port is free again");
    finished
}

fn check_results(dir: &str, finished: &Finished) {
    let work = format!("{dir}/first-drafter");
    assert!(finished.stdout.contains("acceptance length (tau)"), "{}", finished.stdout);
    let eval: Value =
        serde_json::from_str(&fs::read_to_string(format!("{work}/eval.json")).unwrap()).unwrap();
    assert!(eval["acceptance_length"].as_f64().unwrap() >= 1.0, "{eval}");
    assert_eq!(eval["lossless"]["holds"], true, "{eval}");
    let lines = fs::read_to_string(format!("{work}/drafts/metrics.jsonl")).unwrap();
    let last: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    assert_eq!(last["step"], 3, "{last}");
    assert!(fs::exists(format!("{work}/drafts/model.safetensors")).unwrap());
    let report = fs::read_to_string(format!("{work}/report.html")).unwrap();
    assert!(report.contains("<svg") && report.contains("step-000003"), "{} bytes", report.len());
}

#[test]
fn a_newcomer_gets_a_drafter_from_the_sample_that_we_ship() {
    let (_dir, dir) = scratch();
    fs::create_dir(format!("{dir}/data")).unwrap();
    let sample = "data/sharegpt_sample.json";
    fs::copy(root().join(sample), format!("{dir}/{sample}")).unwrap();
    let finished = follow(&dir, &[]);
    check_results(&dir, &finished);
}

/// The real sample lies beside the checkout where the project is developed.
#[test]
fn a_newcomer_gets_a_drafter_from_sharegpt() {
    let sample = root().join("../shared/data/sharegpt_sample.json");
    if !sample.is_file() {
        println!("skipped: {} is not there", sample.display());
        return;
    }
    let (_dir, dir) = scratch();
    let finished = follow(&dir, &[("DATA", sample.to_str().unwrap()), ("TARGET", &target())]);
    assert!(finished.stdout.contains("500"), "{}", finished.stdout);
    check_results(&dir, &finished);
}
