//! Predicts what a run takes before anything runs: memory, arithmetic, time, hidden states.
//!
//! Rows are packed and anchors drawn as in the run itself, from the dataset or from documents of
//! one length; means come from a sample of rows. Memory is computed from the tensors that the
//! trainer keeps; docs/plan.md compares it with measurements.

mod around;
mod budget;
pub(crate) mod cpu;
mod efficiency;
mod memory;
mod rows;
mod show;
pub(crate) mod step;
mod target;

use std::path::Path;

use dflash_draft::{DraftConfig, DraftLayout, Keep};
use dflash_settings::{CheckpointSettings, Invalid, PlanDevice, PlanSettings};
use dflash_target::parallel::Grid;
use dflash_target::{TargetConfig, TargetFacts};
use serde::Serialize;
use tch::Kind;

pub use around::{AllReduce, Servers, Stream};
pub use budget::{Budget, PartBudget, SlowStep};
pub use memory::Memory;
pub use rows::RowShape;

use crate::config::DraftShape;
use crate::gpus::Gpu;
use crate::optimizer::OptimizerConfig;
use crate::{Error, checkpoint, machine, setup};
use efficiency::{Efficiency, RatedGpu};
use step::StepShape;

/// Useful TFLOP/s of one CPU core in float32: `dflash bench train-step` with docs/plan.md's first
/// shape took 684 ms on two idle cores of a server processor (LOG.md). Others differ, hence
/// --tflops.
const CPU_CORE_TFLOPS: f64 = 0.05;

/// The run to plan: its settings and what follows from them.
struct Planned<'a> {
    settings: &'a PlanSettings,
    /// Size of a reduced vocabulary.
    vocab_size: Option<usize>,
    place: PlannedDevice,
    /// CPU cores per rank.
    cores: usize,
    /// The target's configuration, if this program runs it.
    native: Option<TargetConfig>,
    /// Efficiency of a known GPU's kernels.
    efficiency: Option<Efficiency>,
}

/// The device.
#[derive(Clone, Debug)]
enum PlannedDevice {
    Cpu,
    /// A GPU with known figures, by the name that the driver or the user gives it.
    Gpu(String, Gpu),
    /// Another GPU, with its name if known.
    UnknownGpu(Option<String>),
}

impl PlannedDevice {
    fn new(device: &PlanDevice) -> Result<Self, Invalid> {
        let here = || machine::gpu_name();
        let of = |name: String| match Gpu::named(&name) {
            Some(gpu) => Self::Gpu(name, gpu),
            None => Self::UnknownGpu(Some(name)),
        };
        Ok(match device {
            PlanDevice::Cpu => Self::Cpu,
            PlanDevice::Auto => here().map_or(Self::Cpu, of),
            PlanDevice::Cuda => here().map_or(Self::UnknownGpu(None), of),
            PlanDevice::Named(name) => match Gpu::named(name) {
                Some(gpu) => Self::Gpu(gpu.name.to_owned(), gpu),
                None => {
                    let guess = Gpu::nearest(name).map(|gpu| format!("; did you mean {gpu}?"));
                    let expected = format!(
                        "the known ones are auto, cpu, cuda, {}{}",
                        Gpu::names(),
                        guess.unwrap_or_default()
                    );
                    return Err(Invalid::new("device", name, expected));
                }
            },
        })
    }

    fn is_gpu(&self) -> bool {
        !matches!(self, Self::Cpu)
    }
}

/// A run's requirements. Bytes are per rank.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// Trained parameters.
    pub parameters: i64,
    /// Layers, block size and number of auxiliary layers of the draft.
    pub shape: [usize; 3],
    /// Number of ranks.
    pub ranks: usize,
    /// Means over the sampled rows.
    pub row: RowShape,
    /// Memory by part, bytes.
    pub memory: Memory,
    /// Sum of the parts on the rank's device, bytes.
    pub total_bytes: f64,
    /// Number of documents with tokens.
    pub documents: usize,
    /// Tokens per epoch, after cutting.
    pub tokens_per_epoch: u64,
    /// Packed rows per epoch.
    pub rows_per_epoch: u64,
    /// Optimizer steps per epoch.
    pub steps_per_epoch: u64,
    /// Optimizer steps of the run.
    pub steps: u64,
    /// Size of a checkpoint on disk, bytes.
    pub checkpoint_bytes: i64,
    /// Number of checkpoints that the run leaves by default: one per epoch, including the last.
    pub checkpoints: u64,
    /// Useful arithmetic per step, all ranks.
    pub flops_per_step: f64,
    /// With --colocate, the target's arithmetic per step, all ranks.
    pub target_flops_per_step: f64,
    /// The device.
    pub device: String,
    /// Useful TFLOP/s of a rank that the times are based on.
    pub tflops: Option<f64>,
    /// Source of that figure.
    pub tflops_source: String,
    /// Seconds of a step that never waits for data; with --colocate, including the target's pass.
    pub step_seconds: Option<f64>,
    /// The same if a known GPU's matmuls reach only the lower assumed share; see the budget.
    pub slow_step_seconds: Option<f64>,
    /// Seconds of the run.
    pub run_seconds: Option<f64>,
    /// Seconds of the run with such slow steps.
    pub slow_run_seconds: Option<f64>,
    /// Bytes of hidden states per step, all ranks; with --colocate they are not transferred.
    pub hidden_bytes_per_step: f64,
    /// Bytes per second that the servers must deliver at that pace.
    pub hidden_bytes_per_second: Option<f64>,
    /// GPUs of the same model needed to run the target; `None` with --colocate, for a target that
    /// does not run here, or if the GPU's figures are unknown.
    pub servers: Option<Servers>,
    /// Load of a rank's hidden states on machine and network, at the planned pace.
    pub stream: Option<Stream>,
    /// All-reduce of a step's gradients, on GPUs with known figures.
    pub all_reduce: Option<AllReduce>,
    /// Time budget of a rank's step in bfloat16 by part, on a GPU with known figures.
    pub budget: Option<Budget>,
    /// Weight bytes per process for each stage of the target's server. Empty with --colocate, and
    /// for a target that does not run here.
    pub server_bytes: Vec<f64>,
    /// Processes per stage, each with that many bytes.
    pub server_parts: usize,
    /// Features of the target that the draft omits, and why.
    pub notes: Vec<String>,
}

/// Features of the target that a draft of this shape omits, and why; none if it starts from
/// another.
pub fn draft_notes(target: &TargetFacts, shape: &DraftShape) -> Vec<String> {
    match shape.stored {
        Some(_) => Vec::new(),
        None => target.draft_defaults().notes.clone(),
    }
}

/// Plans training a draft of this `shape` for the target in `target_dir`, of which only config.json
/// is read; the mask token does not matter.
///
/// # Errors
/// An unreadable target or dataset, or a shape that does not fit.
pub fn plan(
    settings: &PlanSettings,
    target_dir: &Path,
    target: &TargetFacts,
    shape: &DraftShape,
) -> Result<Plan, Error> {
    let draft = setup::draft_config(target, shape)?;
    let colocate = settings.hidden_states.colocate;
    let native = match TargetConfig::load(target_dir) {
        // Another engine runs the target then.
        Err(_) if !colocate && settings.parallel.ranks() == 1 => None,
        native => Some(native?),
    };
    let place = PlannedDevice::new(&settings.device)?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let cores = (cores / settings.nproc).max(1);
    let vocab_size = shape.vocab_size;
    let notes = draft_notes(target, shape);
    let efficiency = efficiency(settings, &place)?;
    Planned { settings, vocab_size, place, cores, native, efficiency }.plan(target, &draft, notes)
}

/// Efficiency of the GPU's kernels: from a file of measurements if given, otherwise assumed.
fn efficiency(
    settings: &PlanSettings,
    place: &PlannedDevice,
) -> Result<Option<Efficiency>, Invalid> {
    match (place, &settings.measured) {
        (PlannedDevice::Gpu(_, gpu), Some(file)) => Efficiency::of_file(file, gpu).map(Some),
        (PlannedDevice::Gpu(_, gpu), None) => Ok(Some(Efficiency::assumed(gpu))),
        (_, None) => Ok(None),
        (_, Some(file)) => {
            let expected = "the plan is for no GPU that is known; name it with --device";
            Err(Invalid::new("measured", file.display(), expected))
        }
    }
}

/// An optimistic and, if it differs, a pessimistic time.
type Range = (f64, Option<f64>);

impl Planned<'_> {
    fn plan(
        &self,
        target: &TargetFacts,
        draft: &DraftConfig,
        notes: Vec<String>,
    ) -> Result<Plan, Error> {
        let (ranks, rows) = (self.settings.ranks(), &self.settings.rows);
        let epoch = rows::Epoch::of(self, target, draft)?;
        let mut memory = memory::memory(self, target, draft, &epoch.largest);
        let per_step = (ranks * rows.gradient_accumulation_steps) as f64;
        let steps_per_epoch = epoch.rows.div_ceil(per_step as u64);
        let whole = rows.whole_epochs().map_or(u64::MAX, |epochs| steps_per_epoch * epochs);
        let steps = rows.max_steps.map_or(whole, |bound| bound.min(whole));
        let flops_per_step = epoch.mean.flops * per_step;
        let budget = self.budget(target, draft, &epoch, &memory)?;
        if let Some(budget) = &budget {
            memory.count_widest(budget.peak_bytes as f64);
        }
        let (tflops, tflops_source) = self.speed(budget.as_ref());
        let target_flops_per_step = epoch.mean.target_flops * per_step;
        let pass_seconds = self.pass_seconds(&epoch.mean);
        let step = self.step_seconds(&epoch.mean, tflops, budget.as_ref(), pass_seconds);
        let step_seconds = step.map(|(best, _)| best);
        let slow_step_seconds = step.and_then(|(_, slow)| slow);
        let of_steps = |seconds: Option<f64>| seconds.map(|seconds| seconds * steps as f64);
        let served = step_seconds.filter(|_| !self.settings.hidden_states.colocate);
        let hidden_bytes_per_step = epoch.mean.tokens * per_step * self.token_bytes(draft);
        let hidden_bytes_per_second = served.map(|seconds| hidden_bytes_per_step / seconds);
        let parameters = DraftLayout::new(draft).trained();
        Ok(Plan {
            parameters,
            shape: [draft.layers.len(), draft.block_size, draft.target_layer_ids.len()],
            ranks,
            row: epoch.mean,
            total_bytes: memory.total(self.place.is_gpu()),
            memory,
            documents: epoch.documents,
            tokens_per_epoch: epoch.tokens,
            rows_per_epoch: epoch.rows,
            steps_per_epoch,
            steps,
            checkpoint_bytes: checkpoint::bytes(
                draft,
                &OptimizerConfig::from(&self.settings.optimizer),
            ),
            checkpoints: steps
                .div_ceil(steps_per_epoch.max(1))
                .min(CheckpointSettings::DEFAULT_KEPT),
            flops_per_step,
            target_flops_per_step,
            device: self.device(),
            tflops,
            tflops_source,
            step_seconds,
            slow_step_seconds,
            run_seconds: of_steps(step_seconds),
            slow_run_seconds: of_steps(slow_step_seconds),
            hidden_bytes_per_step,
            hidden_bytes_per_second,
            servers: self.servers(&epoch.mean, step, pass_seconds),
            stream: hidden_bytes_per_second.map(|bytes| Stream::new(bytes / ranks as f64)),
            all_reduce: self
                .gpu()
                .and_then(|gpu| AllReduce::new(parameters, ranks, self.settings.nnodes, gpu)),
            budget,
            server_bytes: self.server_bytes()?,
            server_parts: self.settings.parallel.tensor_parallel_size,
            notes,
        })
    }

    /// The GPU, if its figures are known.
    fn gpu(&self) -> Option<&Gpu> {
        if let PlannedDevice::Gpu(_, gpu) = &self.place { Some(gpu) } else { None }
    }

    /// Seconds of one GPU for the target's pass over a row: optimistic and pessimistic.
    fn pass_seconds(&self, row: &RowShape) -> Option<[f64; 2]> {
        let (gpu, best) = (self.gpu()?, self.efficiency.as_ref()?);
        // The tensor cores' peak applies to bfloat16.
        let dtype = self.settings.hidden_states.target_dtype;
        let is_bf16 = target::width(dtype, self.place.is_gpu()) < 4.0;
        let (products, attention) = (row.target_products, row.target_attention);
        let worst = best.slow().unwrap_or_else(|| best.clone());
        (is_bf16 && row.target_products > 0.0)
            .then(|| [best, &worst].map(|it| it.forward_seconds(products, attention, gpu)))
    }

    /// Seconds of a step: the rank's rows at its speed, plus with --colocate the target's passes
    /// over them, which a GPU runs at their own pace.
    fn step_seconds(
        &self,
        row: &RowShape,
        tflops: Option<f64>,
        budget: Option<&Budget>,
        pass_seconds: Option<[f64; 2]>,
    ) -> Option<Range> {
        let rows = self.settings.rows.gradient_accumulation_steps as f64;
        let tflops = tflops?;
        let given = self.settings.tflops.is_some();
        let Some(budget) = budget.filter(|_| !given) else {
            return Some((rows * (row.flops + row.target_flops) / (tflops * 1e12), None));
        };
        let own = rows * row.flops / (tflops * 1e12);
        let colocate = self.settings.hidden_states.colocate;
        let [pass, slow_pass] = pass_seconds.filter(|_| colocate).unwrap_or([0.0; 2]);
        let slow = budget.slow.map(|slow| own * slow.step_ms / budget.step_ms + rows * slow_pass);
        Some((own + rows * pass, slow))
    }

    /// The GPUs that run the target for the trainers.
    fn servers(
        &self,
        row: &RowShape,
        step: Option<Range>,
        pass_seconds: Option<[f64; 2]>,
    ) -> Option<Servers> {
        let pass_seconds = pass_seconds.filter(|_| !self.settings.hidden_states.colocate)?;
        let (best, slow) = step?;
        let rows = self.settings.rows.gradient_accumulation_steps as f64;
        let steps = [best, slow.unwrap_or(best)].map(|seconds| seconds / rows);
        let tflop = (row.target_products + row.target_attention) / 1e12;
        Some(Servers::new(tflop, pass_seconds, steps, self.settings.ranks()))
    }

    /// Weight bytes per process for each stage of the target's server.
    fn server_bytes(&self) -> Result<Vec<f64>, Error> {
        let hidden_states = &self.settings.hidden_states;
        let Some(target) = self.native.as_ref().filter(|_| !hidden_states.colocate) else {
            return Ok(Vec::new());
        };
        let parallel = self.settings.parallel;
        let grid = Grid { pipeline: parallel.pipeline, tensor: parallel.tensor_parallel_size };
        let width = target::width(hidden_states.target_dtype, self.place.is_gpu());
        let elements = grid.elements(target)?;
        Ok(elements.into_iter().map(|elements| elements * width).collect())
    }

    /// Bytes per number in the draft's computation.
    fn width(&self) -> f64 {
        target::width(self.settings.compute.compute_dtype, self.place.is_gpu())
    }

    /// Bytes of a token's hidden states on the wire, in bfloat16, including the last layer if the
    /// target's distribution needs it.
    fn token_bytes(&self, draft: &DraftConfig) -> f64 {
        let last = draft.num_target_layers.map(|layers| layers as u32);
        let travels = last.is_some_and(|last| draft.target_layer_ids.contains(&last));
        let extra = self.settings.objective.needs_target_distribution() && !travels;
        ((draft.aux_layers() + i64::from(extra)) * draft.hidden_size * 2) as f64
    }

    fn device(&self) -> String {
        match &self.place {
            PlannedDevice::Gpu(name, _) | PlannedDevice::UnknownGpu(Some(name)) => name.clone(),
            PlannedDevice::UnknownGpu(None) => "GPU of unknown name".into(),
            PlannedDevice::Cpu => format!("CPU, {} cores a rank", self.cores),
        }
    }

    fn computes_in_bf16(&self) -> bool {
        self.width() < 4.0
    }

    /// The time budget of a rank's step on the largest sampled row.
    fn budget(
        &self,
        target: &TargetFacts,
        draft: &DraftConfig,
        epoch: &rows::Epoch,
        memory: &Memory,
    ) -> Result<Option<Budget>, Error> {
        let (PlannedDevice::Gpu(_, gpu), Some(efficiency)) = (&self.place, &self.efficiency) else {
            return Ok(None);
        };
        if !self.computes_in_bf16() {
            return Ok(None);
        }
        let Self { settings, .. } = self;
        let free = (gpu.memory * 1e9 - memory.at_first()).max(0.0) as u64;
        let chunk_bytes = settings.objective.chunk_bytes(Some(free));
        let micro_batches = settings.rows.gradient_accumulation_steps;
        let shape = StepShape {
            draft,
            kind: Kind::BFloat16,
            tied: target.is_tied(),
            blocks: epoch.blocks.clone(),
            objective: setup::objective(&settings.objective, draft.block_size, chunk_bytes),
            optimizer: OptimizerConfig::from(&settings.optimizer),
            keep: if settings.compute.recompute { Keep::Inputs } else { Keep::Activations },
            row: &epoch.row,
            micro_batches,
        };
        let useful = epoch.largest.flops * micro_batches as f64;
        Ok(Some(Budget::new(&shape.record()?, useful, RatedGpu { gpu, efficiency })))
    }

    /// Useful TFLOP/s of a rank, and the source of the figure.
    fn speed(&self, budget: Option<&Budget>) -> (Option<f64>, String) {
        if let Some(tflops) = self.settings.tflops {
            return (Some(tflops), "as given".into());
        }
        if let Some(budget) = budget {
            return (Some(budget.tflops()), "computed, see the budget of a step".into());
        }
        if !self.place.is_gpu() {
            let tflops = CPU_CORE_TFLOPS * self.cores as f64;
            return (Some(tflops), format!("{CPU_CORE_TFLOPS} a core, see docs/plan.md"));
        }
        (None, "not measured on this GPU; pass --tflops".to_owned())
    }
}
