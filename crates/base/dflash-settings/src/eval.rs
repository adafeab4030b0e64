//! The settings of `dflash eval`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::check::{
    Invalid, MOST_ROWS, MOST_SECONDS, MOST_TEMPERATURE, MOST_TOKENS, from_zero, needs, within,
};
use crate::choices::{Device, Dtype, Speculate, Thinking};
use crate::processor::ProcessorSettings;

/// More than the difference of any two logits.
const MOST_TOLERANCE: f64 = 1e6;
/// Requests at a time: more than any server takes.
const MOST_CONCURRENCY: u64 = 65536;
/// Far more than lookup guesses right; each costs a row of the target's pass.
const MOST_PROPOSALS: u64 = 1024;

/// The draft name for plain decoding only.
pub const NO_DRAFT: &str = "none";
/// The draft name for lookup decoding.
pub const NGRAM_DRAFT: &str = "ngram";
/// The longest sequence of last tokens that it looks up.
pub const NGRAM_SIZE: usize = 3;
/// The tokens that it proposes at a time.
pub const NGRAM_TOKENS: usize = 10;

/// Measure drafters: real speculative decoding against plain decoding.
///
/// Answers every prompt without and with each drafter, and prints acceptance, speed-up and whether
/// the texts are identical token for token. With --endpoint, measures a running vLLM, SGLang,
/// llama.cpp or dflash server by its own counters.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct EvalSettings {
    /// The target model: a Hugging Face model directory, or its name OWNER/NAME on the Hub. Needed
    /// without --endpoint.
    #[cfg_attr(feature = "clap", arg(long, visible_aliases = ["model", "verifier-name-or-path"], value_name = "DIR|REPO", env = "DFLASH_MODEL"))]
    pub target: Option<String>,
    /// A drafter: its directory, that of a run (its best checkpoint, or the newest if nothing was
    /// validated), RUN_DIR/latest or RUN_DIR/best, or its name OWNER/NAME on the Hub; `ngram`
    /// proposes the tokens that followed an earlier occurrence of the last few, and `none` is plain
    /// decoding. May be given several times: the drafters are measured together.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR|REPO"))]
    pub draft: Vec<String>,
    /// Prompts: a set by name (gsm8k, math500, aime24, aime25, humaneval, mbpp, livecodebench,
    /// swe-bench, mt_bench, alpaca, or all of them: all), or FILE or NAME=FILE, JSON, JSONL or
    /// Parquet with question/answer, messages, ShareGPT, `turns` or input_ids rows. Several are
    /// reported separately.
    #[cfg_attr(feature = "clap", arg(long, visible_alias = "sets", value_name = "SET|FILE", required = true, num_args = 1..))]
    pub prompts: Vec<String>,
    /// Longest answer, in tokens.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 256))]
    pub max_new_tokens: usize,
    /// Use only the first N rows of each set. Default: all of a file; of a named set 128, or all of
    /// aime24, aime25, humaneval and mt_bench.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub limit: Option<usize>,
    /// Ask only the first question of rows with several turns.
    #[cfg_attr(feature = "clap", arg(long))]
    pub first_turn: bool,
    /// Sample at these temperatures; 0 is greedy. Several are measured in turn.
    #[cfg_attr(feature = "clap", arg(long, value_name = "T", action = clap::ArgAction::Set, value_delimiter = ',', default_value = "0"))]
    pub temperature: Vec<f64>,
    /// Whether the target thinks before it answers: on and off set `enable_thinking` for its chat
    /// template, auto does not set it. Several are measured in turn.
    #[cfg_attr(feature = "clap", arg(long, value_enum, value_name = "MODE", action = clap::ArgAction::Set, value_delimiter = ',', default_values_t = [Thinking::Auto]))]
    pub thinking: Vec<Thinking>,
    /// Number of answers made at a time. Several are measured in turn.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", action = clap::ArgAction::Set, value_delimiter = ',', default_value = "1"))]
    pub concurrency: Vec<usize>,
    /// Random seed for sampling.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 0))]
    pub seed: u64,
    /// Tokens that each drafter proposes at a time: numbers, or auto, which chooses in each step as
    /// many as pay. Several are measured in turn. Default: whole blocks, and auto.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N|auto", action = clap::ArgAction::Set, value_delimiter = ','))]
    #[serde(default)]
    pub speculate: Vec<Speculate>,
    /// For `ngram`: the longest sequence of last tokens that is looked up; then shorter ones, down
    /// to one token.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = NGRAM_SIZE))]
    pub ngram_size: usize,
    /// For `ngram`: tokens proposed at a time.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = NGRAM_TOKENS))]
    pub ngram_tokens: usize,
    /// Do not store the results beside the measured checkpoints, from where `dflash push` publishes
    /// them.
    #[cfg_attr(feature = "clap", arg(long))]
    #[serde(default)]
    pub no_record: bool,
    /// Also write the report as JSON.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub json: Option<PathBuf>,
    /// Also write every metric as CSV, one line per set, mode and draft.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub csv: Option<PathBuf>,
    /// Also write the tables as Markdown.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub markdown: Option<PathBuf>,
    /// Also write one HTML page with tables and plots.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub html: Option<PathBuf>,
    /// Write all four into this directory: eval.json, eval.csv, eval.md, eval.html.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR"))]
    pub output: Option<PathBuf>,
    /// The JSON of an earlier report: print the changes, and how many standard errors they are.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub baseline: Option<PathBuf>,
    /// Measure a running server instead: its URL, such as http://localhost:8000/v1. OPENAI_API_KEY
    /// is its key, if it needs one.
    #[cfg_attr(feature = "clap", arg(long, value_name = "URL"))]
    pub endpoint: Option<String>,
    /// With --endpoint: a server of the same target without a drafter, for the speed-up.
    #[cfg_attr(feature = "clap", arg(long, value_name = "URL"))]
    pub plain_endpoint: Option<String>,
    /// With --endpoint: the model name to request. Default: the first that the server lists.
    #[cfg_attr(feature = "clap", arg(long, value_name = "NAME"))]
    pub endpoint_model: Option<String>,
    /// With --endpoint: timeout of an answer, in seconds.
    #[cfg_attr(feature = "clap", arg(long, value_name = "SECONDS", default_value_t = 600))]
    pub request_timeout: u64,
    /// Treat two tokens as a tie if their logits differ by no more than this. Default: by --dtype,
    /// in units in the last place of the logits.
    #[cfg_attr(feature = "clap", arg(long, value_name = "X"))]
    pub tie_tolerance: Option<f64>,
    /// Measure the draft even if it was made for another target.
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

impl Default for EvalSettings {
    /// The defaults of the flags.
    fn default() -> Self {
        Self {
            target: None,
            draft: Vec::new(),
            prompts: Vec::new(),
            max_new_tokens: 256,
            limit: None,
            first_turn: false,
            temperature: vec![0.0],
            thinking: vec![Thinking::Auto],
            concurrency: vec![1],
            seed: 0,
            speculate: Vec::new(),
            ngram_size: NGRAM_SIZE,
            ngram_tokens: NGRAM_TOKENS,
            no_record: false,
            json: None,
            csv: None,
            markdown: None,
            html: None,
            output: None,
            baseline: None,
            endpoint: None,
            plain_endpoint: None,
            endpoint_model: None,
            request_timeout: 600,
            tie_tolerance: None,
            allow_other_target: false,
            device: Device::Auto,
            dtype: Dtype::Auto,
            processor: ProcessorSettings::default(),
        }
    }
}

impl EvalSettings {
    /// # Errors
    /// A number out of its range, or settings that cannot be combined.
    pub fn check(&self) -> Result<(), Invalid> {
        within([
            ("max_new_tokens", self.max_new_tokens as u64, 1..=MOST_TOKENS),
            ("limit", self.limit.unwrap_or(1) as u64, 1..=MOST_ROWS),
            ("ngram_size", self.ngram_size as u64, 1..=MOST_TOKENS),
            ("ngram_tokens", self.ngram_tokens as u64, 1..=MOST_PROPOSALS),
            ("request_timeout", self.request_timeout, 1..=MOST_SECONDS),
        ])?;
        for &temperature in &self.temperature {
            from_zero([("temperature", temperature, MOST_TEMPERATURE)])?;
        }
        for &concurrency in &self.concurrency {
            within([("concurrency", concurrency as u64, 1..=MOST_CONCURRENCY)])?;
        }
        if self.speculate.contains(&Speculate::Off) {
            let expected = "plain decoding is measured in any case; name numbers, or auto";
            return Err(Invalid::new("speculate", Speculate::Off, expected));
        }
        once("draft", &self.draft)?;
        once("prompts", &self.prompts)?;
        once("temperature", &self.temperature)?;
        let thinking = self.thinking.iter().map(|mode| format!("{mode:?}").to_lowercase());
        once("thinking", &thinking.collect::<Vec<_>>())?;
        once("concurrency", &self.concurrency)?;
        once("speculate", &self.speculate)?;
        from_zero([("tie_tolerance", self.tie_tolerance.unwrap_or_default(), MOST_TOLERANCE)])?;
        self.processor.check()?;
        match self.endpoint {
            Some(_) => self.check_with_endpoint(),
            None => self.check_in_process(),
        }
    }

    fn check_in_process(&self) -> Result<(), Invalid> {
        if self.target.is_none() {
            return Err(missing(
                "target",
                "is needed: the target model, or --endpoint for a server",
            ));
        }
        if self.draft.is_empty() {
            return Err(missing(
                "draft",
                "is needed: a drafter, ngram, or none for plain decoding only",
            ));
        }
        match (&self.plain_endpoint, &self.endpoint_model) {
            (Some(_), _) => Err(needs("plain_endpoint", "endpoint")),
            (_, Some(_)) => Err(needs("endpoint_model", "endpoint")),
            (None, None) => Ok(()),
        }
    }

    fn check_with_endpoint(&self) -> Result<(), Invalid> {
        match self.draft.first() {
            Some(draft) => {
                let expected = "with --endpoint the server has its own; leave --draft out";
                Err(Invalid::new("draft", draft, expected))
            }
            None => Ok(()),
        }
    }
}

/// Refuses values that would be measured and counted twice.
fn once<T: PartialEq + std::fmt::Display>(key: &'static str, all: &[T]) -> Result<(), Invalid> {
    match all.iter().enumerate().find(|(at, one)| all[..*at].contains(one)) {
        Some((_, one)) => Err(Invalid::new(key, one, "named twice; name it once")),
        None => Ok(()),
    }
}

/// Refuses settings without `key`: `reason` begins with "is needed".
fn missing(key: &'static str, reason: &str) -> Invalid {
    Invalid { key, reason: reason.to_owned(), missing: Some(key) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(change: impl FnOnce(&mut EvalSettings)) -> String {
        let mut settings = EvalSettings {
            target: Some("t".into()),
            draft: vec!["d".into()],
            ..EvalSettings::default()
        };
        change(&mut settings);
        settings.check().err().map(|invalid| invalid.to_string()).unwrap_or_default()
    }

    #[test]
    fn what_does_not_go_together_is_refused_with_the_remedy() {
        assert_eq!(refusal(|_| ()), "");
        assert!(refusal(|s| s.target = None).starts_with("--target is needed"));
        assert!(refusal(|s| s.draft.clear()).contains("none for plain decoding only"));
        assert!(refusal(|s| s.temperature = vec![0.0, -1.0]).starts_with("--temperature is -1"));
        assert!(refusal(|s| s.speculate = vec![Speculate::Off]).contains("in any case"));
        assert_eq!(
            refusal(|s| s.draft = vec!["a".into(), "b".into(), "a".into()]),
            "--draft is a, but named twice; name it once"
        );
        assert!(refusal(|s| s.temperature = vec![0.0, 0.0]).contains("named twice"));
        assert!(refusal(|s| s.concurrency = vec![0]).starts_with("--concurrency is 0"));
        assert_eq!(
            refusal(|s| s.plain_endpoint = Some("http://h".into())),
            "--plain-endpoint needs --endpoint"
        );
        let served = refusal(|s| s.endpoint = Some("http://h".into()));
        assert!(served.contains("leave --draft out"), "{served}");
        let served = refusal(|s| {
            s.endpoint = Some("http://h".into());
            s.draft.clear();
            s.target = None;
            s.concurrency = vec![1, 8];
        });
        assert_eq!(served, "");
    }
}
