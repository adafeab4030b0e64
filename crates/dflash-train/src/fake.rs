//! What tests put in the place of the other ranks and of the stream, and a world that is small
//! enough to train in.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use dflash_data::{Dataset, DatasetWriter, Sample, WriterOptions};
use dflash_dist::{Communicator, Pending, Single};
use dflash_hidden::{Counters, Dtype, HiddenStates, OfflineFiles};
use dflash_model::place;
use dflash_model::target::{Target, TargetConfig};
use dflash_run::RunDir;
use dflash_test_support::alone;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::config::{DraftShape, TrainConfig};
use crate::order::PlannedRow;
use crate::rows::{LoadedRow, RowSource, Rows, Samples, TargetSamples, pack};
use crate::validation::AcceptanceProbe;
use crate::{Error, Outcome, Prepared};

/// Two short epochs.
const SETTINGS: &str = r#"{
    "resume": false, "speculator_type": "dflash", "log_every": 1, "no_progress": true,
    "device": "cpu", "compute_dtype": "auto", "recompute": false, "zero": 0,
    "matmul_precision": "float32", "nnodes": 1, "backend": "auto", "max_restarts": 0,
    "join_timeout": 1, "collective_timeout": 1, "anchors_per_sequence": 8, "max_anchors": 3072,
    "gradient_accumulation_steps": 1, "epochs": 2, "seed": 0, "loss": ["ce"],
    "teacher_labels": false, "gamma": 4.0, "loss_chunk_mib": 1, "lr": 0.01,
    "scheduler_type": "cosine", "warmup_ratio": 0.04, "min_lr_ratio": 0.0, "decay_ratio": 0.2,
    "optimizer": "adamw", "weight_decay": 0.0, "norm_weight_decay": 0.0, "max_grad_norm": 1.0,
    "max_bad_steps": 10, "vllm_endpoint": [], "on_missing": "raise", "on_generate": "delete",
    "window_mib": 1, "max_in_flight": 4, "validation_ratio": 0.0, "eval_limit": 32,
    "eval_max_new_tokens": 128
}"#;

/// Rank 0 beside others that a test speaks for; notes what is announced to the launcher.
#[derive(Debug, Default)]
pub(crate) struct Beside {
    /// Ranks that do the same as this one.
    pub(crate) alike: usize,
    /// The sum from which on another rank votes that it failed, counted from 1.
    pub(crate) fails_at: Option<u64>,
    /// What is broadcast, whatever this rank's own number is.
    pub(crate) broadcasts: Option<f64>,
    pub(crate) sums: AtomicU64,
    pub(crate) worked: AtomicU64,
    pub(crate) permanent: AtomicU64,
}

impl Communicator for Beside {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1 + self.alike
    }

    fn all_reduce_sum(&self, tensor: &mut Tensor) -> Result<(), dflash_dist::Error> {
        let _ = tensor.g_mul_scalar_(self.world_size() as f64);
        let sum = self.sums.fetch_add(1, Relaxed) + 1;
        if self.fails_at.is_some_and(|from| sum >= from) {
            // votes come last, the strongest at the end
            let _ = tensor.narrow(0, tensor.size()[0] - 1, 1).fill_(1.0);
        }
        Ok(())
    }

    fn start_all_reduce_sum(
        &self,
        tensor: &Tensor,
    ) -> Result<Box<dyn Pending>, dflash_dist::Error> {
        let _ = tensor.shallow_clone().g_mul_scalar_(self.world_size() as f64);
        Single.start_all_reduce_sum(tensor)
    }

    fn broadcast(&self, tensor: &mut Tensor, root: usize) -> Result<(), dflash_dist::Error> {
        assert_eq!(root, 0);
        if let Some(value) = self.broadcasts {
            let _ = tensor.fill_(value);
        }
        Ok(())
    }

    fn all_gather(&self, output: &mut Tensor, input: &Tensor) -> Result<(), dflash_dist::Error> {
        Single.all_gather(output, input)
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, dflash_dist::Error> {
        Ok(vec![bytes.to_vec(); self.world_size()])
    }

    fn barrier(&self) -> Result<(), dflash_dist::Error> {
        Ok(())
    }

    fn announce_work(&self) {
        self.worked.fetch_add(1, Relaxed);
    }

    fn announce_permanent_failure(&self) {
        self.permanent.fetch_add(1, Relaxed);
    }
}

/// Rows whose hidden states are in memory.
pub(crate) struct MemoryRows {
    pub(crate) samples: Arc<dyn Samples>,
    /// Of every sample.
    pub(crate) states: Arc<Vec<HiddenStates>>,
    /// Samples that are left out.
    pub(crate) left_out: HashSet<u32>,
    /// A sample whose states cannot be had.
    pub(crate) missing: Option<u32>,
    /// The run is told to stop when it waits for the row after so many.
    pub(crate) interrupted_after: Option<usize>,
    /// What a stream would have counted for each row.
    pub(crate) counted: Counters,
}

struct MemoryStream {
    source: MemoryRows,
    planned: std::vec::IntoIter<PlannedRow>,
    done: u64,
}

impl MemoryRows {
    fn again(&self) -> Self {
        Self {
            samples: Arc::clone(&self.samples),
            states: Arc::clone(&self.states),
            left_out: self.left_out.clone(),
            ..*self
        }
    }

    fn states(&self, sample: u32) -> Result<Option<HiddenStates>, Error> {
        if self.missing == Some(sample) {
            let (dir, reason) = ("memory".into(), "a test".into());
            return Err(dflash_hidden::Error::Missing { sample: sample.into(), dir, reason }.into());
        }
        let found = (!self.left_out.contains(&sample)).then(|| &self.states[sample as usize]);
        Ok(found.cloned())
    }
}

impl RowSource for MemoryRows {
    fn start(&self, planned: Vec<PlannedRow>) -> Result<Box<dyn Rows>, Error> {
        let planned = planned.into_iter();
        Ok(Box::new(MemoryStream { source: self.again(), planned, done: 0 }))
    }
}

impl Rows for MemoryStream {
    fn next(&mut self) -> Result<Option<LoadedRow>, Error> {
        if self.source.interrupted_after == Some(self.done as usize) {
            return Err(dflash_hidden::Error::Interrupted.into());
        }
        let Some(PlannedRow { epoch, samples }) = self.planned.next() else { return Ok(None) };
        self.done += 1;
        let row = pack(&*self.source.samples, &samples, World::TOTAL_SEQ_LEN)?;
        let states = samples.iter().map(|&sample| self.source.states(sample));
        Ok(Some(LoadedRow::new(epoch, row, states.collect::<Result<_, Error>>()?)))
    }

    fn counters(&self) -> Counters {
        let Counters { retries, busy, stale, rejected, invalid, .. } = self.source.counted;
        // as a stream that fetches a row ahead
        let rows = self.done + 1;
        Counters {
            retries: retries * rows,
            busy: busy * rows,
            stale: stale * rows,
            rejected: rejected * rows,
            invalid: invalid * rows,
            ..Counters::default()
        }
    }
}

/// A temporary directory with a target and a dataset; gone when dropped.
pub(crate) struct World {
    dir: tempfile::TempDir,
    states: Arc<Vec<HiddenStates>>,
}

impl World {
    pub(crate) const SAMPLES: u64 = 24;
    pub(crate) const TOTAL_SEQ_LEN: usize = 64;
    pub(crate) const LAYER_IDS: [u32; 2] = [1, 2];
    const HIDDEN: i64 = 32;
    const VOCABULARY: i64 = 64;

    pub(crate) fn new() -> Self {
        Self::with_mask(|_, t| t >= 3)
    }

    /// A world in which `mask` says of a sample's token whether it is supervised.
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
        let mut states = Vec::new();
        for sample in 0..Self::SAMPLES {
            let input_ids = Self::input_ids(sample);
            let loss_mask = (0..input_ids.len() as u64).map(|t| mask(sample, t)).collect();
            states.push(Self::captures(&target, &input_ids));
            writer.push(&Sample { input_ids, loss_mask }).unwrap();
        }
        writer.finish().unwrap();
        Self { dir, states: Arc::new(states) }
    }

    /// Counting sequences: something that a draft can learn.
    pub(crate) fn input_ids(sample: u64) -> Vec<i64> {
        (0..12 + sample % 9).map(|t| ((sample * 7 + t) % 60) as i64).collect()
    }

    fn captures(target: &Target, input_ids: &[i64]) -> HiddenStates {
        let (ids, tokens) = (Tensor::from_slice(input_ids), input_ids.len());
        let captures =
            tch::no_grad(|| target.forward_packed(&ids, &[0, tokens as i64], &Self::LAYER_IDS));
        Self::record(tokens, captures.iter().map(bytes_of).collect())
    }

    fn record(tokens: usize, layers: Vec<Bytes>) -> HiddenStates {
        let (ids, hidden) = (Self::LAYER_IDS.to_vec(), Self::HIDDEN as usize);
        HiddenStates::new(ids, tokens, hidden, Dtype::F32, layers).unwrap()
    }

    /// Replaces a sample's states by the largest numbers there are, whose norms overflow.
    pub(crate) fn spoil(&mut self, sample: u64) {
        let tokens = Self::input_ids(sample).len();
        let layer = bytes_of(&Tensor::from_slice(&vec![f32::MAX; tokens * Self::HIDDEN as usize]));
        let spoilt = Self::record(tokens, vec![layer; Self::LAYER_IDS.len()]);
        Arc::make_mut(&mut self.states)[sample as usize] = spoilt;
    }

    /// Stores the states as a server's client would.
    pub(crate) fn store_states(&self) -> PathBuf {
        let files = OfflineFiles::new(self.path("states"));
        for (sample, states) in (0..).zip(self.states.iter()) {
            files.write(sample, &Self::input_ids(sample), states).unwrap();
        }
        self.path("states")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn samples(&self) -> TargetSamples {
        let dataset = Arc::new(Dataset::open(&self.path("data")).unwrap());
        TargetSamples { dataset, embedding_rows: Self::VOCABULARY }
    }

    pub(crate) fn rows(&self) -> MemoryRows {
        MemoryRows {
            samples: Arc::new(self.samples()),
            states: Arc::clone(&self.states),
            left_out: HashSet::new(),
            missing: None,
            interrupted_after: None,
            counted: Counters::default(),
        }
    }

    /// Two short epochs into the folder `save`.
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
            },
            pretrained_dir: None,
            command: Vec::new(),
            stop: Arc::default(),
            progress: false,
        }
    }

    /// Trains alone on rows in memory.
    pub(crate) fn train(&self, config: &TrainConfig) -> Result<Outcome, Error> {
        self.train_on(config, &self.rows(), &Single, None)
    }

    pub(crate) fn train_on(
        &self,
        config: &TrainConfig,
        source: &dyn RowSource,
        communicator: &dyn Communicator,
        probe: Option<AcceptanceProbe<'_>>,
    ) -> Result<Outcome, Error> {
        let _alone = alone();
        let prepared = Prepared::open(config)?;
        let kind = place(config.settings.compute.device, config.settings.compute.compute_dtype, 0)?;
        prepared.train((communicator, kind), source, probe)
    }

    /// The JSON lines of a file of a run.
    pub(crate) fn lines(&self, save: &str, file: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path(save).join(file)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// (step, loss) of every metric line; 0 where there was nothing to learn.
    pub(crate) fn losses(&self, save: &str) -> Vec<(u64, f64)> {
        let lines = self.lines(save, <dflash_run::MetricLine as dflash_run::Line>::FILE);
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

    /// Bytes of a checkpoint's trainer state and of its served weights.
    pub(crate) fn state(checkpoint: &Path) -> [Vec<u8>; 2] {
        ["trainer/state.safetensors", "model.safetensors"]
            .map(|name| std::fs::read(checkpoint.join(name)).unwrap())
    }
}

fn bytes_of(tensor: &Tensor) -> Bytes {
    let values = Vec::<f32>::try_from(tensor.reshape([-1])).unwrap();
    values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>().into()
}
