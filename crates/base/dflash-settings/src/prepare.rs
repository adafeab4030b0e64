//! The settings of `dflash prepare`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::check::{Invalid, MOST_ROWS, MOST_THREADS, MOST_TOKENS, positive, within};

/// The target of DFlash's own guide; the default.
pub const DEFAULT_TARGET: &str = "Qwen/Qwen3-8B";

/// The short names of datasets that the field's tools share, and what they stand for.
pub const DATA_PRESETS: [(&str, &str); 9] = [
    ("sharegpt", "hf:Aeala/ShareGPT_Vicuna_unfiltered"),
    ("ultrachat", "hf:HuggingFaceH4/ultrachat_200k:train_sft"),
    ("gsm8k", "hf:openai/gsm8k:main:train"),
    ("magpie", "hf:Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered"),
    ("open-perfectblend", "hf:mlabonne/open-perfectblend"),
    ("nemotron", "hf:nvidia/Llama-Nemotron-Post-Training-Dataset:SFT:chat"),
    ("codealpaca", "hf:HuggingFaceH4/CodeAlpaca_20K"),
    ("openorca", "hf:Open-Orca/OpenOrca"),
    ("dolly", "hf:databricks/databricks-dolly-15k"),
];

/// A TB.
const MOST_SHARD_MB: f64 = 1e6;

/// Turn conversations into a tokenized, masked dataset.
///
/// Renders every conversation with the target's own chat template, marks the assistant's text as
/// supervised, and writes a dataset that `dflash train`, speculators and `datasets.load_from_disk`
/// read. Rows may be ShareGPT (conversations), OpenAI (messages), question/answer,
/// instruction/input/output, prompt/completion, or pre-tokenized (input_ids/loss_mask).
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct PrepareSettings {
    /// The target model: a Hugging Face model directory, or its name OWNER/NAME on the Hub. Only the
    /// tokenizer and the chat template are used [default: Qwen/Qwen3-8B].
    #[cfg_attr(feature = "clap", arg(long, visible_aliases = ["model", "verifier-name-or-path"], value_name = "DIR|REPO", env = "DFLASH_MODEL"))]
    pub target: Option<String>,
    /// A .jsonl, .json or .parquet file, a directory of them, a preset (sharegpt, ultrachat,
    /// gsm8k, magpie, open-perfectblend, nemotron, codealpaca, openorca, dolly), or
    /// hf:OWNER/NAME, hf:OWNER/NAME:CONFIG or hf:OWNER/NAME:CONFIG:SPLIT. May be given several times.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE|PRESET", required = true, num_args = 1..))]
    pub data: Vec<String>,
    /// Directory of the new dataset [default: output/dflash_TARGET_DATA].
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    pub output: Option<PathBuf>,
    /// Longest row in tokens; longer ones are cut.
    #[cfg_attr(feature = "clap", arg(long, value_name = "TOKENS", default_value_t = 8192))]
    pub seq_length: usize,
    /// Use at most N input rows of all --data together.
    #[cfg_attr(feature = "clap", arg(long, value_name = "ROWS", alias = "max-samples"))]
    pub limit: Option<usize>,
    /// Shuffle the input rows with this seed; with --limit, draw them at random. Keeps the drawn
    /// rows in memory. (Training shuffles every epoch anyway.)
    #[cfg_attr(feature = "clap", arg(long, value_name = "SEED"))]
    pub shuffle_seed: Option<u64>,
    /// Threads that render and tokenize [default: all cores]. The result does not depend on it.
    #[cfg_attr(
        feature = "clap",
        arg(
            long,
            value_name = "N",
            visible_alias = "num-proc",
            alias = "num-preprocessing-workers"
        )
    )]
    pub workers: Option<usize>,
    /// Drop rows with fewer supervised tokens than this.
    #[cfg_attr(feature = "clap", arg(long, value_name = "TOKENS", default_value_t = 1))]
    pub minimum_valid_tokens: usize,
    /// Start a new shard at this size, MB.
    #[cfg_attr(feature = "clap", arg(long, value_name = "MB", default_value_t = 500.0))]
    pub shard_mb: f64,
    /// Replace the dataset at --output.
    #[cfg_attr(feature = "clap", arg(long))]
    pub overwrite: bool,
    /// Drop and count rows that are broken, instead of stopping at the first one.
    #[cfg_attr(feature = "clap", arg(long))]
    pub skip_bad_rows: bool,
    /// Variables for the chat template as a JSON object, such as '{"enable_thinking": false}'.
    #[cfg_attr(feature = "clap", arg(long, value_name = "JSON", value_parser = json_object))]
    pub chat_template_kwargs: Option<Map<String, Value>>,
}

#[cfg(feature = "clap")]
pub(crate) fn json_object(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("not a JSON object: {error}"))
}

impl PrepareSettings {
    /// The target, given or default.
    pub fn target(&self) -> &str {
        self.target.as_deref().unwrap_or(DEFAULT_TARGET)
    }

    /// Threads that render and tokenize.
    pub fn workers(&self) -> usize {
        self.workers.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// # Errors
    /// A number out of its range.
    pub fn check(&self) -> Result<(), Invalid> {
        positive([("shard_mb", self.shard_mb, MOST_SHARD_MB)])?;
        within([
            // a row of one token has nothing to predict
            ("seq_length", self.seq_length as u64, 2..=MOST_TOKENS),
            ("minimum_valid_tokens", self.minimum_valid_tokens as u64, 1..=MOST_TOKENS),
            ("limit", self.limit.unwrap_or(1) as u64, 1..=MOST_ROWS),
            ("workers", self.workers.unwrap_or(1) as u64, 1..=MOST_THREADS),
        ])
    }

    /// Where the dataset goes: by default `output/dflash_<target>_<data>`, as in DFlash's guide.
    pub fn output(&self) -> PathBuf {
        self.output.clone().unwrap_or_else(|| {
            let names = self.data.iter().map(|spec| slug(spec));
            let name: Vec<String> = [slug(self.target())].into_iter().chain(names).collect();
            PathBuf::from("output").join(format!("dflash_{}", name.join("_")))
        })
    }
}

/// The last part of a path or name without its ending, in lower case, words joined by `_`.
fn slug(text: &str) -> String {
    let last = text.trim_end_matches('/').rsplit('/').next().unwrap_or(text);
    let stem = [".jsonl", ".json", ".parquet"]
        .iter()
        .find_map(|ending| last.strip_suffix(ending))
        .unwrap_or(last);
    stem.to_lowercase().replace(|c: char| !c.is_ascii_alphanumeric(), "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_output_is_the_one_of_the_guide() {
        let check = |target: Option<&str>, data: &[&str], expect: &str| {
            let settings = serde_json::json!({
                "target": target, "data": data, "seq_length": 1, "minimum_valid_tokens": 1,
                "shard_mb": 1.0, "overwrite": false, "skip_bad_rows": false,
            });
            let settings: PrepareSettings = serde_json::from_value(settings).unwrap();
            assert_eq!(settings.output(), PathBuf::from(expect));
        };
        check(None, &["sharegpt"], "output/dflash_qwen3_8b_sharegpt");
        let data = ["data/a.b.jsonl", "gsm8k"];
        check(Some("/models/My-LLM/"), &data, "output/dflash_my_llm_a_b_gsm8k");
    }
}
