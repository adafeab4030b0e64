//! What a run will take, before anything runs: memory, arithmetic, time, hidden states.
//!
//! Rows are packed and anchors drawn as the run itself will do it, from the dataset or from
//! documents of one length; a sample of rows gives means. Memory follows the tensors that the
//! trainer keeps; docs/plan.md compares it with measurements.

mod memory;
mod rows;
mod show;

use std::path::PathBuf;

use dflash_model::draft::{DraftConfig, DraftLayout};
use dflash_model::target::TargetConfig;
use serde::Serialize;

pub use memory::Memory;
pub use rows::RowShape;

use crate::config::DraftSettings;
use crate::{Error, machine, setup};

/// Useful TFLOP/s of one CPU core in float32: `dflash bench train-step` of docs/plan.md's first shape
/// took 684 ms on two quiet cores of a server processor (LOG.md). It depends on the processor;
/// --tflops says better.
const CPU_CORE_TFLOPS: f64 = 0.05;

/// The run to be planned.
#[derive(Clone, Debug)]
pub struct PlanConfig {
    /// Directory of the target; only its config.json is read.
    pub target: PathBuf,
    /// Shape of the draft; its mask token plays no part.
    pub draft: DraftSettings,
    /// What is trained on.
    pub data: PlanData,
    /// Share of the documents that validation holds out.
    pub validation_ratio: f64,
    /// What computes.
    pub machine: PlanMachine,
    /// Ranks.
    pub ranks: usize,
    /// Packed rows per rank and optimizer step.
    pub accumulation: usize,
    /// Epochs; 0 for as many as `max_steps` needs.
    pub epochs: u64,
    /// Upper bound on optimizer steps.
    pub max_steps: Option<u64>,
    /// Tokens of a packed row.
    pub total_seq_len: usize,
    /// Anchors per document.
    pub anchors_per_sequence: usize,
    /// Anchors per packed row.
    pub max_anchors: usize,
    /// Seed of order and anchors.
    pub seed: u64,
    /// Bytes of one chunk of logits.
    pub chunk_bytes: usize,
    /// Bytes of hidden states in flight and waiting, per rank.
    pub window_bytes: usize,
    /// Whether the objective needs the target's distribution.
    pub teacher: bool,
    /// What is kept beside the data.
    pub state: PlanState,
}

/// Choices that decide how much is kept of parameters and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanState {
    /// Float32 numbers that the optimizer keeps for a parameter: AdamW's two, Muon's one.
    pub moments: usize,
    /// Whether an averaged copy of the weights is kept.
    pub averaged: bool,
    /// Whether the ranks split masters, moments and average among themselves.
    pub split: bool,
    /// Whether layers keep only their inputs.
    pub recompute: bool,
    /// Whether forward and backward are in bfloat16, else in float32.
    pub bf16: bool,
}

/// What is trained on.
#[derive(Clone, Debug)]
pub enum PlanData {
    /// A prepared dataset.
    Dataset(PathBuf),
    /// So many documents of so many tokens, all supervised.
    Documents {
        /// Documents.
        count: usize,
        /// Tokens of each.
        length: usize,
    },
}

/// What computes.
#[derive(Clone, Debug)]
pub struct PlanMachine {
    /// Whether in bfloat16 on GPUs; else in float32 on a CPU.
    pub gpu: bool,
    /// Name of the GPU, if known.
    pub name: Option<String>,
    /// CPU cores of a rank.
    pub cores: usize,
    /// Useful TFLOP/s of a rank, if the user knows.
    pub tflops: Option<f64>,
}

/// What the run takes. Bytes are per rank.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// Trained parameters.
    pub parameters: i64,
    /// Layers, slots of a block and captured layers of the draft.
    pub shape: [usize; 3],
    /// Ranks.
    pub ranks: usize,
    /// Means over the sampled rows.
    pub row: RowShape,
    /// Bytes, part by part.
    pub memory: Memory,
    /// Sum of the parts, bytes.
    pub total_bytes: f64,
    /// Documents with tokens, and their tokens after cutting.
    pub documents: usize,
    /// Tokens of an epoch.
    pub tokens_per_epoch: u64,
    /// Packed rows of an epoch.
    pub rows_per_epoch: u64,
    /// Optimizer steps of an epoch.
    pub steps_per_epoch: u64,
    /// Optimizer steps of the run.
    pub steps: u64,
    /// Useful arithmetic of a step, all ranks.
    pub flops_per_step: f64,
    /// What computes.
    pub device: String,
    /// Useful TFLOP/s of a rank that times are for, and where the figure comes from.
    pub tflops: Option<f64>,
    /// Its source.
    pub tflops_source: String,
    /// Seconds of a step, data at hand.
    pub step_seconds: Option<f64>,
    /// Seconds of the run.
    pub run_seconds: Option<f64>,
    /// Bytes of hidden states of a step, all ranks.
    pub hidden_bytes_per_step: f64,
    /// Bytes per second that the servers must deliver to keep that pace.
    pub hidden_bytes_per_second: Option<f64>,
}

impl PlanConfig {
    /// Plans the run.
    ///
    /// # Errors
    /// An unreadable target or dataset, or a shape that does not fit.
    pub fn plan(&self) -> Result<Plan, Error> {
        let target = TargetConfig::load(&self.target)?;
        let draft = setup::draft_config(&target, &self.draft)?;
        self.check()?;
        let epoch = rows::Epoch::of(self, &draft, target.vocab_size)?;
        let memory = memory::memory(self, (&target, &draft), &epoch.largest);
        let per_step = (self.ranks * self.accumulation) as f64;
        let steps_per_epoch = epoch.rows.div_ceil(per_step as u64);
        let whole = steps_per_epoch * self.epochs;
        let steps = match (self.max_steps, self.epochs) {
            (Some(bound), 0) => bound,
            (bound, _) => bound.map_or(whole, |bound| bound.min(whole)),
        };
        let flops_per_step = epoch.mean.flops * per_step;
        let (tflops, tflops_source) = self.speed();
        let step_seconds =
            tflops.map(|tflops| flops_per_step / (self.ranks as f64 * tflops * 1e12));
        let hidden_bytes_per_step = epoch.mean.tokens * per_step * self.token_bytes(&draft);
        Ok(Plan {
            parameters: DraftLayout::new(&draft).trained(),
            shape: [draft.layers.len(), draft.block_size, draft.target_layer_ids.len()],
            ranks: self.ranks,
            row: epoch.mean,
            total_bytes: memory.total(self.machine.gpu),
            memory,
            documents: epoch.documents,
            tokens_per_epoch: epoch.tokens,
            rows_per_epoch: epoch.rows,
            steps_per_epoch,
            steps,
            flops_per_step,
            device: self.device(),
            tflops,
            tflops_source,
            step_seconds,
            run_seconds: step_seconds.map(|seconds| seconds * steps as f64),
            hidden_bytes_per_step,
            hidden_bytes_per_second: step_seconds.map(|seconds| hidden_bytes_per_step / seconds),
        })
    }

    fn check(&self) -> Result<(), Error> {
        let at_least_one = [
            ("--nproc", self.ranks),
            ("--total-seq-len", self.total_seq_len),
            ("--anchors-per-sequence", self.anchors_per_sequence),
            ("--max-anchors", self.max_anchors),
            ("--gradient-accumulation-steps", self.accumulation),
        ];
        if let Some((flag, _)) = at_least_one.iter().find(|(_, value)| *value == 0) {
            return Err(Error::setting(flag, 0, "it must be at least 1"));
        }
        match self.machine.tflops {
            Some(tflops) if tflops.is_nan() || tflops <= 0.0 => {
                Err(Error::setting("--tflops", tflops, "a speed is a positive number"))
            }
            _ => Ok(()),
        }
    }

    /// Bytes of a token's hidden states on the wire, bfloat16; the teacher's layer travels too.
    fn token_bytes(&self, draft: &DraftConfig) -> f64 {
        let last = draft.num_target_layers.map(|layers| layers as u32);
        let travels = last.is_some_and(|last| draft.target_layer_ids.contains(&last));
        let extra = self.teacher && !travels;
        ((draft.captures() + i64::from(extra)) * draft.hidden_size * 2) as f64
    }

    fn device(&self) -> String {
        match (&self.machine.name, self.machine.gpu) {
            (Some(name), true) => name.clone(),
            (None, true) => "GPU of unknown name".into(),
            (_, false) => format!("CPU, {} cores a rank", self.machine.cores),
        }
    }

    /// Useful TFLOP/s of a rank and where the figure comes from.
    fn speed(&self) -> (Option<f64>, String) {
        if let Some(tflops) = self.machine.tflops {
            return (Some(tflops), "as given".into());
        }
        if !self.machine.gpu {
            let tflops = CPU_CORE_TFLOPS * self.machine.cores as f64;
            return (Some(tflops), format!("{CPU_CORE_TFLOPS} a core, see docs/plan.md"));
        }
        let peak = self.machine.name.as_deref().and_then(machine::peak_tflops);
        let source = match peak {
            Some(peak) => {
                format!("not measured on this GPU; pass --tflops (its peak is {peak} in bfloat16)")
            }
            None => "not measured on this GPU; pass --tflops".into(),
        };
        (None, source)
    }
}
