//! `dflash report --follow`, the program itself: what it says, what it serves, how it ends.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn dflash(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dflash"));
    command.arg("report").args(args);
    command
}

fn get(port: u16, path: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let head =
        format!("GET {path} HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    reply
}

/// The port in `path`, once it is there.
fn port_in(path: &Path) -> u16 {
    let begun = Instant::now();
    loop {
        match std::fs::read_to_string(path) {
            Ok(text) => return text.trim().parse().unwrap(),
            Err(error) => assert!(begun.elapsed() < Duration::from_secs(60), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn ctrl_c_ends_it_and_that_is_a_success() {
    let dir = tempfile::tempdir().unwrap();
    let (run, port_file) = (dir.path().join("run"), dir.path().join("port"));
    let args = [&run, Path::new("--port-file"), &port_file].map(|path| path.to_str().unwrap());
    let mut following = dflash(&[&args[..], &["--follow", "--port", "0"]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let port = port_in(&port_file);
    assert!(get(port, "/").contains("No run has written to "));
    std::fs::create_dir(&run).unwrap();
    std::fs::write(run.join("metrics.jsonl"), "{\"step\":7,\"eta_s\":0.0,\"loss\":2.5}\n").unwrap();
    let begun = Instant::now();
    while !get(port, "/state.json").contains("\"step\":7") {
        assert!(begun.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(get(port, "/").contains("Finished at step 7"));
    let interrupted = Command::new("kill").args(["-INT", &following.id().to_string()]).status();
    assert!(interrupted.unwrap().success());
    let ended = following.wait().unwrap();
    assert_eq!(ended.code(), Some(0));
    let (mut said, mut told) = (String::new(), String::new());
    following.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    following.stderr.take().unwrap().read_to_string(&mut told).unwrap();
    assert_eq!(said, format!("http://127.0.0.1:{port}/\n"));
    assert!(told.contains(&format!("ssh -L {port}:127.0.0.1:{port} ")), "{told}");
    assert!(!run.join("report.html").exists());
}

#[test]
fn what_does_not_go_together_is_refused() {
    let refused = |args: &[&str], expect: &str| {
        let output = dflash(args).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && text.contains(expect), "{args:?}: {text}");
    };
    refused(&["run", "--follow", "--output", "x.html"], "needs no --follow");
    refused(&["run", "--port-file", "port"], "--follow");
    refused(&["run", "--follow", "--host", "no.such.host.invalid"], "--host 127.0.0.1");
}
