//! The settings of `dflash serve`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::check::{
    Invalid, LONGEST_WAIT, MOST_MIB, MOST_REQUESTS, MOST_THREADS, MOST_TOKENS, SHORTEST_TIMEOUT,
    port_file, seconds, within,
};
use crate::choices::{Device, Dtype, Speculate};
#[cfg(feature = "clap")]
use crate::prepare::json_object;
use crate::processor::ProcessorSettings;

/// More sequences than any machine can decode together.
const MOST_SEQUENCES: u64 = 4096;

/// Serve a target with its drafter behind OpenAI's HTTP interface.
///
/// POST /v1/chat/completions and /v1/completions, GET /v1/models, /health and /metrics, and a chat
/// page at / that shows which tokens the draft got right. Requests are decoded together, each
/// speculatively.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct ServeSettings {
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
    /// The model name for clients; other names get 404. Default: the target's name, and any other
    /// name is accepted.
    #[cfg_attr(feature = "clap", arg(long, value_name = "NAME"))]
    pub served_model_name: Option<String>,
    /// Interface to listen on; 0.0.0.0 for all.
    #[cfg_attr(feature = "clap", arg(long, default_value = "127.0.0.1"))]
    pub host: String,
    /// Port to listen on; 0 for any free one.
    #[cfg_attr(feature = "clap", arg(long, default_value_t = 8000))]
    pub port: u16,
    /// File to write the port to once requests are accepted.
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub port_file: Option<PathBuf>,
    /// API key that requests to /v1 must carry (`Authorization: Bearer KEY`). Set it in the
    /// environment to hide it from other users of the machine.
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "KEY", env = "DFLASH_API_KEY", hide_env_values = true)
    )]
    pub api_key: Option<String>,
    /// Origins whose web pages may use the server, such as `https://chat.example`, separated by
    /// commas; * for all. By default only the server's own page may.
    #[cfg_attr(feature = "clap", arg(long, value_name = "ORIGIN", action = clap::ArgAction::Set, value_delimiter = ','))]
    #[serde(default)]
    pub allowed_origins: Vec<String>,
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
    /// Longest prompt and answer together, in tokens. Default: the target's max_position_embeddings.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub max_model_len: Option<usize>,
    /// Maximum number of sequences decoded together; others wait.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 8))]
    pub max_num_seqs: usize,
    /// Maximum number of prompt tokens per step, so that a long prompt does not delay sequences
    /// that are decoding.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 256))]
    pub max_prefill_tokens: usize,
    /// Memory for the prefix cache, in MiB: caches of finished sequences, reused by prompts that
    /// begin the same way. 0 keeps none.
    #[cfg_attr(feature = "clap", arg(long, value_name = "MIB", default_value_t = 512))]
    pub prefix_cache_mib: u64,
    /// Variables for the chat template as a JSON object, such as '{"enable_thinking": false}';
    /// those of a request win.
    #[cfg_attr(feature = "clap", arg(long, value_name = "JSON", value_parser = json_object))]
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Serve the draft even if it was made for another target.
    #[cfg_attr(feature = "clap", arg(long))]
    pub allow_other_target: bool,
    /// Maximum number of requests being received, waiting or being answered.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 256))]
    pub max_queue: usize,
    /// How long requests beyond --max-queue wait before they get a 429, in seconds.
    #[cfg_attr(feature = "clap", arg(long, value_name = "SECONDS", default_value_t = 30.0))]
    pub max_wait: f64,
    /// Seconds that a client may take to send the head of a request, to send its body, or to read
    /// its reply. Then its connection is closed.
    #[cfg_attr(feature = "clap", arg(long, value_name = "SECONDS", default_value_t = 30.0))]
    pub client_timeout: f64,
    /// Seconds that running requests may take to finish after SIGTERM or Ctrl-C; new ones are
    /// refused.
    #[cfg_attr(feature = "clap", arg(long, value_name = "SECONDS", default_value_t = 30.0))]
    pub drain_timeout: f64,
    /// Largest body of a request, in MiB.
    #[cfg_attr(feature = "clap", arg(long, value_name = "MIB", default_value_t = 8))]
    pub max_body_mib: u64,
    /// CPU threads per operation. Default: libtorch's choice.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub threads: Option<usize>,
}

impl ServeSettings {
    /// # Errors
    /// A number out of its range, a key that is not a valid header value, a port file that would
    /// replace something that is not a file.
    pub fn check(&self) -> Result<(), Invalid> {
        within([
            ("max_model_len", self.max_model_len.unwrap_or(2) as u64, 2..=MOST_TOKENS),
            ("max_num_seqs", self.max_num_seqs as u64, 1..=MOST_SEQUENCES),
            ("max_prefill_tokens", self.max_prefill_tokens as u64, 1..=MOST_TOKENS),
            ("prefix_cache_mib", self.prefix_cache_mib, 0..=MOST_MIB),
            ("max_queue", self.max_queue as u64, 1..=MOST_REQUESTS),
            ("max_body_mib", self.max_body_mib, 1..=1024),
            ("threads", self.threads.unwrap_or(1) as u64, 1..=MOST_THREADS),
        ])?;
        seconds([
            ("max_wait", self.max_wait, 0.0..=LONGEST_WAIT),
            ("client_timeout", self.client_timeout, SHORTEST_TIMEOUT..=LONGEST_WAIT),
            ("drain_timeout", self.drain_timeout, 0.0..=LONGEST_WAIT),
        ])?;
        let can_be_sent =
            |key: &String| !key.is_empty() && key.chars().all(|c| c.is_ascii_graphic());
        if self.api_key.as_ref().is_some_and(|key| !can_be_sent(key)) {
            let reason = "must be one or more printable ASCII characters without blanks".into();
            return Err(Invalid { key: "api_key", reason, missing: None });
        }
        if let Some(origin) = self.allowed_origins.iter().find(|origin| !is_origin(origin)) {
            let expected = "must be * or origins such as https://chat.example, without a path";
            return Err(Invalid::new("allowed_origins", origin, expected));
        }
        self.processor.check()?;
        self.check_port_file()
    }

    /// # Errors
    /// A port file that would replace something that is not a file, or whose directory does not
    /// exist.
    pub fn check_port_file(&self) -> Result<(), Invalid> {
        port_file(self.port_file.as_deref())
    }
}

/// `*`, `null`, or a scheme and a host, with a port or without.
fn is_origin(text: &str) -> bool {
    let rest = text.split_once("://").map(|(_, rest)| rest.trim_end_matches('/'));
    let is_host = |host: &str| {
        !host.is_empty() && host.chars().all(|c| c.is_ascii_graphic() && !"/?#,*".contains(c))
    };
    ["*", "null"].contains(&text) || rest.is_some_and(is_host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_have_a_scheme_and_no_path() {
        let check = |text: &str, expect: bool| assert_eq!(is_origin(text), expect, "{text}");
        check("*", true);
        check("https://chat.example", true);
        check("http://localhost:3000/", true);
        check("vscode-webview://abc", true);
        check("chat.example", false);
        check("https://chat.example/page", false);
        check("https://*.example", false);
        check("https://", false);
    }

    #[test]
    fn a_key_that_no_header_carries_is_refused() {
        let check = |key: &str, is_fine: bool| {
            let settings = serde_json::json!({
                "target": "t", "host": "h", "port": 1, "api_key": key, "device": "auto",
                "dtype": "auto", "max_num_seqs": 1, "max_prefill_tokens": 1, "prefix_cache_mib": 0,
                "allow_other_target": false, "max_queue": 1, "max_wait": 0.0,
                "client_timeout": 1.0, "drain_timeout": 0.0, "max_body_mib": 1,
            });
            let settings: ServeSettings = serde_json::from_value(settings).unwrap();
            assert_eq!(settings.check().is_ok(), is_fine, "{key:?}");
        };
        check("sk-1234_x.y", true);
        check("", false);
        check("two words", false);
        check("line\n", false);
        check("schlüssel", false);
    }
}
