//! Lost readers: a closed or full stderr ends no work; an unwritable result is an error.

use std::fs::{self, File};
use std::process::{Command, Stdio};

use crate::pipeline::{Server, demo, prepared, scratch, target, train_line};
use crate::program::{Finished, path};

/// Outputs that cannot be written: a full disk, and a pipe without a reader.
fn lost() -> [Stdio; 2] {
    let full = File::options().write(true).open("/dev/full").expect("a device that is full");
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    [full.into(), writer.into()]
}

fn start(line: &str) -> Command {
    let mut command = Command::new(path());
    command.args(line.split_whitespace()).stdin(Stdio::null());
    command
}

/// Runs `line(name)` with each kind of lost stderr, which must change nothing, then of lost stdout.
fn check(line: impl Fn(&str) -> String, done: impl Fn(&str)) {
    for (stderr, name) in lost().into_iter().zip(["stderr-full", "stderr-closed"]) {
        let finished: Finished = start(&line(name)).stderr(stderr).output().unwrap().into();
        assert_eq!(finished.code, Some(0), "{name} of {}", line(name));
        assert!(!finished.stdout.is_empty(), "{name} of {}", line(name));
        done(name);
    }
    for (stdout, name) in lost().into_iter().zip(["stdout-full", "stdout-closed"]) {
        let finished: Finished =
            start(&line(name)).stdout(stdout).stderr(Stdio::piped()).output().unwrap().into();
        let text = finished.fault();
        assert!(text.contains("standard output") || text.contains("stdout"), "{finished:?}");
        done(name);
    }
}

#[test]
fn a_lost_reader_ends_no_work() {
    let (_dir, dir) = scratch();
    let rows = demo().join("conversations.jsonl");
    let rows = rows.display();
    let prepare = |name: &str| {
        format!("prepare --model {} --data {rows} --output {dir}/{name} --seq-length 512", target())
    };
    check(prepare, |name| assert!(fs::exists(format!("{dir}/{name}/state.json")).unwrap()));

    let data = prepared(&dir);
    let [full, closed] = lost();
    let mut full = Server::speaking(&dir, full);
    let train = |server: &Server, name: &str| {
        let line = train_line(&server.endpoint(), &data, &format!("{dir}/draft-{name}"));
        format!("{line} --max-steps 3 --log-every 1")
    };
    let complete = |name: &str| {
        let lines = fs::read_to_string(format!("{dir}/draft-{name}/metrics.jsonl")).unwrap();
        assert_eq!(lines.lines().count(), 3, "{name}: {lines}");
        assert!(fs::exists(format!("{dir}/draft-{name}/step-000003")).unwrap());
    };
    check(|name| train(&full, name), complete);
    assert_eq!(full.interrupt().0, Some(0));
    let (_other, other) = scratch();
    let mut closed = Server::speaking(&other, closed);
    let finished: Finished = start(&train(&closed, "closed")).output().unwrap().into();
    finished.ok();
    assert_eq!(closed.interrupt().0, Some(0));

    let prompts = demo().join("prompts.jsonl");
    let eval = |_: &str| {
        let (target, prompts) = (target(), prompts.display());
        let line = format!("eval --target {target} --draft {dir}/draft-closed/latest");
        format!("{line} --prompts {prompts} --limit 2 --max-new-tokens 8")
    };
    check(eval, |_| ());
}
