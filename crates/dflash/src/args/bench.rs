//! The flags of `dflash bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::DeviceArg;

/// Time parts of the work on random data.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// What to time.
    #[command(subcommand)]
    pub what: BenchCommand,
}

/// What can be timed.
#[derive(Debug, Clone, Subcommand)]
pub enum BenchCommand {
    /// One optimizer step: forward, backward, clipping and AdamW on random hidden states.
    TrainStep(TrainStepArgs),
}

/// Shape of the step.
#[derive(Debug, Clone, Args)]
pub struct TrainStepArgs {
    /// Directory of the target: its dimensions, embedding and lm_head are used.
    #[arg(long, value_name = "DIR")]
    pub target: PathBuf,
    /// Tokens of the packed row.
    #[arg(long, value_name = "T", default_value_t = 2048)]
    pub tokens: usize,
    /// Anchors of the packed row.
    #[arg(long, value_name = "A", default_value_t = 128)]
    pub anchors: usize,
    /// Documents of the packed row.
    #[arg(long, value_name = "D", default_value_t = 8)]
    pub docs: usize,
    /// Slots of a block.
    #[arg(long, value_name = "B", default_value_t = 16)]
    pub block: usize,
    /// Layers of the draft.
    #[arg(long, value_name = "L", default_value_t = 5)]
    pub layers: usize,
    /// Captured layers of the target.
    #[arg(long, value_name = "K", default_value_t = 5)]
    pub captures: usize,
    /// Timed steps, after --warmup others.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub steps: usize,
    /// Steps before the timed ones.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub warmup: usize,
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceArg::Auto)]
    pub device: DeviceArg,
    /// Seed of weights, tokens and anchors.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Print one JSON line instead of a table.
    #[arg(long)]
    pub json: bool,
}
