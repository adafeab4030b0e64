//! `dflash demo`: the whole pipeline in one command, kept stages, and stopping by a signal.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::pipeline::{scratch, signal, wait_for};
use crate::program::{Finished, dflash, path};

/// Long enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

#[test]
fn the_demo_goes_the_whole_way_and_keeps_what_is_done() {
    let (_dir, dir) = scratch();
    let demo = format!("demo --quick --dir {dir}/demo");
    let first = dflash(&demo).ok();
    assert!(first.stdout.contains("acceptance length (tau)"), "{}", first.stdout);
    let drafter = first.stdout.lines().find_map(|line| line.strip_prefix("drafter: ")).unwrap();
    assert!(fs::exists(format!("{drafter}/model.safetensors")).unwrap(), "{drafter}");
    let eval = fs::read_to_string(format!("{dir}/demo/eval.json")).unwrap();
    let eval: Value = serde_json::from_str(&eval).unwrap();
    assert_eq!(eval["lossless"]["holds"], true, "{eval}");
    // The speed-up figures match the measurements, with the original target and from memory.
    let wide = fs::read_to_string(format!("{dir}/demo/wide.json")).unwrap();
    let wide: Value = serde_json::from_str(&wide).unwrap();
    assert_eq!(wide["lossless"]["holds"], true, "{wide}");
    for (begins, report) in [("the target as it is, ", &eval), ("widened by zeros, ", &wide)] {
        let line = first.stdout.lines().find(|line| line.starts_with(begins)).unwrap();
        let rates = &report["decode_tokens_per_second"];
        let rate = |of: &str| format!("{:.1}", rates[of].as_f64().unwrap());
        assert!(line.contains(&rate("plain")) && line.contains(&rate("speculative")), "{line}");
    }
    assert!(!fs::exists(format!("{dir}/demo/wide")).unwrap());
    // The result can be published: no other target's results are stored with it.
    dflash(&format!("push {drafter} --repo me/demo --dry-run")).ok();

    let again = dflash(&demo).ok();
    assert_eq!(again.stderr.matches("kept from an earlier run").count(), 3, "{}", again.stderr);
    let message = dflash(&format!("demo --dir {dir}/demo"));
    assert!(message.fault().contains("other settings"), "{message:?}");
    assert!(running(&dir).is_empty());
}

#[test]
fn fresh_removes_nothing_that_is_not_the_demo_s() {
    let (_dir, dir) = scratch();
    fs::write(format!("{dir}/thesis.txt"), "mine").unwrap();
    let finished = dflash(&format!("demo --quick --fresh --dir {dir}"));
    assert!(finished.fault().contains("was not made by the demo"), "{finished:?}");
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
}

#[test]
fn a_signal_ends_the_demo_with_all_that_it_started() {
    let (_dir, dir) = scratch();
    let mut demo = Command::new(path());
    demo.args(["demo", "--quick", "--dir", &format!("{dir}/demo")]);
    demo.stdout(Stdio::piped()).stderr(Stdio::piped());
    let demo = demo.spawn().unwrap();
    // The demo, its server and its training.
    let training = wait_for(PATIENCE, || (running(&dir).len() >= 3).then_some(()));
    training.expect("the demo trains");
    let began = Instant::now();
    signal("-TERM", demo.id());
    let finished: Finished = demo.wait_with_output().unwrap().into();
    assert_eq!(finished.code, Some(143), "{finished:?}");
    assert!(finished.stderr.contains("continues from here"), "{}", finished.stderr);
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    // Ranks end with their launcher.
    let gone = wait_for(Duration::from_secs(30), || running(&dir).is_empty().then_some(()));
    assert!(gone.is_some(), "{:?} still run", running(&dir));
}

/// The command lines of processes that name `dir`.
fn running(dir: &str) -> Vec<String> {
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let bytes = fs::read(entry.ok()?.path().join("cmdline")).ok()?;
        Some(String::from_utf8_lossy(&bytes).replace('\0', " "))
    });
    processes.filter(|line| line.contains(dir)).collect()
}
