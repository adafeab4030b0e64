//! What a run is told.

use std::path::PathBuf;

use serde_json::{Map, Value};

/// The target of DFlash's own guide; used when no model is named.
pub const DEFAULT_MODEL: &str = "Qwen/Qwen3-8B";

/// The settings of one run.
#[derive(Debug, Clone)]
pub struct Config {
    /// A Hugging Face model directory, or a model's name on the Hub.
    pub model: String,
    /// Files, directories, presets or `hf:owner/name[:config[:split]]`, read in this order.
    pub data: Vec<String>,
    /// Directory of the new dataset.
    pub output: PathBuf,
    /// Longest row in tokens; longer ones are cut.
    pub seq_length: usize,
    /// Rows with fewer supervised tokens are dropped; at least 1.
    pub minimum_valid_tokens: usize,
    /// Take so many input rows, over all sources together.
    pub limit: Option<usize>,
    /// Shuffle the input rows; with a limit, draw them at random.
    pub shuffle_seed: Option<u64>,
    /// Threads that render and tokenize.
    pub workers: usize,
    /// Start a new shard at this size.
    pub shard_bytes: u64,
    /// Replace a dataset at the output.
    pub overwrite: bool,
    /// Drop and count rows that cannot be understood, instead of stopping at the first.
    pub skip_bad_rows: bool,
    /// Further variables of the chat template, such as `enable_thinking`.
    pub template_variables: Map<String, Value>,
}

/// Where a dataset goes when nobody says: `output/dflash_<model>_<data>`, as in DFlash's guide.
pub fn default_output(model: &str, data: &[String]) -> PathBuf {
    let mut name = format!("dflash_{}", slug(model));
    for spec in data {
        name.push('_');
        name.push_str(&slug(spec));
    }
    PathBuf::from("output").join(name)
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
        let check = |model: &str, data: &[&str], expect: &str| {
            let data: Vec<String> = data.iter().map(|&spec| spec.to_owned()).collect();
            assert_eq!(default_output(model, &data), PathBuf::from(expect));
        };
        check(DEFAULT_MODEL, &["sharegpt"], "output/dflash_qwen3_8b_sharegpt");
        check("/models/My-LLM/", &["data/a.b.jsonl", "gsm8k"], "output/dflash_my_llm_a_b_gsm8k");
    }
}
