//! The flags of `dflash plan`.

use std::path::PathBuf;

use clap::Args;

use super::eval::at_least_one;
use super::{
    ComputeDtype, DeviceArg, DraftArgs, ObjectiveArgs, OptimizerArg, RowArgs, RunFileArgs,
};

/// Say what a training run will take: memory, arithmetic, time, hidden states.
///
/// Takes the flags (and the run file) of `dflash train`. Of the target only config.json is read, and
/// nothing is computed. Without a dataset, --rows and --mean-length describe one.
#[derive(Debug, Clone, Args)]
pub struct PlanArgs {
    /// Settings from a file.
    #[command(flatten)]
    pub run: RunFileArgs,
    /// Directory of the target model; its config.json is enough.
    #[arg(long, visible_alias = "target", value_name = "DIR", env = "DFLASH_MODEL")]
    pub verifier_name_or_path: PathBuf,
    /// Prepared dataset, as `dflash prepare` writes it.
    #[arg(long, value_name = "DIR", required_unless_present = "count")]
    pub data_path: Option<PathBuf>,
    /// Documents, instead of a dataset; all their tokens count as supervised.
    #[arg(long = "rows", id = "count", value_name = "N", requires = "mean_length", value_parser = at_least_one)]
    pub count: Option<usize>,
    /// Tokens of a document, with --rows.
    #[arg(long, value_name = "TOKENS", requires = "count", value_parser = at_least_one)]
    pub mean_length: Option<usize>,
    /// Ranks: GPUs, or processes on CPUs.
    #[arg(long, visible_alias = "gpus", value_name = "N", default_value_t = 1)]
    pub nproc: usize,
    /// What the ranks compute on; auto looks at this machine.
    #[arg(long, value_enum, default_value_t = DeviceArg::Auto)]
    pub device: DeviceArg,
    /// Plan for this GPU, such as H100, whatever is here.
    #[arg(long, value_name = "NAME")]
    pub gpu: Option<String>,
    /// Useful TFLOP/s that a rank achieves; `dflash bench train-step` and a run's metrics tell.
    #[arg(long, value_name = "TFLOPS")]
    pub tflops: Option<f64>,
    /// Share of the samples that are held out.
    #[arg(long, value_name = "R", default_value_t = 0.0)]
    pub validation_ratio: f64,
    /// What moves the matrices.
    #[arg(long, value_enum, default_value_t = OptimizerArg::Adamw)]
    pub optimizer: OptimizerArg,
    /// Keep a moving average of the weights.
    #[arg(long, value_name = "D")]
    pub ema_decay: Option<f64>,
    /// What the ranks share out: 0 nothing, 1 the masters and the optimizer's state.
    #[arg(long, value_name = "STAGE", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    pub zero: u8,
    /// Keep only the layers' inputs for the backward pass.
    #[arg(long)]
    pub recompute: bool,
    /// Kind of weights and activations. auto: float32 on a CPU, bfloat16 on a GPU.
    #[arg(long, value_enum, default_value_t)]
    pub compute_dtype: ComputeDtype,
    /// Hidden states in flight or waiting, MiB per rank.
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    pub window_mib: usize,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Shape of the draft.
    #[command(flatten, next_help_heading = "Draft")]
    pub draft: DraftArgs,
    /// Rows and anchors.
    #[command(flatten, next_help_heading = "Rows")]
    pub rows: RowArgs,
    /// Loss.
    #[command(flatten, next_help_heading = "Objective")]
    pub objective: ObjectiveArgs,
}
