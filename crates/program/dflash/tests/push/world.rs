//! A run with a drafter, and a Hub to push it to.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use dflash_identity::file_digest;
use serde_json::{Value, json};

use crate::hub_server::{HubServer, TOKEN};

pub(crate) const REPO: &str = "me/drafter";
/// The same in the server's notation.
pub(crate) const MODEL: &str = "models/me/drafter";

pub(crate) struct World {
    pub(crate) hub: HubServer,
    dir: tempfile::TempDir,
}

/// Result of a push.
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl World {
    pub(crate) fn new() -> Self {
        let world = Self { hub: HubServer::start(), dir: tempfile::tempdir().unwrap() };
        std::fs::create_dir_all(world.path("run/step-000010/trainer")).unwrap();
        world.write("run/run.json", &run());
        world.write("run/step-000010/config.json", &config());
        let weights = safetensors(&[("fc.weight", 3 << 18), ("norm.weight", 6), ("x", 3 << 18)]);
        std::fs::write(world.path("run/step-000010/model.safetensors"), weights).unwrap();
        world.write("run/step-000010/trainer/state.json", &state());
        world.write("run/step-000010/evaluations.json", &json!([report(&world.digest())]));
        world
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }

    fn write(&self, name: &str, document: &Value) {
        std::fs::write(self.path(name), format!("{document:#}")).unwrap();
    }

    /// The digest of the weights, as named in reports.
    pub(crate) fn digest(&self) -> String {
        file_digest(&self.path("run/step-000010/model.safetensors")).unwrap()
    }

    /// Writes a GGUF file with some metadata and 2 MiB of zeros.
    pub(crate) fn write_gguf(&self, name: &str, architecture: &str, block_size: u32) {
        let string = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
        let mut bytes = [&b"GGUF"[..], &3u32.to_le_bytes(), &[0; 8], &2u64.to_le_bytes()].concat();
        bytes.extend([string("general.architecture"), 8u32.to_le_bytes().into()].concat());
        bytes.extend(string(architecture));
        bytes.extend(string(&format!("{architecture}.block_size")));
        bytes.extend([4u32.to_le_bytes(), block_size.to_le_bytes()].concat());
        bytes.resize(2 << 20, 0);
        std::fs::write(self.path(name), bytes).unwrap();
    }

    /// `dflash push` at the highest verbosity, so that a leaked token would show.
    pub(crate) fn command(&self, line: &str) -> Command {
        let mut command = self.bare(line);
        command.env("HF_TOKEN", TOKEN).env("DFLASH_LOG", "trace");
        command
    }

    fn bare(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dflash"));
        command
            .arg("push")
            .args(line.split_whitespace())
            .current_dir(self.dir.path())
            .env("HF_HOME", self.path("hf-home"))
            .env("HF_ENDPOINT", self.hub.address())
            .env_remove("HF_TOKEN")
            .env_remove("HF_TOKEN_PATH")
            .env_remove("DFLASH_LOG")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Runs a push that must succeed.
    pub(crate) fn push(&self, line: &str) -> Ended {
        let ended = end(&mut self.command(line));
        assert_eq!(ended.code, Some(0), "{line}: {}", ended.stderr);
        ended
    }

    pub(crate) fn run_without_token(&self, line: &str) -> Ended {
        end(&mut self.bare(line))
    }

    /// Runs a push that must fail with one line containing `words`; returns the line.
    pub(crate) fn fails(&self, line: &str, words: &str) -> String {
        check_failure(&mut self.command(line), words)
    }

    /// As [`Self::fails`], with another token or address.
    pub(crate) fn fails_with(&self, line: &str, variables: &[(&str, &str)], words: &str) -> String {
        check_failure(self.bare(line).envs(variables.iter().copied()), words)
    }

    pub(crate) fn pushed_card(&self) -> String {
        let files = self.hub.repository(MODEL).unwrap().files("main");
        String::from_utf8(files["README.md"].content.clone()).unwrap()
    }
}

fn check_failure(command: &mut Command, words: &str) -> String {
    let ended = end(command);
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert_eq!(ended.stdout, "");
    assert!(!ended.stderr.contains("caused by"), "{}", ended.stderr);
    let mut faults = ended.stderr.lines().filter(|line| line.starts_with("error: "));
    let (fault, more) = (faults.next().unwrap_or_default().to_owned(), faults.next());
    assert!(fault.contains(words) && more.is_none(), "{words} is not in\n{}", ended.stderr);
    fault
}

/// Runs to the end; asserts that the token is not in the output.
fn end(command: &mut Command) -> Ended {
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let ended = Ended {
        code: output.status.code(),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    };
    for said in [&ended.stdout, &ended.stderr] {
        assert!(!said.contains(TOKEN) && !said.contains("hf_wrong"), "{said}");
    }
    ended
}

/// A file with two-byte tensors of these sizes.
fn safetensors(tensors: &[(&str, usize)]) -> Vec<u8> {
    let (mut header, mut end) = (json!({"__metadata__": {"format": "pt"}}), 0);
    for (name, numbers) in tensors {
        let offsets = [end, end + 2 * numbers];
        header[*name] = json!({"dtype": "BF16", "shape": [numbers], "data_offsets": offsets});
        end += 2 * numbers;
    }
    let header = header.to_string();
    let mut bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    bytes.extend((0..end as u32).map(|place| (place.wrapping_mul(2_654_435_761) >> 24) as u8));
    bytes
}

fn config() -> Value {
    json!({"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 4,
        "hidden_size": 256, "block_size": 8, "dflash_target": {"name": "tiny", "config": "c0"},
        "dflash_config": {"block_size": 8, "mask_token_id": 4095, "target_layer_ids": [1, 2, 4, 5]}})
}

fn run() -> Value {
    json!({"dflash": "0.1.0", "libtorch": "2.11.0", "world_size": 2, "settings":
        {"device": "cpu", "processor": "A Processor"},
        "config": {"target": "/home/secretuser/target", "data_path": "/home/secretuser/data",
            "command": ["dflash", "train", "--save-path", "/home/secretuser/run"], "lr": 0.0006,
            "vllm_endpoint": ["http://10.1.2.3:8000/v1"], "loss": ["ce"], "epochs": null},
        "data": {"model_dir": "/home/secretuser/target", "rows": 2560, "supervised_tokens": 355994,
            "dropped": {"empty": {"count": 3, "first": "/home/secretuser/mine.jsonl:7"}},
            "sources": [{"data": "gsm8k", "files": ["/home/secretuser/.cache/a"]},
                {"data": "/home/secretuser/mine.jsonl", "files": []}]}})
}

fn state() -> Value {
    json!({"step": 10, "rows": 10, "bad_steps": 0, "skipped_samples": 0, "tokens": 193188,
        "samples": 903, "anchors": 25600, "dataset": "f1", "seed": 0, "total_seq_len": 2048})
}

fn report(digest: &str) -> Value {
    json!({"target": "/home/secretuser/target", "draft": "/home/secretuser/run",
        "draft_weights": digest, "target_identity": {"name": "tiny", "config": "c0"},
        "prompts": "/home/secretuser/test.jsonl", "responses": 12, "tokens": 900,
        "max_new_tokens": 256, "temperature": 0.0, "block_size": 8, "device": "cpu, float32",
        "acceptance_length": 3.25, "acceptance_length_per_response": 3.5,
        "acceptance_by_slot": [null, 0.75, 0.5],
        "tokens_per_second": {"speculative": 150.0, "plain": 100.0, "speed_up": 1.5},
        "lossless": {"responses": 12, "identical": 12, "ties": [], "failures": []}})
}

/// Digests of all files below `dir` by relative path, without the client's cache folder.
pub(crate) fn digests_below(dir: &Path) -> Value {
    let mut found = serde_json::Map::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        found.insert(name, json!(crate::hub_server::sha256(&std::fs::read(&path).unwrap())));
    }
    found.sort_keys();
    Value::Object(found)
}
