//! The settings of `dflash eval`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::check::{Invalid, MOST_ROWS, MOST_TEMPERATURE, MOST_TOKENS, from_zero, within};
use crate::choices::{Device, Dtype};

/// Beyond the difference of any two logits.
const MOST_TOLERANCE: f64 = 1e6;

/// Measure a drafter: real speculative decoding against plain greedy decoding.
///
/// Answers every prompt twice, with and without the drafter, and prints acceptance, speed and
/// whether the texts are identical token for token.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct EvalSettings {
    /// The target model: a Hugging Face model directory, or its name OWNER/NAME on the Hub.
    #[cfg_attr(feature = "clap", arg(long, visible_aliases = ["model", "verifier-name-or-path"], value_name = "DIR|REPO", env = "DFLASH_MODEL"))]
    pub target: String,
    /// The drafter: its directory, that of a run (its best checkpoint, or the newest where nothing was
    /// validated), RUN_DIR/latest or RUN_DIR/best, or its name OWNER/NAME on the Hub.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR|REPO"))]
    pub draft: String,
    /// Prompts, JSON or JSONL: question/answer, messages, ShareGPT, `turns` or input_ids rows.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub prompts: PathBuf,
    /// Longest answer, in tokens.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 256))]
    pub max_new_tokens: usize,
    /// Use only the first N rows of the prompts.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub limit: Option<usize>,
    /// Also write the report as JSON.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub json: Option<PathBuf>,
    /// Sample at this temperature, with exact speculative sampling; 0 is greedy.
    #[cfg_attr(feature = "clap", arg(long, value_name = "T", default_value_t = 0.0))]
    pub temperature: f64,
    /// Seed of the samples.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 0))]
    pub seed: u64,
    /// Two tokens whose logits differ by no more than this are a tie. Default: by --dtype, in units
    /// in the last place of the logits.
    #[cfg_attr(feature = "clap", arg(long, value_name = "X"))]
    pub tie_tolerance: Option<f64>,
    /// Measure the draft although it was made for another target.
    #[cfg_attr(feature = "clap", arg(long))]
    pub allow_other_target: bool,
    /// Where to compute: auto, cpu, cuda or cuda:N.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DEVICE", default_value_t = Device::Auto))]
    pub device: Device,
    /// Type of weights and activations. auto: bfloat16 on a GPU, float32 on a CPU.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t = Dtype::Auto))]
    pub dtype: Dtype,
}

impl EvalSettings {
    /// # Errors
    /// A number out of its range.
    pub fn check(&self) -> Result<(), Invalid> {
        within([
            ("max_new_tokens", self.max_new_tokens as u64, 1..=MOST_TOKENS),
            ("limit", self.limit.unwrap_or(1) as u64, 1..=MOST_ROWS),
        ])?;
        from_zero([
            ("temperature", self.temperature, MOST_TEMPERATURE),
            ("tie_tolerance", self.tie_tolerance.unwrap_or_default(), MOST_TOLERANCE),
        ])
    }
}
