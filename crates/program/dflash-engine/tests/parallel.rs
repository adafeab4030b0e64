//! `dflash hidden-server` over several processes, as users start it with one command.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use dflash_golden::{Entry, entries};
use dflash_hidden_states::{HiddenStates, decode_stream};
use dflash_target::parallel::Grid;
use dflash_target::{Target, TargetConfig, TargetOptions};
use dflash_tensor::checkpoint::TensorFile;
use dflash_test_support::eventually;
use tch::{Device, Kind, Tensor, no_grad};

/// Timeout that no server of these tests reaches.
const PATIENCE: Duration = Duration::from_secs(60);

fn engine(target: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dflash-engine"));
    command.arg("hidden-server").arg(target).stdin(Stdio::null());
    command
}

/// A server, ended with its ranks when dropped.
struct Server {
    child: Child,
    port: u16,
    log: PathBuf,
    _dir: tempfile::TempDir,
}

impl Server {
    fn start(target: &Path, flags: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (port_file, log) = (dir.path().join("port"), dir.path().join("log"));
        let child = engine(target)
            .args(["--port", "0", "--threads", "1", "--wire-dtype", "f32", "--dtype", "float32"])
            .args(["--device", "cpu", "--port-file"])
            .arg(&port_file)
            .args(flags)
            .env("MALLOC_ARENA_MAX", "1")
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let mut server = Self { child, port: 0, log, _dir: dir };
        eventually("the server tells its port", || {
            assert!(server.child.try_wait().unwrap().is_none(), "{}", server.stderr());
            let port = std::fs::read_to_string(&port_file).ok();
            server.port = port.and_then(|port| port.trim().parse().ok()).unwrap_or(0);
            server.port > 0
        });
        server
    }

    fn stderr(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    /// Status and body of a request for these layers of a prompt.
    fn ask(&self, ids: &[i64], layer_ids: &[u32]) -> (u16, Vec<u8>) {
        let body = format!("{{\"input_ids\":{ids:?},\"layer_ids\":{layer_ids:?}}}");
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        // An HTTP/1.0 reply is not chunked.
        let head = "POST /v1/hidden_states HTTP/1.0\r\nHost: localhost";
        write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut reply = Vec::new();
        let _ = stream.read_to_end(&mut reply);
        let status = reply.get(9..12).map(|code| String::from_utf8_lossy(code).into_owned());
        let begin = reply.windows(4).position(|four| four == b"\r\n\r\n").unwrap_or(0) + 4;
        let body = reply.get(begin..).unwrap_or_default().to_vec();
        (status.and_then(|code| code.parse().ok()).unwrap_or(0), body)
    }

    fn states(&self, ids: &[i64], layer_ids: &[u32]) -> HiddenStates {
        let (status, body) = self.ask(ids, layer_ids);
        assert_eq!(status, 200, "{}\n{}", String::from_utf8_lossy(&body), self.stderr());
        decode_stream(Bytes::from(body), "the server").unwrap()
    }

    fn ranks(&self) -> Vec<u32> {
        let pid = self.child.id();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        children.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
    }

    /// Limits a rank to `more` additional bytes from now on.
    fn limit_memory(pid: u32, more: usize) {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
        let kib: usize = line.split_whitespace().next().unwrap().parse().unwrap();
        Self::limit(pid, &format!("--as={}:", (kib << 10) + more));
    }

    fn limit(pid: u32, limit: &str) {
        let limited = Command::new("prlimit").args(["--pid", &pid.to_string(), limit]).status();
        assert!(limited.expect("prlimit of util-linux").success());
    }

    fn signal(pid: u32, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Its exit status, which must come within `limit`.
    fn end(&mut self, limit: Duration) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < limit, "still there: {}", self.stderr());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A random target of six layers, saved.
fn saved() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let target = Target::random(TargetConfig::qwen3(128, 6, 512), 1, Device::Cpu);
    target.save(dir.path(), Kind::Float).unwrap();
    dir
}

fn prompt(tokens: i64, seed: i64) -> Vec<i64> {
    (0..tokens).map(|token| (token * seed + 3) % 512).collect()
}

fn rows(states: &HiddenStates, layer: u32) -> Tensor {
    let bytes = states.layer(layer).unwrap();
    Tensor::from_data_size(bytes, &[bytes.len() as i64 / 4], Kind::Float)
}

fn assert_close(what: &str, got: &Tensor, expected: &Tensor) {
    let scale = expected.abs().max().double_value(&[]);
    let off = (got - expected.flatten(0, -1)).abs().max().double_value(&[]);
    assert!(off <= 1e-5 * scale.max(1.0), "{what}: off by {off} at a scale of {scale}");
}

const LAYERS: [u32; 4] = [0, 1, 4, 6];

#[test]
fn several_processes_serve_what_one_does() {
    let dir = saved();
    let serving = ["--target-layer-ids", "0", "1", "4", "6"];
    let whole = Server::start(dir.path(), &serving);
    let prompts = [(700, 5), (37, 7), (1, 11), (300, 13), (290, 17), (260, 19)];
    let prompts: Vec<Vec<i64>> =
        prompts.into_iter().map(|(tokens, seed)| prompt(tokens, seed)).collect();
    let expected: Vec<HiddenStates> =
        prompts.iter().map(|ids| whole.states(ids, &LAYERS)).collect();
    drop(whole);
    let stages = ["--pipeline", "3"].as_slice();
    let parts = ["--tensor-parallel-size", "2"].as_slice();
    for (flags, ranks) in [(stages, 3), (parts, 2), (&["--pipeline", "2", parts[0], "2"], 4)] {
        let server = Server::start(dir.path(), &[&serving, flags].concat());
        assert_eq!(server.ranks().len(), ranks, "{flags:?}");
        // All at once, so that batches are split into jobs and two are in progress.
        let got: Vec<HiddenStates> = std::thread::scope(|scope| {
            let server = &server;
            let asked: Vec<_> = prompts
                .iter()
                .map(|ids| scope.spawn(move || server.states(ids, &LAYERS)))
                .collect();
            asked.into_iter().map(|answer| answer.join().unwrap()).collect()
        });
        for (got, expected) in got.iter().zip(&expected) {
            for layer in LAYERS {
                let what = format!("{flags:?}, layer {layer} of {} tokens", expected.tokens);
                assert_close(&what, &rows(got, layer), &rows(expected, layer));
            }
        }
        // Later stages have nothing to do here.
        let first = server.states(&prompts[1], &[1]);
        assert_close("layer 1 alone", &rows(&first, 1), &rows(&expected[1], 1));
    }
}

/// The vectors that two ranks cannot divide: one key head in the delta layers.
const ONE_DELTA_HEAD: &str = "qwen3_next_dense_layer";

/// Every family that runs here, compared with its vectors and with one process.
#[test]
fn parallel_targets_give_the_states_of_the_vectors() {
    let mut tried = Vec::new();
    for entry in ["targets", "targets2"].into_iter().flat_map(|kind| entries(kind, None)) {
        let Ok(config) = TargetConfig::load(&entry.path) else { continue };
        let mut grid = Grid { pipeline: 2, tensor: 2 };
        if let Err(error) = grid.check(&config) {
            // The error says so, and splitting by layers works.
            assert!(error.to_string().contains("--pipeline splits by layers"), "{error}");
            assert!(entry.name == ONE_DELTA_HEAD || !entry.own, "{}: {error}", entry.name);
            grid.tensor = 1;
        }
        assert_vectors(&entry, grid);
        tried.push(config.architecture);
    }
    assert!(tried.iter().any(|name| name == "Qwen3ForCausalLM"), "{tried:?}");
}

/// One or two key heads for four ranks, sinks, norms over all heads, both stored delta layouts.
#[test]
fn four_ranks_give_the_states_of_the_vectors() {
    let names = ["gpt_oss", "phi3", "qwen3_yarn"];
    let names2 = ["gemma4", "minimax_m2", "qwen3_5_four_heads", "qwen3_next_four_heads"];
    for (kind, names) in [("targets", names.as_slice()), ("targets2", names2.as_slice())] {
        let mut found = entries(kind, None);
        found.retain(|entry| names.contains(&entry.name.as_str()));
        assert_eq!(found.len(), names.len(), "{kind}");
        found.iter().for_each(|entry| assert_vectors(entry, Grid { pipeline: 1, tensor: 4 }));
    }
}

/// Asserts that `grid` gives all states of a target's vectors, and those of one process.
fn assert_vectors(entry: &Entry, grid: Grid) {
    let config = TargetConfig::load(&entry.path).unwrap();
    let golden = TensorFile::open(&entry.path.join("golden.safetensors")).unwrap();
    let [ids, states] = ["input_ids", "hidden_states"].map(|name| golden.any_tensor(name).unwrap());
    let ids = Vec::<i64>::try_from(ids.flatten(0, -1)).unwrap();
    let all: Vec<u32> = (0..=config.num_hidden_layers as u32).collect();
    let [pipeline, tensor] = [grid.pipeline, grid.tensor].map(|number| number.to_string());
    let names: Vec<String> = all.iter().map(u32::to_string).collect();
    let mut flags = vec!["--pipeline", &pipeline, "--tensor-parallel-size", &tensor];
    flags.push("--target-layer-ids");
    flags.extend(names.iter().map(String::as_str));
    let server = Server::start(&entry.path, &flags);
    let got = server.states(&ids, &all);
    let options = TargetOptions { device: Device::Cpu, dtype: Kind::Float };
    let whole = Target::load(&entry.path, &options).unwrap();
    let (ids_t, tokens) = (Tensor::from_slice(&ids), ids.len() as i64);
    let alone = no_grad(|| whole.forward_packed(&ids_t, &[0, tokens], &all));
    for (&layer, alone) in all.iter().zip(&alone) {
        let what = format!("{}, {grid:?}, layer {layer}", entry.name);
        assert_close(&format!("{what}, one process"), &rows(&got, layer), alone);
        let expected = states.get(i64::from(layer)).to_kind(Kind::Float);
        let (scale, got) = (expected.abs().max().double_value(&[]), rows(&got, layer));
        let off = (got - expected.flatten(0, -1)).abs().max().double_value(&[]);
        // The vectors come from another program.
        assert!(off <= 1e-4 * scale.max(1.0), "{what}: off by {off} at a scale of {scale}");
    }
}

#[test]
fn a_rank_that_dies_ends_the_server_and_is_named() {
    let dir = saved();
    let mut server = Server::start(dir.path(), &["--pipeline", "2", "--tensor-parallel-size", "2"]);
    server.states(&prompt(40, 3), &[6]);
    let ranks = server.ranks();
    let begun = Instant::now();
    Server::signal(ranks[3], rustix::process::Signal::KILL);
    let status = server.end(Duration::from_secs(8));
    assert_eq!(status.code(), Some(1), "{}", server.stderr());
    let stderr = server.stderr();
    assert!(stderr.contains(&format!("process {}) was killed by signal 9", ranks[3])), "{stderr}");
    assert!(stderr.contains("rank 3"), "{stderr}");
    for pid in ranks {
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "rank {pid} outlives the server");
    }
    assert!(begun.elapsed() < Duration::from_secs(8));
}

#[test]
fn ctrl_c_ends_all_in_order() {
    let dir = saved();
    for signal in [rustix::process::Signal::INT, rustix::process::Signal::TERM] {
        let mut server = Server::start(dir.path(), &["--tensor-parallel-size", "2"]);
        server.states(&prompt(40, 3), &[6]);
        let ranks = server.ranks();
        Server::signal(server.child.id(), signal);
        let status = server.end(Duration::from_secs(8));
        assert_eq!(status.code(), Some(0), "{}", server.stderr());
        assert!(ranks.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists()));
    }
}

#[test]
fn a_rank_without_memory_refuses_what_does_not_fit_and_all_live_on() {
    let dir = saved();
    let mut flags = vec!["--pipeline", "2", "--tensor-parallel-size", "2"];
    flags.extend(["--max-batch-tokens", "65536", "--target-layer-ids", "0", "1", "4", "6"]);
    let mut server = Server::start(dir.path(), &flags);
    let (short, long) = (prompt(64, 3), prompt(2048, 3));
    let expected = rows(&server.states(&short, &[6]), 6);
    // The second rank of each stage.
    for pid in [server.ranks()[1], server.ranks()[3]] {
        Server::limit_memory(pid, 10 << 20);
        let (status, body) = server.ask(&long, &[0, 6]);
        assert_eq!(status, 413, "{}\n{}", String::from_utf8_lossy(&body), server.stderr());
        let again = rows(&server.states(&short, &[6]), 6);
        assert_close("after it", &again, &expected);
        Server::limit(pid, "--as=unlimited:");
    }
    assert!(
        server.stderr().contains("rank 1 has no memory for 2048 tokens"),
        "{}",
        server.stderr()
    );
    assert!(server.child.try_wait().unwrap().is_none(), "it lives");
}

#[test]
fn what_cannot_be_divided_is_refused_before_ranks_start() {
    let dir = saved();
    let refused = |flags: &[&str], expected: &str| {
        let output = engine(dir.path()).args(["--port", "0"]).args(flags).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(expected) && !stderr.contains("[rank"), "{stderr}");
    };
    let layers = "--pipeline is 7, but the target has 6 layers";
    refused(&["--pipeline", "7"], layers);
    let heads = "--tensor-parallel-size is 8, which does not divide num_attention_heads, 4";
    refused(&["--tensor-parallel-size", "8"], heads);
    refused(&["--pipeline", "0"], "--pipeline is 0, but it must be at least 1");
    let shared = "--device is cuda:0, but --pipeline and --tensor-parallel-size give each of 2";
    refused(&["--pipeline", "2", "--device", "cuda:0"], shared);
}
