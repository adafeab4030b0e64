//! The page that is served: current, read-only, and for its own names alone.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dflash_report::{Error, Follow, follow};
use dflash_run::{MetricLine, RunDir, SavePath, TeacherForced};

/// A server that ends when this is dropped.
struct Following {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), Error>>>,
}

impl Following {
    fn start(dir: &Path, host: &'static str) -> Self {
        let (stop, (told, address)) = (Arc::new(AtomicBool::new(false)), channel());
        let (dir, stopped) = (dir.to_owned(), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let asked = Follow { run_dir: &dir, host, port: 0, port_file: None };
            follow(&asked, &stopped, |address| told.send(address).unwrap())
        });
        Self { address: address.recv().unwrap(), stop, thread: Some(thread) }
    }

    /// Status, head and body of the reply to a request with these further headers.
    fn ask(&self, line: &str, headers: &str) -> (u16, String, String) {
        let port = self.address.port();
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let host = match headers.to_ascii_lowercase().contains("host:") {
            true => String::new(),
            false => format!("Host: localhost:{port}\r\n"),
        };
        write!(stream, "{line} HTTP/1.1\r\n{host}{headers}Connection: close\r\n\r\n").unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        let (head, body) = reply.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, head.to_ascii_lowercase(), body.to_owned())
    }

    fn status(&self, line: &str, headers: &str) -> u16 {
        self.ask(line, headers).0
    }

    fn state(&self) -> serde_json::Value {
        let (status, _, body) = self.ask("GET /state.json", "");
        assert_eq!(status, 200);
        serde_json::from_str(&body).unwrap()
    }

    /// The state once it `holds`.
    fn wait_for(&self, holds: impl Fn(&serde_json::Value) -> bool) -> serde_json::Value {
        let begun = Instant::now();
        loop {
            let state = self.state();
            if holds(&state) {
                return state;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{state}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let ended = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            ended.unwrap().unwrap();
        }
    }
}

fn line(step: u64) -> MetricLine {
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
    let figures = TeacherForced {
        loss: Some(4.0),
        expected_acceptance_length: Some(2.5),
        ..TeacherForced::default()
    };
    MetricLine {
        step,
        total_steps: Some(20),
        time: Some(now),
        eta_s: Some(30.0),
        figures,
        ..MetricLine::default()
    }
}

#[test]
fn a_run_is_followed_from_before_its_beginning_to_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("run");
    let server = Following::start(&dir, "127.0.0.1");
    assert_eq!(server.state()["state"], "waiting");
    let claimed = SavePath::claim(&dir).unwrap();
    server.wait_for(|state| state["state"] == "starting");
    let run = RunDir::at(&dir);
    run.append(&line(10)).unwrap();
    let state = server.wait_for(|state| state["step"] == 10);
    assert_eq!(
        state["sentence"],
        "Running: step 10 of 20, 30 s left: acceptance length 2.50 tokens, expected on training \
         rows; 1 fault."
    );
    assert_eq!(state["faults"], serde_json::json!(["run.json is missing or broken."]));
    assert!(state["parts"]["learning"].as_str().unwrap().contains("data-values=\"10,2.5,"));
    // Half a line is waited for, and is no fault while the run is alive.
    let path = dir.join("metrics.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    let next = serde_json::to_string(&line(12)).unwrap();
    let (half, rest) = next.split_at(40);
    std::fs::write(&path, format!("{text}{half}")).unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    let state = server.state();
    assert_eq!((&state["step"], state["faults"].as_array().unwrap().len()), (&10.into(), 1));
    std::fs::write(&path, format!("{text}{half}{rest}\n")).unwrap();
    server.wait_for(|state| state["step"] == 12);
    // A process that is gone leaves its lock open.
    drop(claimed);
    run.append(&line(14)).unwrap();
    server.wait_for(|state| state["step"] == 14 && state["state"] == "stopped");
    run.append(&line(20)).unwrap();
    server.wait_for(|state| state["state"] == "finished");
    let names: Vec<String> = std::fs::read_dir(&dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| ![".lock", "metrics.jsonl"].contains(&name.as_str()))
        .collect();
    assert!(names.is_empty(), "following writes nothing: {names:?}");
}

#[test]
fn only_its_own_names_and_no_other_page_may_read_it() {
    let dir = tempfile::tempdir().unwrap();
    let server = Following::start(dir.path(), "127.0.0.1");
    let check = |headers: &str, expect: u16| {
        for path in ["/", "/state.json"] {
            assert_eq!(server.status(&format!("GET {path}"), headers), expect, "{path} {headers}");
        }
    };
    check("", 200);
    check("Host: 127.0.0.1\r\n", 200);
    check("Host: [::1]:9\r\n", 200);
    check("Host: evil.example\r\n", 403);
    check("Host: localhost.evil.example\r\n", 403);
    check("Host: 10.0.0.1\r\n", 403);
    check("Origin: https://evil.example\r\n", 403);
    check("Origin: null\r\n", 403);
    check("Sec-Fetch-Site: cross-site\r\nSec-Fetch-Dest: image\r\n", 403);
    check("Sec-Fetch-Site: cross-site\r\nSec-Fetch-Dest: iframe\r\n", 403);
    check("Sec-Fetch-Site: cross-site\r\nSec-Fetch-Dest: document\r\n", 200);
    check("Sec-Fetch-Site: same-origin\r\nSec-Fetch-Dest: empty\r\n", 200);
    let everywhere = Following::start(dir.path(), "0.0.0.0");
    assert_eq!(everywhere.status("GET /", "Host: evil.example\r\n"), 403);
    assert_eq!(everywhere.status("GET /", "Host: 10.0.0.1:8008\r\n"), 200);
}

#[test]
fn the_page_can_only_be_read_and_lets_nothing_else_in() {
    let dir = tempfile::tempdir().unwrap();
    let server = Following::start(dir.path(), "127.0.0.1");
    for (line, expect) in [
        ("POST /", 405),
        ("DELETE /state.json", 405),
        ("HEAD /", 200),
        ("GET /../../etc/passwd", 404),
        ("GET /metrics.jsonl", 404),
    ] {
        assert_eq!(server.status(line, ""), expect, "{line}");
    }
    let (_, head, body) = server.ask("GET /", "");
    for header in [
        "content-security-policy: default-src 'none'; style-src 'sha256-",
        "frame-ancestors 'none'",
        "connect-src 'self'",
        "cache-control: no-store",
        "x-content-type-options: nosniff",
        "cross-origin-resource-policy: same-origin",
    ] {
        assert!(head.contains(header), "{header} in\n{head}");
    }
    assert!(!head.contains("unsafe"), "{head}");
    assert!(body.contains("fetch(\"state.json\""), "{body}");
    for foreign in ["http://", "https://", "src="] {
        assert!(!body.contains(foreign), "{foreign}");
    }
    let (_, head, _) = server.ask("GET /state.json", "");
    let tag = head.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap();
    let (status, _, body) = server.ask("GET /state.json", &format!("If-None-Match: {tag}\r\n"));
    assert_eq!((status, body.as_str()), (304, ""));
}

#[test]
fn a_port_in_use_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let server = Following::start(dir.path(), "127.0.0.1");
    let asked = Follow {
        run_dir: dir.path(),
        host: "127.0.0.1",
        port: server.address.port(),
        port_file: None,
    };
    let stop = Arc::new(AtomicBool::new(false));
    let refused = follow(&asked, &stop, |_| ()).unwrap_err().to_string();
    assert!(refused.contains("is in use"), "{refused}");
}
