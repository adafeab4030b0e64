//! `dflash hidden-server` as users run it: what it refuses early, and running out of memory.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use dflash_target::{Target, TargetConfig};
use dflash_test_support::eventually;
use tch::{Device, Kind};

fn engine() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dflash-engine"));
    command.arg("hidden-server").stdin(Stdio::null());
    command
}

fn refused(arguments: &[&str]) -> String {
    // No such target: any other error was found before loading.
    let output: Output = engine().arg("/no/such/target").args(arguments).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(!stderr.contains("/no/such/target"), "{stderr}");
    stderr
}

#[test]
fn a_port_file_that_is_no_file_is_refused_before_the_target_loads() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    std::fs::write(path("kept"), "precious\n").unwrap();
    symlink(path("kept"), path("link")).unwrap();
    assert!(Command::new("mkfifo").arg(path("fifo")).status().unwrap().success());
    std::fs::create_dir(path("dir")).unwrap();
    let devices = ["/dev/null".to_owned()];
    for port_file in ["link", "fifo", "dir"].map(path).iter().chain(&devices) {
        let before = std::fs::symlink_metadata(port_file).unwrap().file_type();
        let stderr = refused(&["--port", "0", "--port-file", port_file]);
        assert!(stderr.contains(&format!("--port-file is {port_file}, but that is ")), "{stderr}");
        assert_eq!(std::fs::symlink_metadata(port_file).unwrap().file_type(), before);
    }
    assert_eq!(std::fs::read_to_string(path("kept")).unwrap(), "precious\n");
}

#[test]
fn numbers_without_sense_are_refused_with_their_range() {
    for (flag, value) in [
        ("--max-model-len", "0"),
        ("--max-batch-tokens", "0"),
        ("--max-queue", "0"),
        ("--max-queue", "18446744073709551615"),
        ("--threads", "0"),
        ("--threads", "100000"),
        ("--client-timeout", "0"),
        ("--max-wait", "1e300"),
    ] {
        let stderr = refused(&["--port", "0", flag, value]);
        assert!(stderr.contains(flag) && stderr.contains("must be"), "{stderr}");
    }
}

/// A server with a random target; killed when dropped.
struct Server {
    child: Child,
    port: u16,
    _dir: tempfile::TempDir,
}

impl Server {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = TargetConfig::qwen3(256, 4, 512);
        config.max_position_embeddings = 8192;
        let target = Target::random(config, 1, Device::Cpu);
        target.save(dir.path(), Kind::Float).unwrap();
        let port_file = dir.path().join("port");
        let child = engine()
            .arg(dir.path())
            .args(["--port", "0", "--threads", "1", "--max-batch-tokens", "65536", "--port-file"])
            .arg(&port_file)
            // More arenas would reserve address space in advance, beyond the limit's reach.
            .env("MALLOC_ARENA_MAX", "1")
            .spawn()
            .unwrap();
        let mut server = Self { child, port: 0, _dir: dir };
        eventually("the server tells its port", || {
            server.port = port_in(&port_file).unwrap_or(0);
            server.port > 0
        });
        server
    }

    /// Status and body of a request for a prompt.
    fn prompt(&self, tokens: usize) -> (u16, Vec<u8>) {
        let body = format!("{{\"input_ids\":{:?}}}", vec![7; tokens]);
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
        let head = "POST /v1/hidden_states HTTP/1.1\r\nHost: localhost\r\nConnection: close";
        write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut reply = Vec::new();
        stream.read_to_end(&mut reply).unwrap();
        let status = String::from_utf8_lossy(&reply[9..12]).parse().unwrap();
        (status, reply)
    }

    /// Limits the process to `more` additional bytes from now on.
    fn limit_memory(&self, more: usize) {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
        let kib: usize = line.split_whitespace().next().unwrap().parse().unwrap();
        self.limit(&format!("--as={}", (kib << 10) + more));
    }

    fn limit(&self, limit: &str) {
        let pid = self.child.id().to_string();
        let limited = Command::new("prlimit").args(["--pid", &pid, limit]).status();
        assert!(limited.expect("prlimit of util-linux").success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn port_in(path: &Path) -> Option<u16> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[test]
fn a_process_without_memory_refuses_what_does_not_fit_and_lives_on() {
    let mut server = Server::start();
    assert_eq!(server.prompt(64).0, 200);
    server.limit_memory(16 << 20);
    // 8,192 tokens of five layers are 20 MiB of rows, and several times that in the forward pass.
    let (status, reply) = server.prompt(8192);
    assert_eq!(status, 413);
    let reply = String::from_utf8_lossy(&reply);
    assert!(reply.contains("no memory for a prompt of 8192 tokens"), "{reply}");
    // Concurrent long ones are answered as if they had come alone.
    let answers: Vec<u16> = std::thread::scope(|scope| {
        let lengths = [8192, 16, 24, 8191, 32];
        let server = &server;
        let asked = lengths.map(|tokens| scope.spawn(move || server.prompt(tokens).0));
        asked.into_iter().map(|answer| answer.join().unwrap()).collect()
    });
    assert_eq!(answers, [413, 200, 200, 413, 200]);
    assert_eq!(server.prompt(64).0, 200);
    assert!(server.child.try_wait().unwrap().is_none(), "it lives");
}

#[test]
fn half_heads_leave_room_where_few_files_may_be_open() {
    let server = Server::start();
    server.limit("--nofile=64");
    let half = |_| {
        let mut stream = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
        // Some are cut before they have sent this much.
        let _ = stream.write_all(b"GET /health HTTP/1.1\r\nHo");
        stream
    };
    let _stuck: Vec<TcpStream> = (0..300).map(half).collect();
    let began = Instant::now();
    assert_eq!(server.prompt(3).0, 200);
    // They would be cut after 30 seconds anyway.
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}
