//! The settings of `dflash bench`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::check::{Invalid, MOST_LAYERS, MOST_ROWS, MOST_TOKENS, block_size, within};
use crate::choices::{Device, Dtype};
use crate::draft::MOST_DRAFT_LAYERS;
#[cfg(feature = "clap")]
use crate::draft::{DEFAULT_AUX_LAYERS, DEFAULT_BLOCK_SIZE, DEFAULT_LAYERS};
use crate::objective::check_loss_chunk;
use crate::processor::ProcessorSettings;

/// More than anyone waits for.
const MOST_STEPS: u64 = 1_000_000;

/// Blocks are shorter.
const MOST_ROWS_OF_A_STEP: u64 = 1024;

/// What can be timed.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Subcommand))]
#[serde(rename_all = "snake_case")]
pub enum BenchSubject {
    /// One optimizer step: forward, backward, clipping and AdamW on random hidden states.
    TrainStep(TrainStepSettings),
    /// Decoding: plain and speculative greedy answers to real prompts, in turns.
    Decode(BenchDecodeSettings),
    /// A target alone on a CPU, without a tokenizer: loading, and steps compared with a plain read
    /// of the bytes that they need.
    Target(BenchTargetSettings),
}

/// Time a training step or decoding.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct BenchSettings {
    /// What to time.
    #[cfg_attr(feature = "clap", command(subcommand))]
    pub subject: BenchSubject,
}

/// Shape of the step.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct TrainStepSettings {
    /// The target model: a Hugging Face model directory, or its name OWNER/NAME on the Hub.
    #[cfg_attr(feature = "clap", arg(long, visible_aliases = ["model", "verifier-name-or-path"], value_name = "DIR|REPO", env = "DFLASH_MODEL"))]
    pub target: String,
    /// A description of the target in TOML, for an unknown family or to override what is known:
    /// names of its tensors and the constants of its norm and logits. See docs/targets.md.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub target_spec: Option<PathBuf>,
    /// Tokens of the packed row.
    #[cfg_attr(feature = "clap", arg(long, value_name = "T", default_value_t = 2048))]
    pub tokens: usize,
    /// Anchors of the packed row.
    #[cfg_attr(feature = "clap", arg(long, value_name = "A", default_value_t = 128))]
    pub anchors: usize,
    /// Documents of the packed row, of equal length.
    #[cfg_attr(feature = "clap", arg(long, value_name = "D", default_value_t = 8))]
    pub docs: usize,
    /// Slots of a block.
    #[cfg_attr(feature = "clap", arg(long, value_name = "B", default_value_t = DEFAULT_BLOCK_SIZE))]
    pub block: usize,
    /// Layers of the draft.
    #[cfg_attr(feature = "clap", arg(long, value_name = "L", default_value_t = DEFAULT_LAYERS))]
    pub layers: usize,
    /// Number of auxiliary layers of the target.
    #[cfg_attr(feature = "clap", arg(long, alias = "captures", value_name = "K", default_value_t = DEFAULT_AUX_LAYERS))]
    #[serde(rename = "captures")]
    pub aux_layers: usize,
    /// Timed steps, after --warmup steps.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 5))]
    pub steps: usize,
    /// Steps before the timed ones.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 2))]
    pub warmup: usize,
    /// Where to compute: auto, cpu, cuda or cuda:N.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DEVICE", default_value_t = Device::Auto))]
    pub device: Device,
    /// The CPU instruction level.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten))]
    pub processor: ProcessorSettings,
    /// Seed of weights, tokens and anchors.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 0))]
    pub seed: u64,
    /// Memory of one chunk of logits, MiB. Default: as in training on the device.
    #[cfg_attr(feature = "clap", arg(long, value_name = "MIB"))]
    pub loss_chunk_mib: Option<usize>,
    /// After the steps, time each of their matrix products by itself, attention's kernels, a copy
    /// and the host's time per operator; `dflash plan --measured` reads the --json output.
    #[cfg_attr(feature = "clap", arg(long))]
    pub products: bool,
    /// Print one JSON line instead of a table.
    #[cfg_attr(feature = "clap", arg(long))]
    pub json: bool,
}

/// What is decoded.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct BenchDecodeSettings {
    /// The target model: a Hugging Face model directory, or its name OWNER/NAME on the Hub.
    #[cfg_attr(feature = "clap", arg(long, visible_aliases = ["model", "verifier-name-or-path"], value_name = "DIR|REPO", env = "DFLASH_MODEL"))]
    pub target: String,
    /// The drafter: its directory, that of a run, or its name OWNER/NAME on the Hub.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR|REPO"))]
    pub draft: String,
    /// Prompts, JSON or JSONL, of any layout that `dflash eval` takes.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub prompts: PathBuf,
    /// Use only the first N rows of the prompts.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 100))]
    pub limit: usize,
    /// Longest answer, in tokens.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 220))]
    pub max_new_tokens: usize,
    /// Where to compute: auto, cpu, cuda or cuda:N.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DEVICE", default_value_t = Device::Auto))]
    pub device: Device,
    /// Type of weights and activations. auto: bfloat16 on a GPU, float32 on a CPU.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t = Dtype::Auto))]
    pub dtype: Dtype,
    /// The CPU instruction level.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten))]
    pub processor: ProcessorSettings,
    /// Time the draft even if it was made for another target.
    #[cfg_attr(feature = "clap", arg(long))]
    pub allow_other_target: bool,
    /// Print one JSON line instead of a table.
    #[cfg_attr(feature = "clap", arg(long))]
    pub json: bool,
}

/// Which target is timed, and how.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct BenchTargetSettings {
    /// The target model: a Hugging Face model directory, or its name OWNER/NAME on the Hub.
    #[cfg_attr(feature = "clap", arg(long, visible_aliases = ["model", "verifier-name-or-path"], value_name = "DIR|REPO", env = "DFLASH_MODEL"))]
    pub target: String,
    /// Context lengths of the timed steps, in tokens.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", action = clap::ArgAction::Set, value_delimiter = ',', default_value = "0,2048,16384"))]
    pub contexts: Vec<usize>,
    /// Timed steps at each context length.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 16))]
    pub steps: usize,
    /// Rows of a step: one is plain decoding, more are blocks to verify.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 1))]
    pub rows: usize,
    /// Lengths of the timed prompts, in tokens.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", action = clap::ArgAction::Set, value_delimiter = ',', default_value = "8,35,128,512"))]
    pub prompts: Vec<usize>,
    /// Type of weights and activations. auto: float32.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t = Dtype::Auto))]
    pub dtype: Dtype,
    /// The CPU instruction level.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten))]
    pub processor: ProcessorSettings,
    /// Print one JSON line instead of a table.
    #[cfg_attr(feature = "clap", arg(long))]
    pub json: bool,
}

impl BenchSettings {
    /// # Errors
    /// A number out of its range.
    pub fn check(&self) -> Result<(), Invalid> {
        match &self.subject {
            BenchSubject::TrainStep(settings) => settings.check(),
            BenchSubject::Decode(settings) => settings.check(),
            BenchSubject::Target(settings) => settings.check(),
        }
    }

    /// The CPU instruction level.
    pub fn processor(&self) -> ProcessorSettings {
        match &self.subject {
            BenchSubject::TrainStep(settings) => settings.processor,
            BenchSubject::Decode(settings) => settings.processor,
            BenchSubject::Target(settings) => settings.processor,
        }
    }
}

impl BenchDecodeSettings {
    fn check(&self) -> Result<(), Invalid> {
        within([
            ("limit", self.limit as u64, 1..=MOST_ROWS),
            ("max_new_tokens", self.max_new_tokens as u64, 2..=MOST_TOKENS),
        ])?;
        self.processor.check()
    }
}

impl BenchTargetSettings {
    fn check(&self) -> Result<(), Invalid> {
        let most = |all: &[usize]| all.iter().copied().max().unwrap_or(1) as u64;
        let least = self.prompts.iter().copied().min().unwrap_or(1) as u64;
        within([
            ("contexts", most(&self.contexts), 0..=MOST_TOKENS),
            ("steps", self.steps as u64, 1..=MOST_STEPS),
            ("rows", self.rows as u64, 1..=MOST_ROWS_OF_A_STEP),
            ("prompts", most(&self.prompts), 1..=MOST_TOKENS),
            ("prompts", least, 1..=MOST_TOKENS),
        ])?;
        self.processor.check()
    }
}

impl TrainStepSettings {
    fn check(&self) -> Result<(), Invalid> {
        within([
            ("tokens", self.tokens as u64, 1..=MOST_TOKENS),
            ("anchors", self.anchors as u64, 1..=MOST_TOKENS),
            ("docs", self.docs as u64, 1..=MOST_TOKENS),
            ("layers", self.layers as u64, 1..=MOST_DRAFT_LAYERS),
            ("steps", self.steps as u64, 1..=MOST_STEPS),
            ("warmup", self.warmup as u64, 0..=MOST_STEPS),
            ("aux_layers", self.aux_layers as u64, 1..=MOST_LAYERS),
        ])?;
        self.processor.check()?;
        check_loss_chunk(self.loss_chunk_mib)?;
        block_size("block", self.block)
    }
}
