//! `dflash demo`: the whole pipeline in one command, kept stages, and stopping by a signal.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::pipeline::{demo, scratch, signal, target, wait_for};
use crate::program::{Finished, dflash, path};

/// Long enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

#[test]
fn the_demo_goes_the_whole_way_and_keeps_what_is_done() {
    let (_dir, dir) = scratch();
    let line = format!("demo --quick --dir {dir}/demo");
    let first = dflash(&line).ok();
    assert!(first.stdout.contains("acceptance length (tau)"), "{}", first.stdout);
    let drafter = first.stdout.lines().find_map(|line| line.strip_prefix("drafter: ")).unwrap();
    assert!(fs::exists(format!("{drafter}/model.safetensors")).unwrap(), "{drafter}");
    let eval = fs::read_to_string(format!("{dir}/demo/eval.json")).unwrap();
    let eval: Value = serde_json::from_str(&eval).unwrap();
    assert_eq!(eval["lossless"]["holds"], true, "{eval}");
    // The target has learnt to speak: its acceptance is of words, and far from that of a loop.
    let number = |key: &str| eval[key].as_f64().unwrap();
    assert!(2.0 * number("repetitive") < number("responses"), "{eval}");
    assert!((1.05..6.0).contains(&number("acceptance_length")), "{eval}");
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

    let again = dflash(&line).ok();
    assert_eq!(again.stderr.matches("kept from an earlier run").count(), 3, "{}", again.stderr);
    let message = dflash(&format!("demo --dir {dir}/demo"));
    assert!(message.fault().contains("other settings"), "{message:?}");
    assert!(running(&dir).is_empty());
}

/// A target of two steps says one token over and over; the GSM8K one does not.
#[test]
fn eval_says_of_a_target_that_repeats_itself_that_acceptance_says_nothing() {
    let (_dir, dir) = scratch();
    let prompts = demo().join("prompts.jsonl").display().to_string();
    let measure = |target: &str, prompts: &str| {
        let line = format!(
            "eval --target {target} --draft ngram --prompts {prompts} --limit 4 --max-new-tokens 48 \
             --output {dir}/report"
        );
        let stdout = dflash(&line).ok().stdout;
        let report = fs::read_to_string(format!("{dir}/report/eval.json")).unwrap();
        let report: Value = serde_json::from_str(&report).unwrap();
        let html = fs::read_to_string(format!("{dir}/report/eval.html")).unwrap();
        (stdout, report["repetitive"].as_u64().unwrap(), html)
    };
    let (stdout, repetitive, html) = measure(&target(), &prompts);
    assert_eq!(repetitive, 4, "{stdout}");
    let warning =
        "the target repeats itself in 4 of 4 answers; acceptance on such text says nothing";
    assert!(stdout.contains(&format!("WARNING   {warning}")) && html.contains(warning), "{stdout}");

    let shared = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared");
    let (gsm8k, questions) =
        (shared.join("models/qwen3-tiny-gsm8k"), shared.join("data/gsm8k_test.jsonl"));
    if !gsm8k.is_dir() {
        println!("skipped: {} is not there", gsm8k.display());
        return;
    }
    let (stdout, repetitive, _) =
        measure(&gsm8k.display().to_string(), &questions.display().to_string());
    assert_eq!(repetitive, 0, "{stdout}");
    assert!(!stdout.contains("WARNING"), "{stdout}");
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
