//! The settings of `dflash generate`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::check::{
    Invalid, MOST_TEMPERATURE, MOST_TOKENS, MOST_VOCABULARY, from_zero, positive, within,
};
use crate::choices::{ColorChoice, Device, Dtype, Speculate};
#[cfg(feature = "clap")]
use crate::prepare::json_object;
use crate::processor::ProcessorSettings;

/// Answer a prompt, or chat, in the terminal.
///
/// Without a prompt it chats if standard input is a terminal, and otherwise reads the prompt from
/// standard input. The answer is streamed to standard output.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct GenerateSettings {
    /// The prompt.
    #[cfg_attr(feature = "clap", arg(value_name = "PROMPT", conflicts_with = "prompt_file"))]
    pub prompt: Option<String>,
    /// The target model: a Hugging Face model directory, or its name OWNER/NAME on the Hub.
    #[cfg_attr(feature = "clap", arg(long, visible_aliases = ["model", "verifier-name-or-path"], value_name = "DIR|REPO", env = "DFLASH_MODEL"))]
    pub target: String,
    /// The drafter: its directory, that of a run (its best checkpoint, or the newest if nothing was
    /// validated), RUN_DIR/latest or RUN_DIR/best, or its name OWNER/NAME on the Hub; `ngram`
    /// proposes the tokens that followed an earlier occurrence of the last few. Without it the
    /// target decodes alone.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR|REPO"))]
    pub draft: Option<String>,
    /// Tokens that the draft proposes at a time: auto chooses in each step as many as pay, none if
    /// plain decoding is faster; off proposes none.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N|auto|off", default_value_t = Speculate::Auto))]
    #[serde(default)]
    pub speculate: Speculate,
    /// File with the prompt.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub prompt_file: Option<PathBuf>,
    /// System prompt of the conversation.
    #[cfg_attr(feature = "clap", arg(long, value_name = "TEXT"))]
    pub system: Option<String>,
    /// Pass the prompt to the target unchanged, without the chat template.
    #[cfg_attr(feature = "clap", arg(long, conflicts_with = "system"))]
    pub raw: bool,
    /// Variables for the chat template as a JSON object, such as '{"enable_thinking": false}'.
    #[cfg_attr(feature = "clap", arg(long, value_name = "JSON", value_parser = json_object))]
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Longest answer, in tokens.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 512))]
    pub max_new_tokens: usize,
    /// Sample at this temperature; 0 is greedy.
    #[cfg_attr(feature = "clap", arg(long, value_name = "T", default_value_t = 0.0))]
    pub temperature: f64,
    /// Sample from the most likely tokens whose probabilities sum to this.
    #[cfg_attr(feature = "clap", arg(long, value_name = "P", default_value_t = 1.0))]
    pub top_p: f64,
    /// Sample from this many of the most likely tokens. Default: all.
    #[cfg_attr(feature = "clap", arg(long, value_name = "K"))]
    pub top_k: Option<usize>,
    /// Random seed for sampling.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 0))]
    pub seed: u64,
    /// End the answer before this text. May be given several times.
    #[cfg_attr(feature = "clap", arg(long, value_name = "TEXT", action = clap::ArgAction::Append))]
    #[serde(default)]
    pub stop: Vec<String>,
    /// Show accepted draft tokens of each block (green, or {+so+} without colors) and rejected ones
    /// (red, or [-so-]), and at the end the acceptance length and the speed compared with plain
    /// decoding.
    #[cfg_attr(feature = "clap", arg(long))]
    pub show_blocks: bool,
    /// Whether --show-blocks uses colors. auto: on a terminal, unless NO_COLOR is set or TERM is dumb.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t = ColorChoice::Auto))]
    pub color: ColorChoice,
    /// Use the draft even if it was made for another target.
    #[cfg_attr(feature = "clap", arg(long))]
    pub allow_other_target: bool,
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

impl GenerateSettings {
    /// # Errors
    /// A number out of its range, an empty stop string.
    pub fn check(&self) -> Result<(), Invalid> {
        within([
            ("max_new_tokens", self.max_new_tokens as u64, 1..=MOST_TOKENS),
            ("top_k", self.top_k.unwrap_or(1) as u64, 1..=MOST_VOCABULARY),
        ])?;
        from_zero([("temperature", self.temperature, MOST_TEMPERATURE)])?;
        positive([("top_p", self.top_p, 1.0)])?;
        if self.stop.iter().any(String::is_empty) {
            return Err(Invalid::new(
                "stop",
                "empty",
                "every answer has that; it must be some text",
            ));
        }
        self.processor.check()
    }
}
