//! A temporary directory with a target, a dataset and stored hidden states; runs training in it.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use dflash_data::{DatasetWriter, Sample, WriterOptions};
use dflash_hidden_states::{Dtype, HiddenStates, OfflineFiles};
use dflash_target::{Target, TargetConfig, TargetOptions};
use dflash_test_support::eventually;
use tch::{Device, Kind, Tensor};

pub(crate) const LAYER_IDS: [u32; 2] = [1, 2];
const HIDDEN: i64 = 32;
const VOCABULARY: i64 = 64;
const SAMPLES: u64 = 24;
/// Pad, eos and mask tokens of the tokenizer, above the data's tokens.
const SPECIAL: [(&str, i64); 3] = [("<pad>", 60), ("<eos>", 61), ("<|mask|>", 63)];

/// The directory; deleted when dropped.
pub(crate) struct World {
    dir: tempfile::TempDir,
}

pub(crate) struct Run {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    pub(crate) fn success(&self) -> bool {
        self.code == Some(0)
    }

    pub(crate) fn of(command: &mut Command) -> Self {
        let output = command.output().unwrap();
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with_mask(|_, t| t >= 3)
    }

    /// A world in which `mask` (sample, token) decides whether a token is supervised.
    pub(crate) fn with_mask(mask: fn(u64, u64) -> bool) -> Self {
        Self::of_width(HIDDEN, mask)
    }

    /// A world whose drafts have 27 million parameters: checkpoints of 380 MB.
    pub(crate) fn large() -> Self {
        Self::of_width(1024, |_, t| t >= 3)
    }

    /// A world in which logits dominate memory: 256 KiB per slot.
    pub(crate) fn of_many_tokens() -> Self {
        Self::of(TargetConfig::qwen3(HIDDEN, 2, 1 << 16), |_, t| t >= 3)
    }

    /// A world in which the target's pass dominates memory: 384 KiB per token.
    pub(crate) fn of_wide_layers() -> Self {
        let config = TargetConfig::qwen3(HIDDEN, 2, VOCABULARY);
        let config = config.with_dense(|dense| dense.intermediate_size = 1 << 15);
        Self::of(config, |_, t| t >= 3)
    }

    /// Writes a copy of the target in bfloat16; returns its path.
    pub(crate) fn write_bfloat16_target(&self, name: &str) -> String {
        let copy = self.copy_target("target", name);
        let options = TargetOptions { device: Device::Cpu, dtype: Kind::Float };
        let target = Target::load(&self.path("target"), &options).unwrap();
        target.save(Path::new(&copy), Kind::BFloat16).unwrap();
        copy
    }

    fn of_width(hidden: i64, mask: fn(u64, u64) -> bool) -> Self {
        Self::of(TargetConfig::qwen3(hidden, 2, VOCABULARY), mask)
    }

    fn of(config: TargetConfig, mask: fn(u64, u64) -> bool) -> Self {
        let world = Self { dir: tempfile::tempdir().unwrap() };
        let target = write_target_of(&world.path("target"), config, 1);
        let samples = write_dataset(&world.path("data"), mask);
        store_states(&target, &samples, OfflineFiles::new(world.path("states")));
        world
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a target that differs from the world's only in its weights into the folder `name`.
    pub(crate) fn write_other_target(&self, name: &str) {
        write_target_of(&self.path(name), TargetConfig::qwen3(HIDDEN, 2, VOCABULARY), 2);
    }

    /// Writes a target with a larger vocabulary.
    pub(crate) fn write_wider_target(&self, name: &str) {
        write_target_of(&self.path(name), TargetConfig::qwen3(HIDDEN, 2, VOCABULARY + 16), 2);
    }

    /// Copies a target; returns the copy's path.
    pub(crate) fn copy_target(&self, name: &str, copy: &str) -> String {
        let copy = self.path(copy);
        std::fs::create_dir(&copy).unwrap();
        for entry in std::fs::read_dir(self.path(name)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
        }
        copy.to_string_lossy().into_owned()
    }

    /// The defaults followed by `more`; a repeated flag overrides.
    pub(crate) fn arguments(&self, save: &str, more: &[&str]) -> Vec<String> {
        let path = |name: &str| self.path(name).to_string_lossy().into_owned();
        let defaults = [
            ("--verifier-name-or-path", path("target")),
            ("--data-path", path("data")),
            ("--hidden-states-path", path("states")),
            ("--on-missing", "raise".into()),
            ("--save-path", path(save)),
            ("--num-layers", "2".into()),
            ("--block-size", "4".into()),
            ("--target-layer-ids", "1,2".into()),
            ("--total-seq-len", "64".into()),
            ("--anchors-per-sequence", "8".into()),
            ("--epochs", "2".into()),
            ("--lr", "0.01".into()),
            ("--log-every", "1".into()),
        ];
        let mut arguments = vec!["train".to_string(), "--no-progress".to_string()];
        // A colocated target replaces stored states.
        let stored = ["--hidden-states-path", "--on-missing"];
        let colocates = more.contains(&"--colocate");
        for (flag, value) in defaults {
            let is_given = more.contains(&flag) || colocates && stored.contains(&flag);
            if !is_given {
                arguments.extend([flag.to_string(), value]);
            }
        }
        arguments.extend(more.iter().map(ToString::to_string));
        arguments
    }

    pub(crate) fn command(&self, save: &str, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dflash-engine"));
        command.args(self.arguments(save, more)).env("OMP_NUM_THREADS", "1");
        command
    }

    /// As [`Self::train`], with variables in the environment.
    pub(crate) fn train(&self, save: &str, more: &[&str]) -> Run {
        Run::of(&mut self.command(save, more))
    }

    pub(crate) fn engine(&self, arguments: &[&str]) -> Run {
        self.engine_with(arguments, &[])
    }

    pub(crate) fn engine_with(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Run {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dflash-engine"));
        command.args(arguments).env("OMP_NUM_THREADS", "1");
        Run::of(command.envs(variables.iter().copied()))
    }

    /// Writes what [`Self::train`] would pass as flags into a run file; returns its path.
    pub(crate) fn run_file(&self, save: &str, more: &[&str]) -> String {
        let mut arguments = self.arguments(save, more);
        arguments.push("--dump-config".into());
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let dumped = self.engine(&arguments);
        assert!(dumped.success(), "{}", dumped.stderr);
        let path = self.path("run.toml");
        std::fs::write(&path, dumped.stdout).unwrap();
        path.to_string_lossy().into_owned()
    }

    pub(crate) fn torchrun(&self, torchrun: &Path, save: &str, ranks: usize) -> Run {
        let mut command = Command::new(torchrun);
        command.args(["--no-python", "--standalone", "--nproc-per-node", &ranks.to_string()]);
        command.arg(env!("CARGO_BIN_EXE_dflash-engine")).args(self.arguments(save, &[]));
        Run::of(command.env_remove("LD_LIBRARY_PATH").env("LD_LIBRARY_PATH", libtorch()))
    }

    /// The report of `dflash eval` on [`Self::prompts`].
    pub(crate) fn eval(&self, draft: &Path) -> serde_json::Value {
        let (prompts, report) = (self.prompts("prompts.jsonl"), self.path("eval.json"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_dflash-engine"));
        command.arg("eval").arg("--target").arg(self.path("target")).arg("--draft").arg(draft);
        command.args(["--max-new-tokens", "24"]).arg("--prompts").arg(prompts);
        let run = Run::of(command.arg("--json").arg(&report));
        assert!(run.success(), "{}", run.stderr);
        serde_json::from_slice(&std::fs::read(report).unwrap()).unwrap()
    }

    /// Interrupts a run during training; returns the time it took to end. It leaves a checkpoint.
    pub(crate) fn interrupt(&self, save: &str, more: &[&str]) -> Duration {
        let mut child = self.command(save, more).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains("training") {
            line.clear();
            assert!(lines.read_line(&mut line).unwrap() > 0, "the run ended before it trained");
        }
        let metrics = self.path(save).join("metrics.jsonl");
        let trains = || std::fs::metadata(&metrics).is_ok_and(|file| file.len() > 0);
        eventually("a step is done", trains);
        let asked = Instant::now();
        Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        let status = child.wait().unwrap();
        let took = asked.elapsed();
        let mut rest = String::new();
        lines.read_to_string(&mut rest).unwrap();
        assert!(!status.success(), "the run was over before it could be interrupted: {rest}");
        assert!(!sorted_checkpoints(&self.path(save)).is_empty(), "{rest}");
        took
    }

    /// Writes a file of four prompts; returns its path.
    pub(crate) fn prompts(&self, name: &str) -> String {
        let path = self.path(name);
        let rows: Vec<String> = (0..4)
            .map(|row| {
                let input_ids: Vec<i64> = (0..5).map(|t| (row * 11 + t) % 60).collect();
                serde_json::json!({"input_ids": input_ids, "loss_mask": vec![0; 5]}).to_string()
                    + "\n"
            })
            .collect();
        std::fs::write(&path, rows.concat()).unwrap();
        path.to_string_lossy().into_owned()
    }

    /// Replaces a sample's stored states by the largest finite numbers, whose norms overflow.
    pub(crate) fn spoil(&self, sample: u64) {
        let input_ids = input_ids(sample);
        let huge = vec![f32::MAX; input_ids.len() * HIDDEN as usize];
        let layer = bytes_of(&Tensor::from_slice(&huge));
        let layers = LAYER_IDS.iter().map(|_| layer.clone()).collect();
        let states = HiddenStates::new(
            LAYER_IDS.to_vec(),
            input_ids.len(),
            HIDDEN as usize,
            Dtype::F32,
            layers,
        );
        let files = OfflineFiles::new(self.path("states"));
        files.write(sample, &input_ids, &states.unwrap()).unwrap();
    }

    /// The file of a sample's stored states.
    pub(crate) fn stored(&self, sample: u64) -> PathBuf {
        self.path("states").join(format!("hs_{sample}.safetensors"))
    }

    pub(crate) fn lines(&self, save: &str, file: &str) -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(self.path(save).join(file)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// A checkpoint's trainer state and served weights, as bytes.
    pub(crate) fn state(&self, save: &str, checkpoint: &str) -> [Vec<u8>; 2] {
        let dir = self.path(save).join(checkpoint);
        ["trainer/state.safetensors", "model.safetensors"]
            .map(|name| std::fs::read(dir.join(name)).unwrap())
    }
}

/// (step, loss) of every metric line; 0 without a supervised slot.
pub(crate) fn losses(save_path: &Path) -> Vec<(u64, f64)> {
    std::fs::read_to_string(save_path.join("metrics.jsonl"))
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .map(|line| (line["step"].as_u64().unwrap(), line["loss"].as_f64().unwrap_or(0.0)))
        .collect()
}

pub(crate) fn sorted_checkpoints(save_path: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(save_path)
        .map(|entries| entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect())
        .unwrap_or_default();
    names.retain(|name| name.starts_with("step-"));
    names.sort();
    names
}

/// The real torchrun, if installed.
pub(crate) fn torchrun() -> Option<PathBuf> {
    if let Some(given) = std::env::var_os("DFLASH_TORCHRUN") {
        return Some(given.into());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join("torchrun")).find(|file| file.is_file())
}

/// The library path of this process: torchrun must not pass its own torch to the ranks.
fn libtorch() -> std::ffi::OsString {
    std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default()
}

fn write_target_of(dir: &Path, config: TargetConfig, seed: i64) -> Target {
    let target = Target::random(config, seed, Device::Cpu);
    std::fs::create_dir(dir).unwrap();
    target.save(dir, Kind::Float).unwrap();
    std::fs::write(dir.join("tokenizer.json"), tokenizer_json()).unwrap();
    let config = r#"{"pad_token": "<pad>", "eos_token": "<eos>", "mask_token": "<|mask|>"}"#;
    std::fs::write(dir.join("tokenizer_config.json"), config).unwrap();
    target
}

fn tokenizer_json() -> String {
    let mut vocabulary = serde_json::Map::new();
    for id in 0..VOCABULARY {
        let special = SPECIAL.iter().find(|(_, special)| *special == id);
        vocabulary.insert(special.map_or(format!("w{id}"), |(name, _)| (*name).into()), id.into());
    }
    let added: Vec<serde_json::Value> = SPECIAL
        .iter()
        .map(|(content, id)| {
            serde_json::json!({
                "id": id, "content": content, "special": true, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false,
            })
        })
        .collect();
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    })
    .to_string()
}

/// Counting sequences, which a draft can learn.
fn write_dataset(dir: &Path, mask: fn(u64, u64) -> bool) -> Vec<Sample> {
    let samples: Vec<Sample> = (0..SAMPLES)
        .map(|index| {
            let input_ids = input_ids(index);
            let loss_mask = (0..input_ids.len() as u64).map(|t| mask(index, t)).collect();
            Sample { input_ids, loss_mask }
        })
        .collect();
    let mut writer = DatasetWriter::create(dir, WriterOptions::default()).unwrap();
    for sample in &samples {
        writer.push(sample).unwrap();
    }
    writer.finish().unwrap();
    samples
}

fn input_ids(sample: u64) -> Vec<i64> {
    (0..12 + sample % 9).map(|t| ((sample * 7 + t) % 60) as i64).collect()
}

fn store_states(target: &Target, samples: &[Sample], files: OfflineFiles) {
    for (index, sample) in samples.iter().enumerate() {
        let ids = Tensor::from_slice(&sample.input_ids);
        let tokens = sample.input_ids.len();
        let aux_states =
            tch::no_grad(|| target.forward_packed(&ids, &[0, tokens as i64], &LAYER_IDS));
        let hidden = aux_states[0].size()[1] as usize;
        let layers = aux_states.iter().map(bytes_of).collect();
        let states = HiddenStates::new(LAYER_IDS.to_vec(), tokens, hidden, Dtype::F32, layers);
        files.write(index as u64, &sample.input_ids, &states.unwrap()).unwrap();
    }
}

fn bytes_of(tensor: &Tensor) -> bytes::Bytes {
    let values = Vec::<f32>::try_from(tensor.reshape([-1])).unwrap();
    values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>().into()
}
