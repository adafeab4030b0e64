//! The whole pipeline with the built programs on a target of two training steps, including user
//! errors along the way.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::program::{Finished, dflash, path, run};

/// Corpus, prompts and target shared by all tests here; removed with the target folder.
pub(crate) fn demo() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let dir = path().with_file_name("dflash-tests-demo");
        let _ = fs::remove_dir_all(&dir);
        let shown = dir.display();
        dflash(&format!("demo-target --output {shown} --rows 60 --held-out 4 --steps 2")).ok();
        dir
    })
}

pub(crate) fn target() -> String {
    demo().join("target").display().to_string()
}

pub(crate) fn scratch() -> (TempDir, String) {
    let dir = tempfile::tempdir().expect("a scratch directory");
    let shown = dir.path().display().to_string();
    (dir, shown)
}

pub(crate) fn prepared(dir: &str) -> String {
    let data = format!("{dir}/data");
    let rows = demo().join("conversations.jsonl");
    let line = format!("--data {} --output {data} --seq-length 512", rows.display());
    dflash(&format!("prepare --model {} {line}", target())).ok();
    data
}

/// A running hidden-state server, ended when dropped.
pub(crate) struct Server {
    child: Child,
    port: u16,
}

impl Server {
    pub(crate) fn start(dir: &str) -> Self {
        Self::speaking(dir, Stdio::null())
    }

    /// A server with the given stderr.
    pub(crate) fn speaking(dir: &str, stderr: Stdio) -> Self {
        let line = format!("hidden-server {} --target-layer-ids 2 3 5 6", target());
        Self::running(&line, &format!("{dir}/port"), stderr)
    }

    /// A server that writes its port to the file `port_file`.
    fn running(line: &str, port_file: &str, stderr: Stdio) -> Self {
        let port_file = PathBuf::from(port_file);
        let child = Command::new(path())
            .args(line.split_whitespace())
            .args(["--port", "0", "--port-file"])
            .arg(&port_file)
            .stderr(stderr)
            .spawn()
            .expect("the server starts");
        let written = || fs::read_to_string(&port_file).ok().filter(|text| text.ends_with('\n'));
        let text = wait_for(Duration::from_secs(120), written).expect("the server tells its port");
        let digits = text.trim().rsplit(|c: char| !c.is_ascii_digit()).next().expect("digits");
        Self { child, port: digits.parse().expect("a port") }
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}/v1", self.port)
    }

    /// Sends SIGINT and waits; returns the exit code and the time it took.
    pub(crate) fn interrupt(&mut self) -> (Option<i32>, Duration) {
        let began = Instant::now();
        signal("-INT", self.child.id());
        let status = self.child.wait().expect("the server ends");
        (status.code(), began.elapsed())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn signal(name: &str, pid: u32) {
    let sent = Command::new("kill").args([name, &pid.to_string()]).status();
    assert!(sent.expect("kill starts").success());
}

pub(crate) fn wait_for<T>(limit: Duration, mut probe: impl FnMut() -> Option<T>) -> Option<T> {
    let began = Instant::now();
    loop {
        match probe() {
            None if began.elapsed() < limit => std::thread::sleep(Duration::from_millis(20)),
            found => return found,
        }
    }
}

pub(crate) fn train_line(endpoint: &str, data: &str, save_path: &str) -> String {
    format!(
        "train --verifier-name-or-path {} --speculator-type dflash --num-layers 1 \
         --data-path {data} --vllm-endpoint {endpoint} --save-path {save_path} --epochs 1 \
         --lr 0.001 --total-seq-len 512 --on-missing generate --on-generate delete --seed 1 \
         --target-layer-ids 2 3 5 6 --scheduler-type cosine --max-anchors 64 --block-size 4 \
         --anchors-per-sequence 16 --gamma 4",
        target()
    )
}

#[test]
fn conversations_become_a_measured_drafter() {
    let (_dir, dir) = scratch();
    let data = prepared(&dir);
    let mut server = Server::start(&dir);
    let drafts = format!("{dir}/drafts");
    let line = train_line(&server.endpoint(), &data, &drafts);
    dflash(&format!("{line} --max-steps 2 --nproc 2")).ok();
    assert_eq!(server.interrupt().0, Some(0));
    let report = format!("{dir}/eval.json");
    let prompts = demo().join("prompts.jsonl");
    let table = dflash(&format!(
        "eval --target {} --draft {drafts} --prompts {} --max-new-tokens 24 \
         --json {report}",
        target(),
        prompts.display()
    ))
    .ok();
    assert!(table.stdout.contains("acceptance length (tau)"), "{}", table.stdout);
    let report: Value = serde_json::from_str(&fs::read_to_string(report).unwrap()).unwrap();
    assert!(report["acceptance_length"].as_f64().unwrap() >= 1.0, "{report}");
    assert_eq!(report["lossless"]["holds"], true, "{report}");
    check_bench(&drafts, &prompts);
    check_served(&dir, &drafts, &report);
}

/// A server with the same drafter is measured to accept the same number of tokens as here.
fn check_served(dir: &str, drafts: &str, here: &Value) {
    // Full blocks, as here, whether or not they pay off.
    let line = format!("serve --target {} --draft {drafts} --speculate 3", target());
    let server = Server::running(&line, &format!("{dir}/serve-port"), Stdio::null());
    let (endpoint, prompts) = (server.endpoint(), demo().join("prompts.jsonl"));
    let prompts = prompts.display();
    let served = format!("{dir}/served.json");
    let asked = format!("--prompts {prompts} --max-new-tokens 24 --concurrency 1,3");
    dflash(&format!("eval --endpoint {endpoint} {asked} --json {served}")).ok();
    let served: Value = serde_json::from_str(&fs::read_to_string(served).unwrap()).unwrap();
    for result in served["results"].as_array().unwrap() {
        assert_eq!(
            [&result["responses"], &result["tokens"]],
            [&here["responses"], &here["tokens"]]
        );
        let [own, counted] = [here, result].map(|it| it["acceptance_length"].as_f64().unwrap());
        // Sums over several rows round differently; a near tie may be decided differently.
        assert!((own - counted).abs() < 0.03 * own, "{own} here, {counted} by the server");
    }
    assert_eq!(served["results"].as_array().unwrap().len(), 2, "{served}");
    let sampled = format!("--prompts {prompts} --max-new-tokens 8 --limit 2 --temperature 1");
    dflash(&format!("eval --endpoint {endpoint} {sampled}")).ok();
}

/// The bench's output matches its measurements, and both methods give the same answers.
fn check_bench(drafts: &str, prompts: &Path) {
    let (target, prompts) = (target(), prompts.display());
    let line = format!("bench decode --target {target} --draft {drafts} --prompts {prompts}");
    for dtype in ["float32", "bfloat16"] {
        let more = format!("--limit 2 --max-new-tokens 24 --dtype {dtype} --json");
        let finished = dflash(&format!("{line} {more}")).ok();
        let report: Value = serde_json::from_str(&finished.stdout).unwrap();
        let figure = |name: &str| report[name].as_f64().unwrap();
        let tau = figure("acceptance_length");
        let efficiency = figure("speculative") / (tau * figure("plain"));
        assert!((1.0..=4.0).contains(&tau) && figure("plain") > 0.0, "{report}");
        assert!((efficiency - figure("efficiency")).abs() < 1e-9, "{report}");
        let cost = figure("step_ms") / figure("plain_token_ms");
        assert!((cost - figure("step_cost")).abs() < 1e-9, "{report}");
        assert_eq!([&report["answers"], &report["identical"]], [2, 2], "{report}");
        assert!(report["device"].as_str().unwrap().contains("threads"), "{report}");
    }
    let table = dflash(&format!("{line} --limit 1 --max-new-tokens 8")).ok().stdout;
    assert!(table.contains(" plain tokens\n") && table.contains("1 of 1 identical"), "{table}");
    let refused = dflash(&format!("{line} --max-new-tokens 1"));
    assert!(refused.fault().contains("--max-new-tokens is 1"), "{}", refused.stderr);
}

/// oneDNN's code for a thousand matmul shapes took 0.3 to 0.6 GB more.
#[test]
fn a_server_is_started_with_what_its_libraries_read() {
    let (_dir, dir) = scratch();
    let server = Server::start(&dir);
    let environment = fs::read(format!("/proc/{}/environ", server.child.id())).unwrap();
    let has = |wanted: &[u8]| environment.split(|byte| *byte == 0).any(|entry| entry == wanted);
    assert!(has(b"ONEDNN_PRIMITIVE_CACHE_CAPACITY=16"));
    // Read by libtorch's GPU allocator: rows and batches differ in size.
    assert!(has(b"PYTORCH_ALLOC_CONF=expandable_segments:True"));
}

#[test]
fn a_directory_without_config_json_is_named() {
    let (_dir, dir) = scratch();
    let finished = dflash(&format!("hidden-server {dir} --target-layer-ids 1 --port 0"));
    assert!(finished.fault().contains("config.json"), "{finished:?}");
    let finished = dflash(&format!("eval --target {dir} --draft {dir} --prompts {dir}/none"));
    finished.fault();
}

#[test]
fn a_missing_shard_is_named() {
    let (_dir, dir) = scratch();
    for entry in fs::read_dir(demo().join("target")).unwrap() {
        let from = entry.unwrap().path();
        let name = from.file_name().unwrap().to_str().unwrap().to_owned();
        if !name.ends_with(".safetensors") {
            fs::copy(&from, format!("{dir}/{name}")).unwrap();
        }
    }
    let finished = dflash(&format!("hidden-server {dir} --target-layer-ids 1 --port 0"));
    assert!(finished.fault().contains("safetensors"), "{finished:?}");
}

#[test]
fn a_layer_id_out_of_range_is_named_with_the_range() {
    let finished = dflash(&format!("hidden-server {} --target-layer-ids 2 99 --port 0", target()));
    let message = finished.fault();
    assert!(message.contains("99") && message.contains('8'), "{message}");
}

#[test]
fn a_broken_line_is_named_and_nothing_is_left() {
    let (_dir, dir) = scratch();
    fs::write(format!("{dir}/rows.jsonl"), "{\"question\":\"a\",\"answer\":\"b\"}\n{oops\n")
        .unwrap();
    let line = format!("prepare --model {} --data {dir}/rows.jsonl --output {dir}/out", target());
    let finished = dflash(&line);
    let message = finished.fault();
    assert!(message.contains("rows.jsonl") && message.contains('2'), "{message}");
    assert!(!Path::new(&format!("{dir}/out")).exists());
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1, "something half-written is left in {dir}");
}

#[test]
fn an_unreachable_server_is_named() {
    let (_dir, dir) = scratch();
    let data = prepared(&dir);
    let line = train_line("http://127.0.0.1:9/v1", &data, &format!("{dir}/drafts"));
    let finished = dflash(&format!("{line} --max-steps 1 --wait-for-server 0"));
    assert!(finished.fault().contains("127.0.0.1:9"), "{finished:?}");
}

#[test]
fn a_server_of_other_layers_is_named() {
    let (_dir, dir) = scratch();
    let data = prepared(&dir);
    let server = Server::start(&dir);
    let line = train_line(&server.endpoint(), &data, &format!("{dir}/drafts"));
    let finished = dflash(&line.replace("2 3 5 6", "1 4"));
    let message = finished.fault();
    assert!(message.contains("layer") && message.contains("--target-layer-ids"), "{message}");
}

#[test]
fn a_mask_token_that_text_uses_is_refused() {
    let (_dir, dir) = scratch();
    let data = prepared(&dir);
    let line = train_line("http://127.0.0.1:9/v1", &data, &format!("{dir}/drafts"));
    for id in [0, 2] {
        let finished = dflash(&format!("{line} --mask-token-id {id}"));
        let message = finished.fault();
        assert!(message.contains(&format!("mask token {id} is the ")), "{message}");
    }
}

#[test]
fn a_save_path_that_holds_something_else_is_left_alone() {
    let (_dir, dir) = scratch();
    let data = prepared(&dir);
    let drafts = format!("{dir}/drafts");
    fs::create_dir(&drafts).unwrap();
    fs::write(format!("{drafts}/thesis.txt"), "mine").unwrap();
    let server = Server::start(&dir);
    let finished = dflash(&train_line(&server.endpoint(), &data, &drafts));
    assert!(finished.fault().contains("drafts"), "{finished:?}");
    assert_eq!(fs::read_dir(&drafts).unwrap().count(), 1);
}

#[test]
fn a_data_file_without_rows_is_named() {
    let (_dir, dir) = scratch();
    fs::write(format!("{dir}/empty.jsonl"), "").unwrap();
    let line = format!("prepare --model {} --data {dir}/empty.jsonl --output {dir}/out", target());
    assert!(dflash(&line).fault().contains("empty.jsonl"));
    assert!(!Path::new(&format!("{dir}/out")).exists());
}

#[test]
fn a_port_in_use_is_named() {
    let (_dir, dir) = scratch();
    let server = Server::start(&dir);
    let line = format!("hidden-server {} --target-layer-ids 1 --port {}", target(), server.port);
    let finished = dflash(&line);
    assert!(finished.fault().contains(&server.port.to_string()), "{finished:?}");
}

#[test]
fn an_interrupt_ends_the_demo_target_within_five_seconds() {
    let (_dir, dir) = scratch();
    let mut child = Command::new(path())
        .args(["demo-target", "--rows", "200", "--steps", "100000", "--output"])
        .arg(format!("{dir}/demo"))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let trains = |line: &std::io::Result<String>| line.as_ref().unwrap().starts_with("target: ");
    assert!(lines.any(|line| trains(&line)));
    let began = Instant::now();
    signal("-INT", child.id());
    let rest: Vec<_> = lines.map(Result::unwrap).collect();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest:?}");
    assert!(began.elapsed() < Duration::from_secs(5));
    assert!(!Path::new(&format!("{dir}/demo/target")).exists());
}

#[test]
fn a_relative_path_works_from_any_directory() {
    let (_dir, dir) = scratch();
    fs::create_dir(format!("{dir}/sub")).unwrap();
    let mut command = Command::new(path());
    command.current_dir(format!("{dir}/sub")).env_remove("LIBTORCH").env_remove("LD_LIBRARY_PATH");
    command.args(["demo-target", "--rows", "20", "--held-out", "1", "--steps", "1"]);
    let finished: Finished = run(command.args(["--output", "../made"])).ok();
    assert_eq!(finished.stdout, "../made/target\n");
    assert!(Path::new(&format!("{dir}/made/target/config.json")).is_file());
}
