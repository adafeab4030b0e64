//! docs/newcomer.md: runs its commands as written, from conversations to a drafter on a Hub of this
//! machine. Commands added to the page are run as well.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::hub_server::{HubServer, TOKEN, Tree};
use crate::pipeline::{scratch, target};
use crate::program::{Finished, path, run};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the tree").to_owned()
}

/// The page's shell blocks, concatenated.
fn script() -> String {
    let text = fs::read_to_string(root().join("docs/newcomer.md")).unwrap();
    let blocks: Vec<&str> = text
        .split("\n```sh\n")
        .skip(1)
        .map(|block| block.split_once("\n```").expect("a block ends").0)
        .collect();
    assert!(blocks.len() >= 12, "only {} blocks were found", blocks.len());
    format!("set -euo pipefail\n{}\n", blocks.join("\n"))
}

/// Runs the page in `dir` with some names replaced; what it publishes is in the Hub.
fn follow(dir: &str, names: &[(&str, &str)], hub: &HubServer) -> Finished {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let program = path();
    let programs = program.parent().unwrap().display().to_string();
    let mut command = Command::new("bash");
    command.args(["-c", &script()]).current_dir(dir).envs(names.iter().copied());
    command.env("PORT", port.to_string()).env("STEPS", "3");
    command.env("PATH", format!("{programs}:{}", std::env::var("PATH").unwrap()));
    // Like Hugging Face's, this Hub calls the token's user `me`.
    command.env("HF_ENDPOINT", hub.address()).env("HF_TOKEN", TOKEN);
    command.env("HF_HOME", format!("{dir}/hf-home"));
    for other in ["HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN_PATH"] {
        command.env_remove(other);
    }
    let finished = run(&mut command).ok();
    // The page stops the servers that it started.
    TcpListener::bind(("127.0.0.1", port)).expect("the server's port is free again");
    finished
}

fn json(file: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap()
}

/// Of the page's own target, which answers in words: what the drafter is accepted for says something.
fn check_meaning(dir: &str) {
    let eval = json(&format!("{dir}/first-drafter/eval.json"));
    let number = |key: &str| eval[key].as_f64().unwrap();
    assert!(2.0 * number("repetitive") < number("responses"), "{eval}");
    // Three steps of the drafter are few, and a block has 8 slots, all of which a loop would fill.
    assert!((1.0..4.0).contains(&number("acceptance_length")), "{eval}");
}

fn check_results(dir: &str, finished: &Finished, hub: &HubServer) {
    let work = format!("{dir}/first-drafter");
    assert!(finished.stdout.contains("acceptance length (tau)"), "{}", finished.stdout);
    let eval = json(&format!("{work}/eval.json"));
    assert!(eval["steps"].as_u64().unwrap() > 0, "{eval}");
    assert_eq!(eval["lossless"]["holds"], true, "{eval}");
    let lines = fs::read_to_string(format!("{work}/drafts/metrics.jsonl")).unwrap();
    let last: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    assert_eq!(last["step"], 3, "{last}");
    assert!(fs::exists(format!("{work}/drafts/model.safetensors")).unwrap());
    let report = fs::read_to_string(format!("{work}/report.html")).unwrap();
    assert!(report.contains("<svg") && report.contains("step-000003"), "{} bytes", report.len());
    check_answers(&work, finished);
    check_published(&work, &eval, finished, hub);
}

/// Answers of the target in the terminal, from the server, and with the downloaded drafter.
fn check_answers(work: &str, finished: &Finished) {
    let answer = json(&format!("{work}/answer.json"));
    let said = answer["choices"][0]["message"]["content"].as_str().unwrap();
    let tokens = answer["usage"]["completion_tokens"].as_u64().unwrap();
    assert!((2..=32).contains(&tokens), "{answer}");
    let last = finished.stdout.strip_suffix('\n').unwrap_or(&finished.stdout);
    assert!(last.ends_with(said) && !said.is_empty(), "{said:?} ends {last:?}");
    assert_eq!(answer["model"], "mine", "{answer}");
}

fn check_published(work: &str, eval: &Value, finished: &Finished, hub: &HubServer) {
    let repository = hub.repository("models/me/first-drafter").expect("it was made");
    assert_eq!(repository.summaries(), ["initial commit", "Upload the drafter of step 3"]);
    assert!(!finished.stdout.contains(TOKEN) && !finished.stderr.contains(TOKEN));
    let files: Tree = repository.files("main");
    let names: Vec<&str> = files.keys().map(String::as_str).collect();
    assert_eq!(names, ["README.md", "config.json", "drafter.gguf", "model.safetensors"]);
    for (name, place) in [
        ("model.safetensors", "drafts/model.safetensors"),
        ("config.json", "drafts/config.json"),
        ("drafter.gguf", "drafter.gguf"),
    ] {
        let ours = fs::read(format!("{work}/{place}")).unwrap();
        assert!(files[name].content == ours, "{name} is not {place}, byte for byte");
    }
    let card = String::from_utf8(files["README.md"].content.clone()).unwrap();
    for part in figures(eval) {
        assert!(card.contains(&part), "{part} is not in\n{card}");
    }
    // The card shown first is the uploaded one.
    assert!(finished.stdout.contains(&card), "{card}\nis not in\n{}", finished.stdout);
}

/// The report's figures in the card's format.
fn figures(eval: &Value) -> Vec<String> {
    let number = |value: &Value| value.as_f64().unwrap();
    let speed = &eval["tokens_per_second"];
    let acceptance = format!(
        "| {} | {} | {:.3} | {:.3} |",
        eval["responses"],
        eval["tokens"],
        number(&eval["acceptance_length"]),
        number(&eval["acceptance_length_per_response"])
    );
    // An error of the speed-up may follow.
    let speeds = format!(
        "| {:.1} | {:.1} | {:.2}",
        number(&speed["plain"]),
        number(&speed["speculative"]),
        number(&speed["speed_up"])
    );
    vec![acceptance, speeds, "The checkpoint of step 3: ".to_owned()]
}

#[test]
fn a_newcomer_gets_a_drafter_from_what_the_program_makes() {
    // An empty directory: a wheel has neither sample nor source tree.
    let (_dir, dir) = scratch();
    let hub = HubServer::start();
    let finished = follow(&dir, &[], &hub);
    check_results(&dir, &finished, &hub);
    check_meaning(&dir);
}

/// The real sample is next to the checkout where the project is developed.
#[test]
fn a_newcomer_gets_a_drafter_from_sharegpt() {
    let sample = root().join("../shared/data/sharegpt_sample.json");
    if !sample.is_file() {
        println!("skipped: {} is not there", sample.display());
        return;
    }
    let (_dir, dir) = scratch();
    let hub = HubServer::start();
    let sample = sample.to_str().unwrap();
    let names = [("DATA", sample), ("PROMPTS", sample), ("TARGET", &target())];
    let finished = follow(&dir, &names, &hub);
    assert!(finished.stdout.contains("500"), "{}", finished.stdout);
    check_results(&dir, &finished, &hub);
}
