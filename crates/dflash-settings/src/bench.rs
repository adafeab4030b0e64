//! The settings of `dflash bench`.

use serde::{Deserialize, Serialize};

use crate::check::{Invalid, MOST_LAYERS, MOST_TOKENS, block_size, within};
use crate::choices::Device;
use crate::draft::{DEFAULT_BLOCK_SIZE, DEFAULT_CAPTURES, DEFAULT_LAYERS, MOST_DRAFT_LAYERS};

/// Nobody waits for more.
const MOST_STEPS: u64 = 1_000_000;

/// What can be timed.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Subcommand))]
#[serde(rename_all = "snake_case")]
pub enum BenchSubject {
    /// One optimizer step: forward, backward, clipping and AdamW on random hidden states.
    TrainStep(TrainStepSettings),
}

/// Time parts of the work on random data.
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
    /// Captured layers of the target.
    #[cfg_attr(feature = "clap", arg(long, value_name = "K", default_value_t = DEFAULT_CAPTURES))]
    pub captures: usize,
    /// Timed steps, after --warmup others.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 5))]
    pub steps: usize,
    /// Steps before the timed ones.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 2))]
    pub warmup: usize,
    /// Where to compute: auto, cpu, cuda or cuda:N.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DEVICE", default_value_t = Device::Auto))]
    pub device: Device,
    /// Seed of weights, tokens and anchors.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 0))]
    pub seed: u64,
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
        }
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
            ("captures", self.captures as u64, 1..=MOST_LAYERS),
        ])?;
        block_size("block", self.block)
    }
}
