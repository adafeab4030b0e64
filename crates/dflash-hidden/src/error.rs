//! What can go wrong between a target's layers and the trainer, each with what to do about it.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use arrow::error::ArrowError;

use crate::record::Dtype;

/// A failure, naming the endpoint, file or sample it concerns.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the variants and their fields are")]
pub enum Error {
    #[error("{endpoint:?} is not an endpoint: {reason}; pass something like http://localhost:8000")]
    BadEndpoint { endpoint: String, reason: &'static str },
    #[error(
        "no hidden-state server was given; pass --endpoint, or --on-missing skip to train on \
         stored hidden states only"
    )]
    NoEndpoint,
    #[error(
        "cannot reach the hidden-state server at {url}; start it with `dflash hidden-server DIR \
         --target-layer-ids ...`, or correct the endpoint"
    )]
    Unreachable { url: String, source: reqwest::Error },
    #[error("{url} did not answer within {} s", .after.as_secs_f32())]
    Timeout { url: String, after: Duration },
    #[error(
        "{url} is not a hidden-state server: {found}; expected `dflash hidden-server` or a vLLM \
         with the extract_hidden_states method"
    )]
    UnknownServer { url: String, found: String },
    #[error(
        "{url} serves layers {served:?}, the draft needs {wanted:?}; start the server with \
         --target-layer-ids {}", crate::protocol::spaced(.wanted)
    )]
    LayerMismatch { url: String, wanted: Vec<u32>, served: Vec<u32> },
    #[error(
        "{url} serves {model} with {key} {got}, the target's is {expected}; server and trainer \
         must use the same target"
    )]
    ModelMismatch { url: String, model: String, key: &'static str, expected: usize, got: usize },
    #[error(
        "{url} serves {found}, the draft is trained for {expected}; start the server with the \
         target's files, or pass its model as --target"
    )]
    OtherTarget { url: String, found: String, expected: String },
    #[error(
        "{url}: {model} is not {target}: its log-probabilities differ from what the target computes \
         from its last state by {difference:.3} nats, where rounding explains {bound:.3}; start the \
         server with the target's files, or pass its model as --target"
    )]
    OtherHead { url: String, model: String, target: String, difference: f32, bound: f32 },
    #[error("cannot compute the target's logits")]
    TargetLogits { source: Box<dyn std::error::Error + Send + Sync> },
    #[error(
        "{} holds states of {found}, the draft is trained for {expected}; name another \
         --hidden-states-path, or remove the files there",
        .path.display()
    )]
    StatesOfOtherTarget { path: PathBuf, found: String, expected: String },
    #[error("{url} answered {status}: {message}")]
    Status { url: String, status: u16, message: String },
    #[error(
        "sample {sample} has {tokens} tokens, {url} takes {limit}; start the server with a longer \
         --max-model-len or shorten --total-seq-len"
    )]
    PromptTooLong { sample: u64, tokens: usize, limit: usize, url: String },
    #[error("{origin} sent a broken Arrow stream")]
    BrokenStream { origin: String, source: ArrowError },
    #[error("{origin} sent a reply without {missing}")]
    Incomplete { origin: String, missing: &'static str },
    #[error(
        "{url} answered without kv_transfer_params.hidden_states_path; start vLLM with the \
         extract_hidden_states method and the ExampleHiddenStatesConnector as KV connector"
    )]
    NoStatesPath { url: String },
    /// `position` is the shorter prompt's length when one is a prefix of the other.
    #[error("{origin} has other tokens than sample {sample}, first at position {position}")]
    OtherTokens { origin: String, sample: u64, position: usize },
    #[error(
        "{origin} gave {got} rows for {expected} tokens; a vLLM must run with \
         --no-enable-prefix-caching and --no-enable-chunked-prefill"
    )]
    RowCount { origin: String, expected: usize, got: usize },
    #[error("{origin} holds {got}, expected {expected}")]
    Shape { origin: String, expected: String, got: String },
    /// The server handed out memory that it had not written.
    #[error(
        "{origin}: row {row} of layer {layer} is all zero; a vLLM must run with \
         --no-enable-prefix-caching and --no-enable-chunked-prefill"
    )]
    ZeroRow { origin: String, layer: u32, row: usize },
    #[error(
        "{origin}: row {row} of layer {layer} holds NaN or infinity; run the target in another \
         --dtype (bfloat16 rather than float16)"
    )]
    NonFinite { origin: String, layer: u32, row: usize },
    #[error("layer {layer} has {got} bytes, {expected} make {dtype} rows of its shape")]
    LayerBytes { layer: u32, expected: usize, got: usize, dtype: Dtype },
    #[error(
        "cannot read {path}, where vLLM says it left hidden states; its shared_storage_path must \
         be a directory that this machine sees and may change"
    )]
    SharedFile { path: PathBuf, source: io::Error },
    #[error(
        "{path} was still locked, or absent, after {} s; vLLM did not finish writing",
        .after.as_secs_f32()
    )]
    StillLocked { path: PathBuf, after: Duration },
    #[error("{path} is not a file of hidden states: {reason}; remove it")]
    BadFile { path: PathBuf, reason: String },
    #[error("cannot read {path}")]
    ReadFile { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Files(#[from] dflash_files::Error),
    #[error(
        "no stored hidden states for sample {sample} in {} ({reason}); generate them (--on-missing \
         generate) or leave such samples out (--on-missing skip)", .dir.display()
    )]
    Missing { sample: u64, dir: PathBuf, reason: String },
    #[error("gave up on sample {sample} after {attempts} attempts in {} s", .after.as_secs())]
    GaveUp { sample: u64, attempts: u32, after: Duration, source: Box<Error> },
    /// The setting is wrong then, not the samples.
    #[error("{count} samples in a row could not be used; the last one")]
    TooManyFailures { count: u32, source: Box<Error> },
    #[error("interrupted while waiting for hidden states")]
    Interrupted,
    #[error("cannot start the hidden-state client's threads")]
    Runtime(#[source] io::Error),
    #[error("cannot set up the HTTP client")]
    Client(#[source] reqwest::Error),
}

impl Error {
    /// The message with its causes on one line, for log lines.
    pub(crate) fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            text.push_str(&format!(": {error}"));
            cause = error.source();
        }
        text
    }
}
