//! `dflash prepare` as the user sees it: exit codes, messages, nothing left behind.

use std::path::Path;
use std::process::{Command, Output};

/// Runs `dflash prepare` in `dir`, with a Hub that refuses connections.
fn prepare(dir: &Path, arguments: &str, variables: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dflash"))
        .arg("prepare")
        .args(arguments.split_whitespace())
        .current_dir(dir)
        .env("HF_HOME", dir.join("cache"))
        // Port 9 (discard) is closed wherever tests run.
        .env("HF_ENDPOINT", "http://127.0.0.1:9")
        .env_remove("HF_HUB_OFFLINE")
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

/// The single line on stderr that says what is wrong; exit code 1, nothing on stdout.
fn check_fault(dir: &Path, arguments: &str, variables: &[(&str, &str)], expect: &str) {
    let output = prepare(dir, arguments, variables);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(output.stdout.is_empty());
    let faults: Vec<&str> = errors.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(faults.len(), 1, "{errors}");
    assert!(faults[0].contains(expect), "{errors}");
    assert!(!errors.contains("retry"), "{errors}");
    let left: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .filter(|name| name != "cache" && name != "model")
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn without_a_network_the_message_says_what_to_pass() {
    let dir = tempfile::tempdir().unwrap();
    let line = "--data sharegpt --seq-length 8192";
    let offline = [("HF_HUB_OFFLINE", "1")];
    check_fault(dir.path(), line, &[], "cannot fetch the tokenizer of Qwen/Qwen3-8B");
    check_fault(dir.path(), line, &offline, "the path of a model directory works too");

    std::fs::create_dir(dir.path().join("model")).unwrap();
    let tokenizer = r#"{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel",
        "vocab": {"a": 0}, "unk_token": "a"}}"#;
    std::fs::write(dir.path().join("model/tokenizer.json"), tokenizer).unwrap();
    let line = "--model model --data sharegpt";
    check_fault(dir.path(), line, &[], "local files work too: --data PATH.jsonl");
    check_fault(
        dir.path(),
        line,
        &offline,
        "(HF_HUB_OFFLINE is set): it is not in the local cache",
    );
}

#[test]
fn typing_errors_are_answered_at_once() {
    let dir = tempfile::tempdir().unwrap();
    check_fault(dir.path(), "--data sharegtp", &[], "the presets are sharegpt, ultrachat");
    check_fault(
        dir.path(),
        "--model ./gone --data gsm8k",
        &[],
        "the target ./gone: no such directory",
    );
    let usage = prepare(dir.path(), "--seq-length 8", &[]);
    assert_eq!(usage.status.code(), Some(2));
    assert!(String::from_utf8(usage.stderr).unwrap().contains("--data <FILE|PRESET>"));
}
