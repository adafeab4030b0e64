//! The settings of `dflash train`.

use std::path::{Path, PathBuf};

use dflash_settings_derive::Classed;
use serde::{Deserialize, Serialize};

use crate::check::{Invalid, MOST_STEPS, MOST_TFLOPS, at_odds, needs, positive, within};
use crate::choices::{Device, SpeculatorType, Tracker};
use crate::compute::ComputeSettings;
use crate::draft::DraftSettings;
use crate::hidden_states::HiddenStatesSettings;
use crate::launch::{CheckpointSettings, LaunchSettings};
use crate::objective::ObjectiveSettings;
use crate::optimizer::OptimizerSettings;
use crate::processor::ProcessorSettings;
use crate::rows::RowSettings;
use crate::validation::ValidationSettings;

/// Train a drafter against a running hidden-state server, or with the target in its own process.
///
/// With --nproc N the command starts N ranks on this machine, with --nnodes on several; under
/// torchrun or Slurm it finds their variables and is a rank itself. SIGTERM makes all ranks save and
/// end with code 143, SIGHUP with 129, Ctrl-C with 130 and within a few seconds; SIGUSR1 makes them
/// save and go on.
#[derive(Debug, Clone, Serialize, Deserialize, Classed)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct TrainSettings {
    /// The target model: a Hugging Face model directory, or its name OWNER/NAME on the Hub.
    #[cfg_attr(feature = "clap", arg(long, visible_aliases = ["model", "verifier-name-or-path"], value_name = "DIR|REPO", env = "DFLASH_MODEL"))]
    // The model behind the name is compared by what it is.
    #[setting(free, may_differ)]
    pub target: String,
    /// A description of the target, for a family that is not known or to overrule what is: names of
    /// its tensors and the numbers of its norm and logits, in TOML. See docs/targets.md. A run remembers
    /// it.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    // What it says is compared.
    #[setting(free)]
    pub target_spec: Option<PathBuf>,
    /// Prepared dataset, as `dflash prepare` writes it. Needed but for --dry-run.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    #[setting(free, may_differ)]
    pub data_path: Option<PathBuf>,
    /// Directory for checkpoints and metrics.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    #[setting(free, may_differ)]
    pub save_path: PathBuf,
    /// Write the untrained drafter into dry-run in --save-path, to try it in an engine, and end. Takes
    /// no server, and data only for --draft-vocab-size.
    #[cfg_attr(feature = "clap", arg(long))]
    #[serde(default)]
    #[setting(free)]
    pub dry_run: bool,
    /// Continue the run in --save-path from its last good checkpoint; an error where there is none.
    #[cfg_attr(feature = "clap", arg(long))]
    #[setting(free)]
    pub resume: bool,
    /// Continue the run in --save-path where it has a checkpoint, else start one.
    #[cfg_attr(feature = "clap", arg(long))]
    #[setting(free)]
    pub resume_or_start: bool,
    /// Continue from the checkpoint of step N. Later ones, and their lines, are moved aside.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    #[setting(free)]
    pub resume_from: Option<u64>,
    /// Settings that a resumed run may change, by the names that its refusal lists.
    #[cfg_attr(feature = "clap", arg(long, value_name = "NAME", action = clap::ArgAction::Set, value_delimiter = ','))]
    #[setting(free)]
    pub allow_changed: Option<Vec<String>>,
    /// Kind of drafter; this program trains dflash.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t = SpeculatorType::Dflash))]
    #[setting(lasting, recipe)]
    pub speculator_type: SpeculatorType,
    /// Steps between metric lines; the first and the last step have one too.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 10))]
    #[setting(free)]
    pub log_every: u64,
    /// Peak dense bfloat16 TFLOP/s of a rank's device, for reporting utilization. Default: looked
    /// up by the GPU's name; none for a CPU.
    #[cfg_attr(feature = "clap", arg(long, value_name = "TFLOPS"))]
    #[setting(free, may_differ)]
    pub peak_tflops: Option<f64>,
    /// Write a line for each metric line instead of drawing a progress bar, as without a terminal.
    #[cfg_attr(feature = "clap", arg(long))]
    #[setting(free, may_differ)]
    pub no_progress: bool,
    /// Write the metrics for these programs as well, separated by commas: tensorboard, mlflow,
    /// wandb, or none. All are files in --save-path; nothing is sent.
    #[cfg_attr(feature = "clap", arg(long, value_enum, value_name = "TRACKERS", action = clap::ArgAction::Set, value_delimiter = ',', default_values_t = [Tracker::Tensorboard]))]
    #[setting(free, may_differ)]
    pub log_to: Vec<Tracker>,
    /// Name of the run in mlflow and wandb. Default: the last part of --save-path.
    #[cfg_attr(feature = "clap", arg(long, value_name = "NAME"))]
    #[setting(free, may_differ)]
    pub run_name: Option<String>,
    /// Where to compute: auto, cpu or cuda, which is the GPU of the local rank.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DEVICE", default_value_t = Device::Auto, help_heading = "Device"))]
    // What auto came to is recorded and said.
    #[setting(free, may_differ)]
    pub device: Device,
    /// The processor's instructions.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Device"))]
    #[setting(flatten)]
    pub processor: ProcessorSettings,
    /// Precision and memory.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Device"))]
    #[setting(flatten)]
    pub compute: ComputeSettings,
    /// Ranks.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Ranks"))]
    #[setting(flatten)]
    pub launch: LaunchSettings,
    /// Checkpoints.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Checkpoints"))]
    #[setting(flatten)]
    pub checkpoints: CheckpointSettings,
    /// Shape of the draft.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Draft"))]
    #[setting(flatten)]
    pub draft: DraftSettings,
    /// Rows and anchors.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Rows"))]
    #[setting(flatten)]
    pub rows: RowSettings,
    /// Loss.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Objective"))]
    #[setting(flatten)]
    pub objective: ObjectiveSettings,
    /// Optimizer and schedule.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Optimizer"))]
    #[setting(flatten)]
    pub optimizer: OptimizerSettings,
    /// Hidden states.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Hidden states"))]
    #[setting(flatten)]
    pub hidden_states: HiddenStatesSettings,
    /// Held-out measurements.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Validation"))]
    #[setting(flatten)]
    pub validation: ValidationSettings,
}

/// What a run begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// Nothing: there must be no run yet.
    Fresh,
    /// The last good checkpoint, which must be there.
    Resume,
    /// The last good checkpoint, or nothing.
    ResumeOrStart,
    /// The checkpoint of this step.
    ResumeFrom(u64),
}

impl TrainSettings {
    /// What the flags say of where to begin; the one that says most counts.
    pub fn begin(&self) -> Begin {
        match self.resume_from {
            Some(step) => Begin::ResumeFrom(step),
            None if self.resume_or_start => Begin::ResumeOrStart,
            None if self.resume => Begin::Resume,
            None => Begin::Fresh,
        }
    }

    /// Whether a resumed run may have another `setting` than it began with.
    pub fn allows_changed(&self, setting: &str) -> bool {
        self.allow_changed.iter().flatten().any(|name| name == setting)
    }

    /// Makes these the settings of a restarted rank, which goes on with what its job has saved,
    /// however the job began.
    pub fn restart(&mut self) {
        (self.resume, self.resume_or_start, self.resume_from) = (false, true, None);
    }

    /// The dataset.
    ///
    /// # Errors
    /// There is none, as a dry run may have it.
    pub fn data_path(&self) -> Result<&Path, Invalid> {
        self.data_path.as_deref().ok_or_else(|| needs("data_path", "data_path"))
    }

    /// # Errors
    /// The first setting that cannot be used, whatever the target and the data are.
    pub fn check(&self) -> Result<(), Invalid> {
        within([("log_every", self.log_every, 1..=MOST_STEPS)])?;
        positive([("peak_tflops", self.peak_tflops.unwrap_or(1.0), MOST_TFLOPS)])?;
        self.check_trackers()?;
        if !self.dry_run || self.draft.draft_vocab_size.is_some() {
            self.data_path()?;
        }
        if self.allow_changed.is_some() && self.begin() == Begin::Fresh {
            return Err(needs("allow_changed", "resume"));
        }
        self.check_device()?;
        self.processor.check()?;
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

    fn check_device(&self) -> Result<(), Invalid> {
        if let Device::Cuda(Some(_)) = self.device {
            let expected = "ranks take the GPU of their number; pass cuda, and choose GPUs with \
                            CUDA_VISIBLE_DEVICES";
            return Err(Invalid::new("device", self.device, expected));
        }
        Ok(())
    }

    fn check_trackers(&self) -> Result<(), Invalid> {
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
