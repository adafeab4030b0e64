//! The settings of `dflash demo-target`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::check::{Invalid, within};

/// The corpus is made in memory, from a language of a few thousand words.
const MOST: u64 = 1_000_000;
/// Far larger than any cache.
const MOST_MEGABYTES: u64 = 100_000;

/// Make the demo's corpus and train its tiny target.
///
/// Writes DIR/conversations.jsonl, DIR/prompts.jsonl (held out for `dflash eval`) and DIR/target, a
/// Hugging Face model directory with tokenizer, chat template and a small Qwen3. Everything follows
/// from the seed; nothing is downloaded.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct DemoTargetSettings {
    /// Directory to write; stages that are complete there are kept.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    pub output: PathBuf,
    /// Conversations of the corpus.
    #[cfg_attr(feature = "clap", arg(long, value_name = "ROWS", default_value_t = 6000))]
    pub rows: usize,
    /// Conversations held out as prompts for `dflash eval`.
    #[cfg_attr(feature = "clap", arg(long, value_name = "ROWS", default_value_t = 64))]
    pub held_out: usize,
    /// Optimizer steps of the target's training.
    #[cfg_attr(feature = "clap", arg(long, value_name = "STEPS", default_value_t = 300))]
    pub steps: usize,
    /// Tokens of an optimizer step. A short training learns more from many small steps.
    #[cfg_attr(feature = "clap", arg(long, value_name = "TOKENS", default_value_t = DemoTargetSettings::STEP_TOKENS))]
    #[serde(default = "default_step_tokens")]
    pub step_tokens: usize,
    /// Seed of the corpus, the initial weights and the order of training.
    #[cfg_attr(feature = "clap", arg(long, default_value_t = 0))]
    pub seed: u64,
    /// Also write DIR/wide: the same target with its MLPs widened by zeros until its weights take
    /// MB megabytes. Its output is the same, but its weights are read from memory instead of a
    /// cache, as in real models.
    #[cfg_attr(feature = "clap", arg(long, value_name = "MB"))]
    #[serde(default)]
    pub widen_to: Option<u64>,
}

fn default_step_tokens() -> usize {
    DemoTargetSettings::STEP_TOKENS
}

impl DemoTargetSettings {
    /// Tokens of a step where none are given.
    pub const STEP_TOKENS: usize = 2048;

    /// # Errors
    /// A number out of its range.
    pub fn check(&self) -> Result<(), Invalid> {
        if let Some(megabytes) = self.widen_to {
            within([("widen_to", megabytes, 1..=MOST_MEGABYTES)])?;
        }
        within([
            ("rows", self.rows as u64, 1..=MOST),
            ("held_out", self.held_out as u64, 1..=MOST),
            ("steps", self.steps as u64, 1..=MOST),
            ("step_tokens", self.step_tokens as u64, 1..=MOST),
        ])
    }
}
