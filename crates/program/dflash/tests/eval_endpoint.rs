//! `dflash eval --endpoint` as a user starts it: without libtorch, reports in files, a baseline.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use serde_json::Value;

#[path = "../../../decode/dflash-eval/tests/it/fake_server.rs"]
mod fake_server;

use fake_server::{FakeServer, Manners};

fn dflash(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dflash"))
        .arg("eval")
        .args(args)
        .env("DFLASH_LIBTORCH", "/nowhere")
        .env_remove("DFLASH_MODEL")
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn a_server_is_measured_without_libtorch_and_compared_with_a_baseline() {
    let server = FakeServer::start(Manners::Vllm, Duration::from_millis(2));
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let rows = "{\"question\": \"one\", \"answer\": \"1\"}\n{\"turns\": [\"two\"]}\n";
    std::fs::write(dir.path().join("rows.jsonl"), rows).unwrap();
    let named = format!("gsm8k={}", path("rows.jsonl"));
    let (first, second) = (path("first"), path("second"));
    let line = ["--endpoint", &server.url, "--prompts", &named, "--output"];
    let output = dflash(&[&line[..], &[&first]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    assert!(table.contains("GSM8K") && table.contains("2.500"), "{table}");
    let asked = server.bodies()[1]["messages"][0]["content"].as_str().unwrap().to_owned();
    assert!(asked.starts_with("one\nPlease reason step by step"), "{asked}");
    for name in ["eval.json", "eval.csv", "eval.md", "eval.html"] {
        assert!(Path::new(&first).join(name).is_file(), "{name}");
    }
    let baseline = format!("{first}/eval.json");
    let compared = dflash(&[&line[..], &[&second, "--baseline", &baseline]].concat());
    assert_eq!(compared.status.code(), Some(0), "{}", text(&compared.stderr));
    let report = std::fs::read(format!("{second}/eval.json")).unwrap();
    let report: Value = serde_json::from_slice(&report).unwrap();
    let changes = report["comparison"]["changes"].as_array().unwrap();
    let tau = changes.iter().find(|change| change["figure"] == "acceptance_length").unwrap();
    assert_eq!(
        (&tau["before"], &tau["change"], &tau["paired"]),
        (&2.5.into(), &0.0.into(), &true.into())
    );
    assert!(text(&compared.stdout).contains("times the noise"));
}

#[test]
fn settings_that_do_not_go_together_are_usage_errors() {
    let refusal = |args: &[&str], code| {
        let output = dflash(args);
        assert_eq!(output.status.code(), Some(code), "{args:?}");
        text(&output.stderr)
    };
    let line = ["--endpoint", "http://127.0.0.1:1", "--prompts", "x.jsonl"];
    let draft = refusal(&[&line[..], &["--draft", "d"]].concat(), 1);
    assert!(draft.contains("leave --draft out"), "{draft}");
    let unknown = refusal(&line, 1);
    assert!(unknown.contains("--prompts x.jsonl: no such file"), "{unknown}");
    let none = ["--target", "t", "--draft", "d", "--prompts", "p", "--concurrency", "1,0"];
    let none = refusal(&none, 1);
    assert!(none.contains("--concurrency is 0"), "{none}");
    let alone = refusal(&["--target", "t", "--prompts", "p"], 2);
    assert!(alone.contains("--draft <DIR|REPO>"), "{alone}");
    let nowhere = refusal(&["--draft", "d", "--prompts", "p"], 2);
    assert!(nowhere.contains("--target <DIR|REPO>"), "{nowhere}");
    let mode = refusal(&[&line[..], &["--thinking", "maybe"]].concat(), 2);
    assert!(mode.contains("auto, on, off"), "{mode}");
}
