//! The settings of `dflash train`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::check::{Invalid, at_least_one, at_odds, positive};
use crate::choices::{SpeculatorType, Tracker};
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
/// end with code 143, SIGHUP with 129, Ctrl-C with 130 and within a few seconds; SIGUSR1 makes them
/// save and go on.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct TrainSettings {
    /// The target model: a Hugging Face model directory, or its name OWNER/NAME on the Hub.
    #[cfg_attr(feature = "clap", arg(long, visible_aliases = ["model", "verifier-name-or-path"], value_name = "DIR|REPO", env = "DFLASH_MODEL"))]
    pub target: String,
    /// Prepared dataset, as `dflash prepare` writes it.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    pub data_path: PathBuf,
    /// Directory for checkpoints and metrics.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    pub save_path: PathBuf,
    /// Continue the run in --save-path from its last complete checkpoint.
    #[cfg_attr(feature = "clap", arg(long))]
    pub resume: bool,
    /// Kind of drafter; this program trains dflash.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t = SpeculatorType::Dflash))]
    pub speculator_type: SpeculatorType,
    /// Steps between metric lines; the first and the last step have one too.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 10))]
    pub log_every: u64,
    /// Peak dense bfloat16 TFLOP/s of a rank's device, for reporting utilization. Default: looked
    /// up by the GPU's name; none for a CPU.
    #[cfg_attr(feature = "clap", arg(long, value_name = "TFLOPS"))]
    pub peak_tflops: Option<f64>,
    /// Write a line for each metric line instead of drawing a progress bar, as without a terminal.
    #[cfg_attr(feature = "clap", arg(long))]
    pub no_progress: bool,
    /// Write the metrics for these programs as well, separated by commas: tensorboard, mlflow,
    /// wandb, or none. All are files in --save-path; nothing is sent.
    #[cfg_attr(feature = "clap", arg(long, value_enum, value_name = "TRACKERS", action = clap::ArgAction::Set, value_delimiter = ',', default_values_t = [Tracker::Tensorboard]))]
    pub log_to: Vec<Tracker>,
    /// Name of the run in mlflow and wandb. Default: the last part of --save-path.
    #[cfg_attr(feature = "clap", arg(long, value_name = "NAME"))]
    pub run_name: Option<String>,
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
        at_least_one([("log_every", self.log_every)])?;
        positive([("peak_tflops", self.peak_tflops.unwrap_or(1.0))])?;
        self.check_trackers()?;
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

    fn check_trackers(&self) -> Result<(), Invalid> {
        if self.log_to.contains(&Tracker::Trackio) {
            let expected = "trackio has no documented file format; take tensorboard, whose files \
                            trackio.import_tf_events reads";
            return Err(Invalid::new("log_to", "trackio", expected));
        }
        if self.log_to.contains(&Tracker::None) && self.log_to.len() > 1 {
            return Err(at_odds("log_to", "names trackers beside none; name one or the other"));
        }
        match &self.run_name {
            Some(name) if name.trim().is_empty() || name.contains(char::is_control) => {
                let expected = "a name is one line of text";
                Err(Invalid::new("run_name", format!("{name:?}"), expected))
            }
            _ => Ok(()),
        }
    }
}
