//! `dflash prepare` as the user sees it: exit codes, messages, and no leftovers.

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

/// Checks for a single line on stderr that says what is wrong; exit code 1, nothing on stdout.
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

/// A model whose tokenizer splits at spaces, and rows of data.
fn place(template: &str, rows: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    std::fs::create_dir(dir.path().join("model")).unwrap();
    write(
        "model/tokenizer.json",
        r#"{"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": {"?": 0, "a": 1}, "unk_token": "?"}}"#,
    );
    write("model/chat_template.jinja", template);
    write("rows.jsonl", rows);
    dir
}

const TEMPLATE: &str = "{% for m in messages[::-1][::-1] %}{{ m.role }} {{ m.content }} \
    {{ ''[::-1] }}{% endfor %}{% if add_generation_prompt %}assistant {% endif %}";

#[test]
fn faults_in_rows_are_counted_and_shown() {
    let rows = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "contnt": "a"}]}
{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a", "mood": 1}]}
{"messages": [{"role": "user", "contnt": "a"}, {"role": "assistant", "content": "a"}]}
"#;
    let dir = place(TEMPLATE, rows);
    let done = prepare(dir.path(), "--target model --data rows.jsonl --output out", &[]);
    let text = String::from_utf8(done.stdout).unwrap();
    assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
    for line in [
        "rows written       1",
        "dropped            1: no assistant turn after another turn (first: rows.jsonl:1)",
        "dropped            1: a turn without content (first: rows.jsonl:3)",
        "turns dropped      1: assistant turn with neither content nor tool calls",
        "unknown keys       contnt (2 messages), mood (1 message)",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    let first = rows.lines().next().unwrap();
    std::fs::write(dir.path().join("rows.jsonl"), first).unwrap();
    let none = prepare(dir.path(), "--target model --data rows.jsonl --output none", &[]);
    let errors = String::from_utf8(none.stderr).unwrap();
    assert_eq!(none.status.code(), Some(1), "{errors}");
    assert!(errors.contains("unknown keys in messages: contnt (1 message)"), "{errors}");
}

/// 24 MB in one row took 3.4 GB when tokenized as a whole.
#[cfg(target_os = "linux")]
#[test]
fn a_giant_row_is_not_tokenized_whole() {
    let turn = |text: &str| format!("{{\"question\": \"a\", \"answer\": \"{text}\"}}\n");
    let dir = place(TEMPLATE, &(turn("a a") + &turn(&"a ? ".repeat(6 << 20))));
    let line = "--target model --data rows.jsonl --output out --workers 1 --seq-length 100";
    // The kernel refuses more than a gigabyte of address space.
    let limited =
        format!("ulimit -v 1000000; exec {} prepare {line}", env!("CARGO_BIN_EXE_dflash"));
    let done = Command::new("sh").arg("-c").arg(limited).current_dir(dir.path()).output().unwrap();
    assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
    let text = String::from_utf8(done.stdout).unwrap();
    assert!(text.contains("rows written       2"), "{text}");
    assert!(text.contains("cut to length      1"), "{text}");
}
