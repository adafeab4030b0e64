//! The settings of `dflash plan`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::check::{Invalid, MOST_TFLOPS, MOST_TOKENS, needs, positive, within};
use crate::compute::ComputeSettings;
use crate::draft::DraftSettings;
use crate::hidden_states::HiddenStatesSettings;
use crate::launch::{MOST_NODES, MOST_RANKS};
use crate::objective::ObjectiveSettings;
use crate::optimizer::OptimizerSettings;
use crate::rows::RowSettings;
use crate::validation::ValidationSettings;

/// All their rows are packed as a run would.
const MOST_DOCUMENTS: u64 = 100_000_000;

/// Say what a training run will take: memory, arithmetic, time, hidden states.
///
/// Takes the command line (and the run file) of `dflash train` as it stands: put `plan` in place of
/// `train`. What does not change the plan, such as --save-path, is passed over. Of the target only config.json is read, and
/// nothing is computed. Without a dataset, --rows and --mean-length describe one.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct PlanSettings {
    /// The target model: a directory (its config.json is enough), or its name OWNER/NAME on the Hub.
    #[cfg_attr(feature = "clap", arg(long, visible_aliases = ["model", "verifier-name-or-path"], value_name = "DIR|REPO", env = "DFLASH_MODEL"))]
    pub target: String,
    /// Prepared dataset, as `dflash prepare` writes it.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    pub data_path: Option<PathBuf>,
    /// Documents, instead of a dataset; all their tokens count as supervised.
    #[serde(rename = "rows")]
    #[cfg_attr(feature = "clap", arg(long = "rows", id = "rows", value_name = "N"))]
    pub documents: Option<usize>,
    /// Tokens of a document, with --rows.
    #[cfg_attr(feature = "clap", arg(long, value_name = "TOKENS"))]
    pub mean_length: Option<usize>,
    /// Ranks on a machine: GPUs, or processes on CPUs.
    #[cfg_attr(
        feature = "clap",
        arg(long, visible_alias = "gpus", value_name = "N", default_value_t = 1)
    )]
    pub nproc: usize,
    /// Machines with as many ranks each.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 1))]
    pub nnodes: usize,
    /// Plan for this GPU, such as H100, instead of this machine's.
    #[cfg_attr(feature = "clap", arg(long, value_name = "NAME"))]
    pub gpu: Option<String>,
    /// Useful TFLOP/s that a rank achieves, as `dflash bench train-step` and a run's metrics report
    /// them.
    #[cfg_attr(feature = "clap", arg(long, value_name = "TFLOPS"))]
    pub tflops: Option<f64>,
    /// Print JSON instead of a table.
    #[cfg_attr(feature = "clap", arg(long))]
    pub json: bool,
    /// What the ranks compute on; auto looks at this machine.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Device"))]
    pub compute: ComputeSettings,
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

impl PlanSettings {
    /// Ranks of all machines.
    pub fn ranks(&self) -> usize {
        self.nproc * self.nnodes
    }

    /// # Errors
    /// The first setting that cannot be used, whatever the target and the data are.
    pub fn check(&self) -> Result<(), Invalid> {
        within([
            ("nproc", self.nproc as u64, 1..=MOST_RANKS * MOST_NODES),
            ("nnodes", self.nnodes as u64, 1..=MOST_NODES),
            ("rows", self.documents.unwrap_or(1) as u64, 1..=MOST_DOCUMENTS),
            ("mean_length", self.mean_length.unwrap_or(1) as u64, 1..=MOST_TOKENS),
        ])?;
        positive([("tflops", self.tflops.unwrap_or(1.0), MOST_TFLOPS)])?;
        match (self.documents, self.mean_length) {
            (Some(_), None) => return Err(needs("rows", "mean_length")),
            (None, Some(_)) => return Err(needs("mean_length", "rows")),
            (None, None) if self.data_path.is_none() => {
                return Err(needs("data_path", "data_path"));
            }
            _ => {}
        }
        self.compute.check()?;
        self.draft.check()?;
        self.rows.check()?;
        self.objective.check()?;
        self.optimizer.check()?;
        self.hidden_states.check_window()?;
        self.validation.check_ranges()
    }
}
