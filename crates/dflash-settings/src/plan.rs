//! The settings of `dflash plan`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::check::{Invalid, MOST_TFLOPS, MOST_TOKENS, needs, positive, within};
use crate::choices::Device;
use crate::compute::ComputeSettings;
use crate::draft::DraftSettings;
use crate::hidden_server::DivisionSettings;
use crate::hidden_states::HiddenStatesSettings;
use crate::launch::{MOST_NODES, MOST_RANKS};
use crate::objective::ObjectiveSettings;
use crate::optimizer::OptimizerSettings;
use crate::rows::RowSettings;
use crate::validation::ValidationSettings;

/// All their rows are packed as a run would.
const MOST_DOCUMENTS: u64 = 100_000_000;

/// What a run is planned for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum PlanDevice {
    /// This machine's GPUs, else its CPU.
    #[default]
    Auto,
    /// This machine's CPU.
    Cpu,
    /// This machine's GPUs, known or not.
    Cuda,
    /// GPUs of this name, or a part of it.
    Named(String),
}

impl FromStr for PlanDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(Device::Auto) => Ok(Self::Auto),
            Ok(Device::Cpu) => Ok(Self::Cpu),
            Ok(Device::Cuda(None)) => Ok(Self::Cuda),
            Ok(Device::Cuda(Some(_))) => {
                Err("ranks take the GPU of their number; pass cuda, or a GPU's name".to_owned())
            }
            Err(_) if text.trim().is_empty() => {
                Err("pass auto, cpu, cuda, or a GPU's name such as h200".to_owned())
            }
            Err(_) => Ok(Self::Named(text.to_owned())),
        }
    }
}

impl fmt::Display for PlanDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Named(name) => name,
        })
    }
}

impl TryFrom<String> for PlanDevice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<PlanDevice> for String {
    fn from(device: PlanDevice) -> Self {
        device.to_string()
    }
}

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
    /// A description of the target, for a family that is not known or to overrule what is: names of
    /// its tensors and the numbers of its norm and logits, in TOML. See docs/targets.md.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub target_spec: Option<PathBuf>,
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
    /// What to plan for: auto looks at this machine, cpu and cuda say what of it, and the name of a
    /// GPU, such as h200, h100, b200, a100 or 4090, plans for that.
    #[cfg_attr(feature = "clap", arg(long, visible_alias = "gpu", value_name = "DEVICE|GPU", default_value_t = PlanDevice::Auto))]
    pub device: PlanDevice,
    /// Useful TFLOP/s that a rank achieves, as `dflash bench train-step` and a run's metrics report
    /// them.
    #[cfg_attr(feature = "clap", arg(long, value_name = "TFLOPS"))]
    pub tflops: Option<f64>,
    /// What the GPU's kernels reach, as `dflash bench train-step --products --json` measured it there, in
    /// place of the shares that are assumed (docs/plan.md).
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub measured: Option<PathBuf>,
    /// Print JSON instead of a table.
    #[cfg_attr(feature = "clap", arg(long))]
    pub json: bool,
    /// Precision and memory.
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
    /// How `dflash hidden-server` divides the target.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "The target's server"))]
    pub division: DivisionSettings,
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
        self.division.check(Device::Auto)?;
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
        self.hidden_states.check_colocation()?;
        self.validation.check_ranges()
    }
}
