//! `dflash doctor`, completions and man pages, as a user starts them.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::Command;
use std::thread::JoinHandle;

use serde_json::Value;

use crate::pipeline::scratch;
use crate::program::{Finished, dflash, path, run};

/// The findings by subject.
fn findings(finished: &Finished) -> BTreeMap<String, Value> {
    let all: Vec<Value> = serde_json::from_str(&finished.stdout).expect("JSON on stdout");
    all.into_iter().map(|one| (one["what"].as_str().unwrap().to_owned(), one)).collect()
}

#[test]
fn a_machine_that_runs_these_tests_has_what_is_needed() {
    let finished = dflash("doctor --offline --json").ok();
    let found = findings(&finished);
    for what in ["dflash", "libtorch", "engine", "processor", "disk"] {
        assert_ne!(found[what]["status"], "missing", "{found:?}");
    }
    assert_eq!(found["dflash"]["found"], env!("CARGO_PKG_VERSION"));
    let engine = found["engine"]["found"].as_str().unwrap();
    assert!(engine.contains("runs with libtorch 2.11."), "{engine}");
    assert_eq!(found["Hub"]["found"], "not asked (--offline)");
    let text = dflash("doctor --offline").ok().stdout;
    assert!(text.lines().filter(|line| line.starts_with("ok ")).count() > 5, "{text}");
}

#[test]
fn what_is_missing_is_named_with_its_remedy_and_the_code_is_one() {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(path(), dir.path().join("dflash")).unwrap();
    let mut doctor = Command::new(dir.path().join("dflash"));
    doctor.args(["doctor", "--offline", "--dir", "/nowhere"]);
    let finished = run(doctor.env_clear().env("HOME", dir.path()).env("PATH", ""));
    assert!(finished.fault().contains("2 essential things are missing"), "{finished:?}");
    for part in ["MISSING  libtorch", "pip install torch==2.11", "MISSING  disk           /nowhere"]
    {
        assert!(finished.stdout.contains(part), "{part} in {}", finished.stdout);
    }
}

#[test]
fn an_engine_that_does_not_start_is_missing_with_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(path(), dir.path().join("dflash")).unwrap();
    let libtorch = findings(&dflash("doctor --offline --json").ok())["libtorch"]["found"].clone();
    let root = libtorch.as_str().unwrap().split(" at ").nth(1).unwrap().split(" (").next().unwrap();
    let doctor = || {
        let mut doctor = Command::new(dir.path().join("dflash"));
        run(doctor.args(["doctor", "--offline", "--json"]).env("DFLASH_LIBTORCH", root))
    };
    let finished = doctor();
    let reason = findings(&finished)["engine"]["found"].as_str().unwrap().to_owned();
    assert!(reason.contains("dflash-engine is missing"), "{reason}");
    let engine = dir.path().join("dflash-engine");
    fs::write(&engine, "#!/bin/sh\necho \"version GLIBC_9.99 not found\" >&2\nexit 127\n").unwrap();
    fs::set_permissions(&engine, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let finished = doctor();
    let reason = findings(&finished)["engine"]["found"].as_str().unwrap().to_owned();
    assert!(reason.contains("GLIBC_9.99 not found"), "{reason}");
    assert_eq!(finished.code, Some(1));
}

#[test]
fn a_taken_port_is_a_warning() {
    let taken = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let finished = dflash(&format!("doctor --offline --json --ports {port}")).ok();
    let found = &findings(&finished)["port"];
    assert_eq!(found["status"], "warning", "{found}");
    assert!(found["found"].as_str().unwrap().starts_with(&port.to_string()), "{found}");
    let message = dflash("doctor --ports 0");
    assert!(message.fault().contains("--ports is 0"), "{message:?}");
}

/// A Hub that answers `count` requests with `status` and `body`; returns their heads.
fn hub(count: usize, status: &'static str, body: &'static str) -> (String, JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let heads = std::thread::spawn(move || {
        let mut heads = String::new();
        for stream in listener.incoming().take(count) {
            let mut stream = stream.unwrap();
            let lines = BufReader::new(&stream).lines().map(Result::unwrap);
            heads.extend(lines.take_while(|line| !line.is_empty()).map(|line| line + "\n"));
            let length = body.len();
            let head = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n");
            let more = "content-type: application/json\r\nconnection: close\r\n\r\n";
            write!(stream, "{head}{more}{body}").unwrap();
        }
        heads
    });
    (address, heads)
}

fn ask_hub(address: &str, token: Option<&str>) -> Finished {
    let home = tempfile::tempdir().unwrap();
    let mut doctor = Command::new(path());
    doctor.args(["doctor", "--json"]).env("HF_ENDPOINT", address).env("HF_HOME", home.path());
    for name in ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE"] {
        doctor.env_remove(name);
    }
    run(doctor.envs(token.map(|token| ("HF_TOKEN", token)))).ok()
}

#[test]
fn the_hub_says_who_we_are_and_the_token_is_never_shown() {
    let user = r#"{"type": "user", "name": "alice", "orgs": []}"#;
    let (address, heads) = hub(1, "200 OK", user);
    let finished = ask_hub(&address, Some("hf_secret"));
    let found = findings(&finished)["Hub"]["found"].clone();
    assert_eq!(found, format!("{address} answers; logged in as alice"));
    let heads = heads.join().unwrap();
    assert!(heads.starts_with("GET /api/whoami-v2 "), "{heads}");
    assert!(heads.contains("Bearer hf_secret"), "{heads}");
    assert!(!format!("{finished:?}").contains("hf_secret"), "{finished:?}");
}

#[test]
fn no_login_a_wrong_token_and_no_hub_are_warnings() {
    let check = |address: &str, token, expected: &str| {
        let found = findings(&ask_hub(address, token))["Hub"].clone();
        assert_eq!(found["status"], "warning", "{found}");
        assert!(found["found"].as_str().unwrap().contains(expected), "{expected} in {found}");
    };
    let refusal = r#"{"error": "Invalid credentials in Authorization header"}"#;
    let (address, heads) = hub(1, "401 Unauthorized", refusal);
    check(&address, None, "answers; no login");
    heads.join().unwrap();
    let (address, heads) = hub(1, "401 Unauthorized", refusal);
    check(&address, Some("hf_wrong"), "does not accept the token");
    heads.join().unwrap();
    check("http://127.0.0.1:9", None, "the Hub cannot be reached");
}

#[test]
fn completions_know_the_commands_and_their_flags() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let text = dflash(&format!("completions {shell}")).ok().stdout;
        assert!(text.contains("hidden-server") && text.contains("max-steps"), "{shell}");
    }
    assert_eq!(dflash("completions tcsh").code, Some(2));
}

#[test]
fn every_command_has_a_man_page() {
    let (_dir, dir) = scratch();
    let made = dflash(&format!("man {dir}/man1")).ok().stdout;
    let page = |name: &str| fs::read_to_string(format!("{dir}/man1/{name}.1")).unwrap();
    // The flags page has a heading for every command; a test compares it with the definitions.
    let flags = include_str!("../../docs/flags.md");
    let commands = flags.lines().filter_map(|line| line.strip_prefix("## dflash "));
    let names: Vec<String> =
        commands.map(|command| format!("dflash-{}", command.replace(' ', "-"))).collect();
    assert!(names.len() > 15, "{names:?}");
    for name in std::iter::once("dflash".to_owned()).chain(names) {
        assert!(made.contains(&format!("{name}.1\n")), "{name} in {made}");
        assert!(page(&name).contains(&format!(".TH {}", name.to_uppercase())), "{name}");
    }
    assert!(page("dflash-train").contains("\\-\\-max\\-steps"));
    for section in ["EXAMPLES", "EXIT STATUS", "ENVIRONMENT"] {
        assert!(page("dflash-eval").contains(section), "{section}");
    }
    assert!(!page("dflash-eval").contains("EXTRA"));
    assert!(!made.contains("engine-info"), "{made}");
}
