//! The settings of `dflash train`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::check::{Invalid, MOST_STEPS, MOST_TFLOPS, positive, within};
use crate::choices::SpeculatorType;
use crate::compute::ComputeSettings;
use crate::draft::DraftSettings;
use crate::hidden_states::HiddenStatesSettings;
use crate::launch::{CheckpointSettings, LaunchSettings};
use crate::objective::ObjectiveSettings;
use crate::optimizer::OptimizerSettings;
use crate::rows::RowSettings;
use crate::validation::ValidationSettings;

/// Train a drafter against a running hidden-state server.
///
/// With --nproc N the command starts N ranks on this machine, with --nnodes on several; under
/// torchrun or Slurm it finds their variables and is a rank itself. SIGTERM makes all ranks save and
/// end with code 0; Ctrl-C does so as well if it takes no more than a few seconds, with code 130.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct TrainSettings {
    /// The target model: a Hugging Face model directory, or its name OWNER/NAME on the Hub.
    #[cfg_attr(feature = "clap", arg(long, visible_aliases = ["model", "verifier-name-or-path"], value_name = "DIR|REPO", env = "DFLASH_MODEL"))]
    pub target: String,
    /// Prepared dataset, as `dflash prepare` writes it.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    pub data_path: PathBuf,
    /// Directory for checkpoints, metrics and TensorBoard events.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    pub save_path: PathBuf,
    /// Continue the run in --save-path from its last complete checkpoint.
    #[cfg_attr(feature = "clap", arg(long))]
    pub resume: bool,
    /// Kind of drafter; this program trains dflash.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t = SpeculatorType::Dflash))]
    pub speculator_type: SpeculatorType,
    /// Steps between metric lines.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 10))]
    pub log_every: u64,
    /// Peak dense bfloat16 TFLOP/s of a rank's device, for reporting utilization. Default: looked
    /// up by the GPU's name; none for a CPU.
    #[cfg_attr(feature = "clap", arg(long, value_name = "TFLOPS"))]
    pub peak_tflops: Option<f64>,
    /// Write a line for each metric line instead of drawing a progress bar, as without a terminal.
    #[cfg_attr(feature = "clap", arg(long))]
    pub no_progress: bool,
    /// Device, precision and memory.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Device"))]
    pub compute: ComputeSettings,
    /// Ranks.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Ranks"))]
    pub launch: LaunchSettings,
    /// Checkpoints.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Checkpoints"))]
    pub checkpoints: CheckpointSettings,
    /// Shape of the draft.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Draft"))]
    pub draft: DraftSettings,
    /// Rows and anchors.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Rows"))]
    pub rows: RowSettings,
    /// Loss.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Objective"))]
    pub objective: ObjectiveSettings,
    /// Optimizer and schedule.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Optimizer"))]
    pub optimizer: OptimizerSettings,
    /// Hidden states.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Hidden states"))]
    pub hidden_states: HiddenStatesSettings,
    /// Held-out measurements.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Validation"))]
    pub validation: ValidationSettings,
}

impl TrainSettings {
    /// # Errors
    /// The first setting that cannot be used, whatever the target and the data are.
    pub fn check(&self) -> Result<(), Invalid> {
        within([("log_every", self.log_every, 1..=MOST_STEPS)])?;
        positive([("peak_tflops", self.peak_tflops.unwrap_or(1.0), MOST_TFLOPS)])?;
        self.compute.check()?;
        self.launch.check()?;
        self.checkpoints.check()?;
        self.draft.check()?;
        self.rows.check()?;
        self.objective.check()?;
        self.optimizer.check()?;
        self.hidden_states.check()?;
        self.validation.check()
    }
}
