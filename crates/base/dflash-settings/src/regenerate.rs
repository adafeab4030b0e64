//! The settings of `dflash regenerate`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::check::{Invalid, MOST_ROWS, MOST_TOKENS, within};
use crate::choices::{Device, Dtype, Speculate};
use crate::processor::ProcessorSettings;

/// Maximum batch: each sequence has its own cache.
const MOST_BATCH: u64 = 65536;

/// Replace the answers of a dataset with the target's own.
///
/// Writes one row per question, in order: question, answer, input_ids, loss_mask, finished. In
/// conversations every answer is regenerated, turn by turn. A stopped run leaves FILE.partial; the
/// same command continues it, and a larger --limit extends a finished file.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct RegenerateSettings {
    /// The target model: a Hugging Face model directory, or its name OWNER/NAME on the Hub.
    #[cfg_attr(feature = "clap", arg(long, visible_aliases = ["model", "verifier-name-or-path"], value_name = "DIR|REPO", env = "DFLASH_MODEL"))]
    pub target: String,
    /// A drafter, which makes decoding faster and does not change the answers: its directory, that
    /// of a run, RUN_DIR/latest or RUN_DIR/best, or its name OWNER/NAME on the Hub; `ngram`
    /// proposes the tokens that followed an earlier occurrence of the last few.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR|REPO"))]
    #[serde(default)]
    pub draft: Option<String>,
    /// Tokens that the draft proposes at a time: auto chooses in each step as many as pay, none if
    /// plain decoding is faster; off proposes none.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N|auto|off", default_value_t = Speculate::Auto))]
    #[serde(default)]
    pub speculate: Speculate,
    /// Use the draft even if it was made for another target.
    #[cfg_attr(feature = "clap", arg(long))]
    #[serde(default)]
    pub allow_other_target: bool,
    /// Conversations or questions, as `dflash prepare` takes them: a .jsonl, .json or .parquet file, a
    /// directory of them, a preset (sharegpt, ultrachat, ...), or hf:OWNER/NAME, hf:OWNER/NAME:CONFIG
    /// or hf:OWNER/NAME:CONFIG:SPLIT. May be given several times.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE|PRESET", required = true, num_args = 1..))]
    pub data: Vec<String>,
    /// JSONL file to write.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub output: PathBuf,
    /// Longest answer, in tokens.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 220))]
    pub max_new_tokens: usize,
    /// Use only the first N rows of the data.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub limit: Option<usize>,
    /// Sequences decoded together.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 128))]
    pub batch: usize,
    /// Start over if --output, or a stopped run's partial file, was made with other settings or
    /// another target.
    #[cfg_attr(feature = "clap", arg(long))]
    pub overwrite: bool,
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
}

impl RegenerateSettings {
    /// # Errors
    /// A number out of its range.
    pub fn check(&self) -> Result<(), Invalid> {
        within([
            ("max_new_tokens", self.max_new_tokens as u64, 1..=MOST_TOKENS),
            ("limit", self.limit.unwrap_or(1) as u64, 1..=MOST_ROWS),
            ("batch", self.batch as u64, 1..=MOST_BATCH),
        ])?;
        self.processor.check()
    }
}
