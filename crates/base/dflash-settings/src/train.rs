//! The settings of `dflash train`.

use std::path::{Path, PathBuf};

use dflash_settings_derive::Classed;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::check::{Invalid, MOST_STEPS, MOST_TFLOPS, at_odds, needs, positive, within};
use crate::choices::{Device, Tracker};
use crate::compute::ComputeSettings;
use crate::draft::DraftSettings;
use crate::earlier::present_record;
use crate::hidden_states::HiddenStatesSettings;
use crate::launch::{CheckpointSettings, LaunchSettings};
use crate::objective::ObjectiveSettings;
use crate::optimizer::OptimizerSettings;
use crate::processor::ProcessorSettings;
use crate::resume_mode::ResumeMode;
use crate::rows::RowSettings;
use crate::validation::ValidationSettings;

/// Train a drafter against a running hidden-state server, or with the target in its own process.
///
/// With --nproc N the command starts N ranks on this machine, with --nnodes on several; under
/// torchrun or Slurm it reads their variables and is one rank itself. SIGTERM makes all ranks save
/// and exit with code 143, SIGHUP with 129, Ctrl-C with 130 and within a few seconds; SIGUSR1 makes
/// them save and continue.
#[derive(Debug, Clone, Serialize, Deserialize, Classed)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct TrainSettings {
    /// The target model: a Hugging Face model directory, or its name OWNER/NAME on the Hub.
    #[cfg_attr(feature = "clap", arg(long, visible_aliases = ["model", "verifier-name-or-path"], value_name = "DIR|REPO", env = "DFLASH_MODEL"))]
    // Resuming compares the model itself, not its name.
    #[setting(free, may_differ)]
    pub target: String,
    /// A description of the target in TOML, for an unknown family or to override what is known:
    /// names of its tensors and the constants of its norm and logits. See docs/targets.md. The run
    /// records it.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    // Resuming compares the file's contents.
    #[setting(free)]
    pub target_spec: Option<PathBuf>,
    /// Prepared dataset, as `dflash prepare` writes it. Required except for --dry-run.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    #[setting(free, may_differ)]
    pub data_path: Option<PathBuf>,
    /// Directory for checkpoints and metrics.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    #[setting(free, may_differ)]
    pub save_path: PathBuf,
    /// Continue the run in --save-path from its last good checkpoint; an error if there is none.
    ///
    /// --resume=auto then starts a new run instead; --resume=STEP continues from the checkpoint of
    /// that step, and moves later checkpoints and metric lines aside.
    #[cfg_attr(feature = "clap", arg(long, value_name = "auto|STEP", num_args = 0..=1, require_equals = true, default_missing_value = ResumeMode::LATEST))]
    #[setting(free)]
    pub resume: Option<ResumeMode>,
    /// Write the untrained drafter into dry-run in --save-path, to try it in an engine, and exit.
    /// Needs no server, and data only for --draft-vocab-size.
    #[cfg_attr(feature = "clap", arg(long))]
    #[serde(default)]
    #[setting(free)]
    pub dry_run: bool,
    /// Rows and anchors.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Rows"))]
    #[setting(flatten)]
    pub rows: RowSettings,
    /// Shape of the draft.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Draft"))]
    #[setting(flatten)]
    pub draft: DraftSettings,
    /// Hidden states.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Hidden states"))]
    #[setting(flatten)]
    pub hidden_states: HiddenStatesSettings,
    /// Optimizer and schedule.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Optimizer"))]
    #[setting(flatten)]
    pub optimizer: OptimizerSettings,
    /// Loss.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Objective"))]
    #[setting(flatten)]
    pub objective: ObjectiveSettings,
    /// Validation.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Validation"))]
    #[setting(flatten)]
    pub validation: ValidationSettings,
    /// Checkpoints.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Checkpoints"))]
    #[setting(flatten)]
    pub checkpoints: CheckpointSettings,
    /// Settings that a resumed run may change, by the names that its error message lists.
    #[cfg_attr(feature = "clap", arg(long, value_name = "NAME", action = clap::ArgAction::Set, value_delimiter = ',', help_heading = "Checkpoints"))]
    #[setting(free)]
    pub allow_changed: Option<Vec<String>>,
    /// Ranks.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Ranks"))]
    #[setting(flatten)]
    pub launch: LaunchSettings,
    /// Where to compute: auto, cpu or cuda, which is the GPU of the local rank.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DEVICE", default_value_t = Device::Auto, help_heading = "Device"))]
    // The log and the record state the device that `auto` selected.
    #[setting(free, may_differ)]
    pub device: Device,
    /// The CPU instruction level.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Device"))]
    #[setting(flatten)]
    pub processor: ProcessorSettings,
    /// Precision and memory.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten, next_help_heading = "Device"))]
    #[setting(flatten)]
    pub compute: ComputeSettings,
    /// Steps between metric lines; the first and the last step have one too.
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "N", default_value_t = 10, help_heading = "Output")
    )]
    #[setting(free)]
    pub log_every: u64,
    /// Also write the metrics in the formats of these programs, separated by commas: tensorboard,
    /// mlflow, wandb, or none. All are files in --save-path; nothing is sent.
    #[cfg_attr(feature = "clap", arg(long, value_enum, value_name = "TRACKERS", action = clap::ArgAction::Set, value_delimiter = ',', default_values_t = [Tracker::Tensorboard], help_heading = "Output"))]
    #[setting(free, may_differ)]
    pub log_to: Vec<Tracker>,
    /// Name of the run in mlflow and wandb. Default: the last part of --save-path.
    #[cfg_attr(feature = "clap", arg(long, value_name = "NAME", help_heading = "Output"))]
    #[setting(free, may_differ)]
    pub run_name: Option<String>,
    /// Peak dense bfloat16 TFLOP/s of a rank's device, for reporting utilization. Default: from the
    /// GPU's name; none for a CPU.
    #[cfg_attr(
        feature = "clap",
        arg(long, hide = true, value_name = "TFLOPS", help_heading = "Output")
    )]
    #[setting(free, may_differ)]
    pub peak_tflops: Option<f64>,
    /// Print a line for each metric line instead of a progress bar, as without a terminal.
    #[cfg_attr(feature = "clap", arg(long, hide = true, help_heading = "Output"))]
    #[setting(free, may_differ)]
    pub no_progress: bool,
}

impl TrainSettings {
    /// Whether a resumed run may change `setting`.
    pub fn allows_changed(&self, setting: &str) -> bool {
        self.allow_changed.iter().flatten().any(|name| name == setting)
    }

    /// Turns these into the settings of a restarted rank, which resumes its job's last checkpoint,
    /// however the job began.
    pub fn restart(&mut self) {
        self.resume = Some(ResumeMode::Auto);
    }

    /// Fills in unset settings. A resumed run takes them from its record, under their present
    /// names, since an earlier release may have had other defaults; a new run takes the defaults.
    pub fn settle(&mut self, record: Option<&Value>) {
        if let Some(Value::Object(record)) = record {
            let mut record = record.clone();
            present_record(&mut record);
            let number = |key| record.get(key).and_then(Value::as_u64);
            let size = |key| number(key).and_then(|number| usize::try_from(number).ok());
            let (rows, optimizer) = (&mut self.rows, &mut self.optimizer);
            rows.total_seq_len = rows.total_seq_len.or(size("total_seq_len"));
            rows.max_anchors = rows.max_anchors.or(size("max_anchors"));
            let betas = || serde_json::from_value(record.get("adam_betas")?.clone()).ok();
            optimizer.adam_betas = optimizer.adam_betas.take().or_else(betas);
            let ratio = record.get("validation_ratio").and_then(Value::as_f64);
            self.validation.validation_ratio = self.validation.validation_ratio.or(ratio);
            // A record without a number comes from a release that kept all checkpoints.
            let kept = number("keep_last").unwrap_or(0);
            self.checkpoints.keep_last.get_or_insert(kept);
        }
        self.rows.settle();
        self.optimizer.settle();
        self.checkpoints.keep_last.get_or_insert(CheckpointSettings::DEFAULT_KEPT);
    }

    /// The dataset.
    ///
    /// # Errors
    /// There is none, which is possible for a dry run.
    pub fn data_path(&self) -> Result<&Path, Invalid> {
        self.data_path.as_deref().ok_or_else(|| needs("data_path", "data_path"))
    }

    /// # Errors
    /// The first setting that is invalid for any target and data.
    pub fn check(&self) -> Result<(), Invalid> {
        within([("log_every", self.log_every, 1..=MOST_STEPS)])?;
        positive([("peak_tflops", self.peak_tflops.unwrap_or(1.0), MOST_TFLOPS)])?;
        self.check_trackers()?;
        if !self.dry_run || self.draft.draft_vocab_size.is_some() {
            self.data_path()?;
        }
        if self.allow_changed.is_some() && self.resume.is_none() {
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
            return Err(at_odds("log_to", "names both trackers and none; name one or the other"));
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
