//! The settings of `dflash plan`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::check::{Invalid, MOST_TFLOPS, MOST_TOKENS, needs, positive, within};
use crate::choices::Device;
use crate::compute::ComputeSettings;
use crate::draft::DraftSettings;
use crate::hidden_server::ParallelSettings;
use crate::hidden_states::HiddenStatesSettings;
use crate::launch::{MOST_NODES, MOST_RANKS};
use crate::objective::ObjectiveSettings;
use crate::optimizer::OptimizerSettings;
use crate::rows::RowSettings;
use crate::validation::ValidationSettings;

/// The packing of all their rows is computed as in a run.
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

/// Predict a training run's memory, arithmetic, time and data rate.
///
/// Takes the command line (and the run file) of `dflash train`: put `plan` in place of `train`.
/// Flags that do not affect the plan, such as --save-path, are ignored. Only config.json of the
/// target is read. Without a dataset, --rows and --mean-length describe one.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct PlanSettings {
    /// The target model: a directory (its config.json is enough), or its name OWNER/NAME on the Hub.
    #[cfg_attr(feature = "clap", arg(long, visible_aliases = ["model", "verifier-name-or-path"], value_name = "DIR|REPO", env = "DFLASH_MODEL"))]
    pub target: String,
    /// A description of the target in TOML, for an unknown family or to override what is known:
    /// names of its tensors and the constants of its norm and logits. See docs/targets.md.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub target_spec: Option<PathBuf>,
    /// Prepared dataset, as `dflash prepare` writes it.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    pub data_path: Option<PathBuf>,
    /// Number of documents, instead of a dataset; all their tokens count as supervised.
    #[serde(rename = "rows")]
    #[cfg_attr(feature = "clap", arg(long = "rows", id = "rows", value_name = "N"))]
    pub documents: Option<usize>,
    /// Tokens per document, with --rows.
    #[cfg_attr(feature = "clap", arg(long, value_name = "TOKENS"))]
    pub mean_length: Option<usize>,
    /// Ranks per machine: GPUs, or processes on CPUs.
    #[cfg_attr(
        feature = "clap",
        arg(long, visible_alias = "gpus", value_name = "N", default_value_t = 1)
    )]
    pub nproc: usize,
    /// Number of machines with as many ranks each.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 1))]
    pub nnodes: usize,
    /// The device to plan for: auto, cpu and cuda look at this machine; the name of a GPU, such as
    /// h200, h100, b200, a100 or 4090, plans for that GPU.
    #[cfg_attr(feature = "clap", arg(long, visible_alias = "gpu", value_name = "DEVICE|GPU", default_value_t = PlanDevice::Auto))]
    pub device: PlanDevice,
    /// Useful TFLOP/s per rank, as `dflash bench train-step` and a run's metrics report them.
    #[cfg_attr(feature = "clap", arg(long, value_name = "TFLOPS"))]
    pub tflops: Option<f64>,
    /// Measured efficiencies of the GPU's kernels, from `dflash bench train-step --products
    /// --json`, instead of the assumed ones (docs/plan.md).
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub measured: Option<PathBuf>,
    /// Print JSON instead of a table.
    #[cfg_attr(feature = "clap", arg(long))]
    pub json: bool,
    /// Compare the ways to use this machine instead: the trainers run the target, or some GPUs serve and
    /// the others train, or on a CPU smaller values. Prints time and memory of each, and the best one's
    /// command lines.
    #[serde(default)]
    #[cfg_attr(feature = "clap", arg(long))]
    pub suggest: bool,
    /// Rows and anchors.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Rows"))]
    pub rows: RowSettings,
    /// Shape of the draft.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Draft"))]
    pub draft: DraftSettings,
    /// Hidden states.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Hidden states"))]
    pub hidden_states: HiddenStatesSettings,
    /// Optimizer and schedule.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Optimizer"))]
    pub optimizer: OptimizerSettings,
    /// Loss.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Objective"))]
    pub objective: ObjectiveSettings,
    /// Validation.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Validation"))]
    pub validation: ValidationSettings,
    /// Precision and memory.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Device"))]
    pub compute: ComputeSettings,
    /// How `dflash hidden-server` splits the target.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "The target's server"))]
    pub parallel: ParallelSettings,
}

impl PlanSettings {
    /// Total number of ranks.
    pub fn ranks(&self) -> usize {
        self.nproc * self.nnodes
    }

    /// Fills in the defaults of open settings.
    pub fn settle(&mut self) {
        self.rows.settle();
        self.optimizer.settle();
    }

    /// # Errors
    /// The first setting that is invalid for any target and data.
    pub fn check(&self) -> Result<(), Invalid> {
        within([
            ("nproc", self.nproc as u64, 1..=MOST_RANKS * MOST_NODES),
            ("nnodes", self.nnodes as u64, 1..=MOST_NODES),
            ("rows", self.documents.unwrap_or(1) as u64, 1..=MOST_DOCUMENTS),
            ("mean_length", self.mean_length.unwrap_or(1) as u64, 1..=MOST_TOKENS),
        ])?;
        self.parallel.check(Device::Auto)?;
        positive([("tflops", self.tflops.unwrap_or(1.0), MOST_TFLOPS)])?;
        match (self.documents, self.mean_length) {
            (Some(_), None) => return Err(needs("rows", "mean_length")),
            (None, Some(_)) => return Err(needs("mean_length", "rows")),
            (None, None) if self.data_path.is_none() => {
                let reason = "is needed: a prepared dataset, or in its place --rows N and \
                              --mean-length TOKENS, which describe one";
                return Err(Invalid {
                    key: "data_path",
                    reason: reason.to_owned(),
                    missing: Some("data_path"),
                });
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
