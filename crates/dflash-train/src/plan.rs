//! What a run will take, before anything runs: memory, arithmetic, time, hidden states.
//!
//! Rows are packed and anchors drawn as the run itself will do, from the dataset or from
//! documents of one length; a sample of rows gives means. Memory follows the tensors that the
//! trainer keeps; docs/plan.md compares it with measurements.

mod memory;
mod rows;
mod show;

use std::path::Path;

use dflash_model::draft::{DraftConfig, DraftLayout};
use dflash_model::target::TargetConfig;
use dflash_settings::{Device, PlanSettings};
use serde::Serialize;

pub use memory::Memory;
pub use rows::RowShape;

use crate::config::DraftShape;
use crate::{Error, machine, setup};

/// Useful TFLOP/s of one CPU core in float32: `dflash bench train-step` of docs/plan.md's first shape
/// took 684 ms on two quiet cores of a server processor (LOG.md). Others differ, so there is --tflops.
const CPU_CORE_TFLOPS: f64 = 0.05;

/// The run to be planned: its settings, and what they come to.
struct Planned<'a> {
    settings: &'a PlanSettings,
    /// Size of a pruned vocabulary.
    vocab_size: Option<usize>,
    /// Whether a GPU computes; else a CPU.
    gpu: bool,
    /// If known.
    gpu_name: Option<String>,
    /// CPU cores of a rank.
    cores: usize,
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
    /// Documents with tokens.
    pub documents: usize,
    /// Tokens of an epoch, after cutting.
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
    /// Useful TFLOP/s of a rank that times are for.
    pub tflops: Option<f64>,
    /// Where that figure comes from.
    pub tflops_source: String,
    /// Seconds of a step that waits for no data.
    pub step_seconds: Option<f64>,
    /// Seconds of the run.
    pub run_seconds: Option<f64>,
    /// Bytes of hidden states of a step, all ranks.
    pub hidden_bytes_per_step: f64,
    /// Bytes per second that the servers must deliver to keep that pace.
    pub hidden_bytes_per_second: Option<f64>,
}

/// Plans the run of a draft of this `shape` for the target in `target_dir`, of which only config.json
/// is read; the mask token does not matter.
///
/// # Errors
/// An unreadable target or dataset, or a shape that does not fit.
pub fn plan(settings: &PlanSettings, target_dir: &Path, shape: &DraftShape) -> Result<Plan, Error> {
    let target = TargetConfig::load(target_dir)?;
    let draft = setup::draft_config(&target, shape)?;
    let here = machine::gpu_name();
    let gpu = match settings.compute.device {
        Device::Cpu => false,
        Device::Cuda(_) => true,
        Device::Auto => settings.gpu.is_some() || here.is_some(),
    };
    let gpu_name = settings.gpu.clone().or(here);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let cores = (cores / settings.nproc).max(1);
    let vocab_size = shape.vocab_size;
    Planned { settings, vocab_size, gpu, gpu_name, cores }.plan(&target, &draft)
}

impl Planned<'_> {
    fn plan(&self, target: &TargetConfig, draft: &DraftConfig) -> Result<Plan, Error> {
        let (ranks, rows) = (self.settings.ranks(), &self.settings.rows);
        let epoch = rows::Epoch::of(self, draft, target.vocab_size)?;
        let memory = memory::memory(self, (target, draft), &epoch.largest);
        let per_step = (ranks * rows.gradient_accumulation_steps) as f64;
        let steps_per_epoch = epoch.rows.div_ceil(per_step as u64);
        let whole = rows.whole_epochs().map_or(u64::MAX, |epochs| steps_per_epoch * epochs);
        let steps = rows.max_steps.map_or(whole, |bound| bound.min(whole));
        let flops_per_step = epoch.mean.flops * per_step;
        let (tflops, tflops_source) = self.speed();
        let step_seconds = tflops.map(|tflops| flops_per_step / (ranks as f64 * tflops * 1e12));
        let hidden_bytes_per_step = epoch.mean.tokens * per_step * self.token_bytes(draft);
        Ok(Plan {
            parameters: DraftLayout::new(draft).trained(),
            shape: [draft.layers.len(), draft.block_size, draft.target_layer_ids.len()],
            ranks,
            row: epoch.mean,
            total_bytes: memory.total(self.gpu),
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

    /// Bytes of a token's hidden states on the wire, bfloat16; the teacher's layer travels too.
    fn token_bytes(&self, draft: &DraftConfig) -> f64 {
        let last = draft.num_target_layers.map(|layers| layers as u32);
        let travels = last.is_some_and(|last| draft.target_layer_ids.contains(&last));
        let extra = self.settings.objective.needs_teacher() && !travels;
        ((draft.captures() + i64::from(extra)) * draft.hidden_size * 2) as f64
    }

    fn device(&self) -> String {
        match (&self.gpu_name, self.gpu) {
            (Some(name), true) => name.clone(),
            (None, true) => "GPU of unknown name".into(),
            (_, false) => format!("CPU, {} cores a rank", self.cores),
        }
    }

    /// Useful TFLOP/s of a rank and where the figure comes from.
    fn speed(&self) -> (Option<f64>, String) {
        if let Some(tflops) = self.settings.tflops {
            return (Some(tflops), "as given".into());
        }
        if !self.gpu {
            let tflops = CPU_CORE_TFLOPS * self.cores as f64;
            return (Some(tflops), format!("{CPU_CORE_TFLOPS} a core, see docs/plan.md"));
        }
        let mut source = "not measured on this GPU; pass --tflops".to_owned();
        if let Some(peak) = self.gpu_name.as_deref().and_then(machine::peak_tflops) {
            source += &format!(" (its peak is {peak} in bfloat16)");
        }
        (None, source)
    }
}
