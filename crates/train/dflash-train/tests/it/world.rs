//! A target, a dataset and stored hidden states that are small enough to train on.
//!
//! The crate's own tests take this file too.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use dflash_data::{DatasetWriter, Sample, WriterOptions};
use dflash_dist::WorkerEnv;
use dflash_draft::HeadFields;
use dflash_hidden_states::{Dtype, HiddenStates, OfflineFiles};
use dflash_run::{Line, MetricLine, RunDir};
use dflash_settings::{ResumeMode, TrainSettings};
use dflash_target::{Target, TargetConfig};
use dflash_test_support::alone;
use dflash_train::config::{DraftShape, TrainConfig};
use dflash_train::{AcceptanceProbe, Error, Outcome, Prepared};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

/// Two short epochs.
const SETTINGS: &str = r#"{
    "speculator_type": "dflash", "log_every": 1, "no_progress": true,
    "log_to": ["tensorboard"], "no_epoch_checkpoints": false, "sigterm_is_success": false,
    "device": "cpu", "compute_dtype": "auto", "recompute": false, "zero": 0,
    "matmul_precision": "float32", "nnodes": 1, "backend": "auto", "max_restarts": 0,
    "join_timeout": 1, "collective_timeout": 1, "anchors_per_sequence": 8, "max_anchors": 3072,
    "gradient_accumulation_steps": 1, "epochs": 2, "seed": 0, "loss": ["ce"],
    "teacher_labels": false, "gamma": 4.0, "loss_chunk_mib": 1, "lr": 0.01,
    "scheduler_type": "cosine", "warmup": 0.04, "min_lr_ratio": 0.0, "decay_ratio": 0.2,
    "optimizer": "adamw", "weight_decay": 0.0, "norm_weight_decay": 0.0, "max_grad_norm": 1.0,
    "max_bad_steps": 10, "vllm_endpoint": [], "on_missing": "raise", "on_generate": "delete",
    "wait_for_server": 0, "server_timeout": 60, "window_mib": 1, "max_in_flight": 4, "validation_ratio": 0.0, "eval_limit": 32,
    "eval_max_new_tokens": 128
}"#;

/// `config` with changed settings.
pub(crate) fn with(
    mut config: TrainConfig,
    change: impl FnOnce(&mut TrainSettings),
) -> TrainConfig {
    change(&mut config.settings);
    config
}

pub(crate) fn resumed(config: &TrainConfig) -> TrainConfig {
    with(config.clone(), |settings| settings.resume = Some(ResumeMode::Latest))
}

/// Checkpoint of a run that trained something.
pub(crate) trait Saved {
    fn saved(&self) -> PathBuf;
}

impl Saved for Outcome {
    fn saved(&self) -> PathBuf {
        self.checkpoint.clone().expect("the run saved a checkpoint")
    }
}

/// The error message of a failed run, with its cause.
pub(crate) fn refused(result: Result<Outcome, Error>) -> String {
    let error = result.expect_err("the run fails");
    let source = std::error::Error::source(&error).map(|source| format!(": {source}"));
    format!("{error}{}", source.unwrap_or_default())
}

/// A temporary directory with a target and a dataset; deleted when dropped.
pub(crate) struct World {
    dir: tempfile::TempDir,
    /// The hidden states of every sample.
    pub(crate) files: OfflineFiles,
}

impl World {
    pub(crate) const SAMPLES: u64 = 24;
    pub(crate) const TOTAL_SEQ_LEN: usize = 64;
    pub(crate) const LAYER_IDS: [u32; 2] = [1, 2];
    pub(crate) const HIDDEN: i64 = 32;
    pub(crate) const VOCABULARY: i64 = 64;

    pub(crate) fn new() -> Self {
        Self::with_mask(|_, t| t >= 3)
    }

    /// A world in which `mask` (sample, token) decides whether a token is supervised.
    pub(crate) fn with_mask(mask: fn(u64, u64) -> bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = TargetConfig::qwen3(Self::HIDDEN, 2, Self::VOCABULARY);
        let target = {
            let _alone = alone();
            Target::random(config, 1, Device::Cpu)
        };
        std::fs::create_dir(dir.path().join("target")).unwrap();
        target.save(&dir.path().join("target"), Kind::Float).unwrap();
        let options = WriterOptions::default();
        let mut writer = DatasetWriter::create(&dir.path().join("data"), options).unwrap();
        let files = OfflineFiles::new(dir.path().join("states"));
        for sample in 0..Self::SAMPLES {
            let input_ids = Self::input_ids(sample);
            let loss_mask = (0..input_ids.len() as u64).map(|t| mask(sample, t)).collect();
            files.write(sample, &input_ids, &Self::aux_states(&target, &input_ids)).unwrap();
            writer.push(&Sample { input_ids, loss_mask }).unwrap();
        }
        writer.finish().unwrap();
        Self { dir, files }
    }

    /// Counting sequences, which a draft can learn.
    pub(crate) fn input_ids(sample: u64) -> Vec<i64> {
        (0..12 + sample % 9).map(|t| ((sample * 7 + t) % 60) as i64).collect()
    }

    pub(crate) fn aux_states(target: &Target, input_ids: &[i64]) -> HiddenStates {
        let (ids, tokens) = (Tensor::from_slice(input_ids), input_ids.len());
        let aux_states =
            tch::no_grad(|| target.forward_packed(&ids, &[0, tokens as i64], &Self::LAYER_IDS));
        Self::record(tokens, aux_states.iter().map(bytes_of).collect())
    }

    pub(crate) fn record(tokens: usize, layers: Vec<Bytes>) -> HiddenStates {
        let (ids, hidden) = (Self::LAYER_IDS.to_vec(), Self::HIDDEN as usize);
        HiddenStates::new(ids, tokens, hidden, Dtype::F32, layers).unwrap()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Settings for two short epochs, saved in the folder `save`.
    pub(crate) fn config(&self, save: &str) -> TrainConfig {
        let path = |name: &str| self.path(name).to_str().unwrap().to_owned();
        let mut settings: Value = serde_json::from_str(SETTINGS).unwrap();
        settings["target"] = path("target").into();
        settings["data_path"] = path("data").into();
        settings["save_path"] = path(save).into();
        settings["hidden_states_path"] = path("states").into();
        settings["total_seq_len"] = Self::TOTAL_SEQ_LEN.into();
        TrainConfig {
            settings: serde_json::from_value(settings).unwrap(),
            target_dir: self.path("target"),
            draft: DraftShape {
                num_layers: 2,
                block_size: 4,
                target_layer_ids: Self::LAYER_IDS.to_vec(),
                mask_token_id: 63,
                sliding_window: None,
                vocab_size: None,
                head: HeadFields::default(),
                stored: None,
            },
            described_target: None,
            pretrained_dir: None,
            command: Vec::new(),
            job: None,
            stop: Arc::default(),
            save: Arc::default(),
            progress: false,
        }
    }

    /// Trains with one rank on the stored states.
    pub(crate) fn train(&self, config: &TrainConfig) -> Result<Outcome, Error> {
        self.train_measured(config, None)
    }

    pub(crate) fn train_measured(
        &self,
        config: &TrainConfig,
        probe: Option<AcceptanceProbe<'_>>,
    ) -> Result<Outcome, Error> {
        let _alone = alone();
        Prepared::open(config)?.run(&WorkerEnv::alone(), probe)
    }

    /// The JSON lines of a file of a run.
    pub(crate) fn lines(&self, save: &str, file: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path(save).join(file)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// (step, loss) of every metric line; 0 without a supervised slot.
    pub(crate) fn losses(&self, save: &str) -> Vec<(u64, f64)> {
        let lines = self.lines(save, MetricLine::FILE);
        let pair = |line: &Value| {
            (line["step"].as_u64().unwrap(), line["loss"].as_f64().unwrap_or_default())
        };
        lines.iter().map(pair).collect()
    }

    /// The steps of a run's checkpoints.
    pub(crate) fn saved(&self, save: &str) -> Vec<u64> {
        let checkpoints = RunDir::at(self.path(save)).checkpoints().unwrap();
        checkpoints.into_iter().map(|checkpoint| checkpoint.step).collect()
    }

    /// A checkpoint's trainer state and served weights, as bytes.
    pub(crate) fn state(checkpoint: &Path) -> [Vec<u8>; 2] {
        ["trainer/state.safetensors", "model.safetensors"]
            .map(|name| std::fs::read(checkpoint.join(name)).unwrap())
    }
}

pub(crate) fn bytes_of(tensor: &Tensor) -> Bytes {
    let values = Vec::<f32>::try_from(tensor.reshape([-1])).unwrap();
    values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>().into()
}
