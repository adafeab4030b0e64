//! docs/roles: the commands of each reader's page, run as they stand, with the tiny target in the place of
//! the model that the page names. A command that is added to a page is run as well.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::book::{root, shell_blocks};
use crate::pipeline::{demo, prepared, scratch, target};
use crate::program::{Finished, path, run};

/// Runs a page's shell blocks in `dir`, with values for some of its names.
fn follow(page: &str, dir: &str, names: &[(&str, &str)]) -> Finished {
    let text = fs::read_to_string(root().join("docs/roles").join(page)).unwrap();
    let blocks = shell_blocks(&text);
    assert!(!blocks.is_empty(), "{page} has no commands");
    let programs = path().parent().unwrap().display().to_string();
    let mut command = Command::new("bash");
    command.args(["-c", &format!("set -euo pipefail\n{}\n", blocks.join("\n"))]);
    command.current_dir(dir).env("TARGET", target()).env("WORK", "work");
    command.env("PATH", format!("{programs}:{}", std::env::var("PATH").unwrap()));
    command.envs(names.iter().copied());
    run(&mut command).ok()
}

/// Conversations of the demo, `rows` of them, in a file of `dir`.
fn chats(dir: &str, rows: usize) -> String {
    let all = fs::read_to_string(demo().join("conversations.jsonl")).unwrap();
    let some: Vec<&str> = all.lines().take(rows).collect();
    assert_eq!(some.len(), rows, "the demo has fewer conversations");
    let file = format!("{dir}/chats.jsonl");
    fs::write(&file, some.join("\n") + "\n").unwrap();
    file
}

/// The plan says how long the run takes.
fn check_plan(finished: &Finished) {
    let time = finished.stdout.lines().find(|line| line.starts_with("time "));
    assert!(time.is_some_and(|line| line.contains(" s a step")), "{time:?}");
}

/// A drafter that loads, with a report of its run.
fn check_run(work: &Path) {
    assert!(fs::exists(work.join("drafts/model.safetensors")).unwrap());
    let report = fs::read_to_string(work.join("report.html")).unwrap();
    assert!(report.contains("<svg"), "{} bytes", report.len());
}

fn json(file: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap()
}

#[test]
fn an_engineer_gets_a_measured_drafter_from_chats() {
    let (_dir, dir) = scratch();
    let data = chats(&dir, 12);
    let sizes = [("GPUS", "2"), ("HELD", "2"), ("ANSWER", "16"), ("SEQ", "512"), ("ANCHORS", "32")];
    let names = [&[("DATA", &data[..])], &sizes[..]].concat();
    let finished = follow("engineer.md", &dir, &names);
    check_plan(&finished);
    let work = Path::new(&dir).join("work");
    check_run(&work);
    let answered = ["answers-0.jsonl", "answers-1.jsonl"]
        .map(|part| fs::read_to_string(work.join(part)).unwrap().lines().count());
    assert_eq!(answered.iter().sum::<usize>(), 10, "each question is in one part: {answered:?}");
    let report = json(&work.join("eval/eval.json"));
    assert_eq!(report["responses"], 2, "{report}");
    assert_eq!(report["lossless"]["holds"], true, "{report}");
}

#[test]
fn a_researcher_compares_two_heads() {
    let (_dir, dir) = scratch();
    let (prompts, data) = (chats(&dir, 4), prepared(&dir));
    let names = [("DATA", &data[..]), ("PROMPTS", &prompts[..]), ("STEPS", "2")];
    follow("researcher.md", &dir, &names);
    let work = Path::new(&dir).join("work");
    let kinds = ["dflash", "markov"].map(|head| {
        let config = json(&work.join(head).join("config.json"));
        config["dflash_config"]["head"]["kind"].as_str().map(str::to_owned)
    });
    assert_eq!(kinds, [None, Some("markov".to_owned())]);
    let report = json(&work.join("eval/eval.json"));
    let drafts = report["drafts"].as_array().expect("a list");
    let labels: Vec<&str> = drafts.iter().filter_map(|draft| draft["label"].as_str()).collect();
    // With whole blocks, and with as many proposals as pay.
    assert_eq!(labels, ["dflash", "dflash auto", "markov", "markov auto"]);
}

#[test]
fn a_platform_team_starts_asks_and_stops_a_server() {
    let (_dir, dir) = scratch();
    let (data, draft) = (prepared(&dir), format!("{dir}/drafts"));
    let size = "--num-layers 1 --block-size 4 --total-seq-len 512 --max-anchors 16 --max-steps 1";
    let line = format!("--data-path {data} --save-path {draft} --colocate {size}");
    crate::program::dflash(&format!("train --target {} {line}", target())).ok();
    let finished = follow("platform.md", &dir, &[("DRAFT", &draft)]);
    assert!(finished.stdout.contains(r#""status":"ok""#), "{}", finished.stdout);
    assert!(finished.stdout.contains("vllm:spec_decode_num_drafts_total"), "{}", finished.stdout);
    let answer = json(&Path::new(&dir).join("work/answer.json"));
    assert_eq!(answer["usage"]["completion_tokens"], 8, "{answer}");
}

#[test]
fn a_hobbyist_trains_within_the_hours_of_the_plan() {
    let (_dir, dir) = scratch();
    let data = chats(&dir, 12);
    let finished = follow("hobbyist.md", &dir, &[("DATA", &data), ("ROWS", "12")]);
    check_plan(&finished);
    check_run(&Path::new(&dir).join("work"));
}
