//! Errors of hidden-state sources, each with its remedy.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use arrow_schema::ArrowError;

use crate::record::Dtype;
use crate::text::clean;

/// The text of a network error, safe for a terminal.
#[derive(Debug)]
pub struct NetworkFault(String);

/// An error, naming the endpoint, file or sample it concerns.
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
    Unreachable { url: String, source: NetworkFault },
    #[error(
        "no hidden-state server is ready after {} s; start it, or wait longer with \
         --wait-for-server", .after.as_secs()
    )]
    NotReady { after: Duration, source: Box<Error> },
    #[error("{url} did not answer within {} s", .after.as_secs_f32())]
    Timeout { url: String, after: Duration },
    #[error(
        "{url} is not a hidden-state server: {found}; expected `dflash hidden-server` or a vLLM \
         with the extract_hidden_states method"
    )]
    UnknownServer { url: String, found: String },
    #[error(
        "{url} speaks version {got} of the hidden-state protocol, and this program version {ours}; \
         run server and trainer from the same release"
    )]
    OtherVersion { url: String, got: u32, ours: u32 },
    #[error(
        "{url} now serves {now}; when the run began it served {before}. Start that server again and continue with --resume"
    )]
    ServerChanged { url: String, before: String, now: String },
    #[error(
        "{url} redirects to {to}; redirects are not followed, because prompts would go to another address: pass that address"
    )]
    Redirected { url: String, to: String },
    #[error("{url}: {what} was damaged on its way: it does not match its digest")]
    Damaged { url: String, what: &'static str },
    #[error("{url}: the response exceeds the limit of {limit} bytes")]
    TooLong { url: String, limit: usize },
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
         from its last state by {difference:.3} nats, but rounding explains only {bound:.3}; start the \
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
    #[error("{origin} sent a broken stream of hidden states: {reason}")]
    BrokenStream { origin: String, reason: &'static str },
    #[error("cannot encode hidden states")]
    Encode(#[source] ArrowError),
    #[error("{origin} sent a reply without {missing}")]
    Incomplete { origin: String, missing: &'static str },
    #[error(
        "{url} answered without kv_transfer_params.hidden_states_path; start vLLM with the \
         extract_hidden_states method and the ExampleHiddenStatesConnector as KV connector"
    )]
    NoStatesPath { url: String },
    /// `position` is the shorter prompt's length if one is a prefix of the other.
    #[error("{origin} has other tokens than sample {sample}, first at position {position}")]
    OtherTokens { origin: String, sample: u64, position: usize },
    #[error(
        "{origin} put token {token} before the prompt, so its states are of other positions; it must use token ids unchanged: set add_special_tokens to false in it, or in a proxy between"
    )]
    AddedToken { origin: String, token: i64 },
    #[error(
        "{origin} gave {got} rows for {expected} tokens; a vLLM must run with \
         --no-enable-prefix-caching and --no-enable-chunked-prefill"
    )]
    RowCount { origin: String, expected: usize, got: usize },
    #[error("{origin} holds {got}, expected {expected}")]
    Shape { origin: String, expected: String, got: String },
    /// The server sent memory that it had not written.
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
        "{url} is a vLLM, which passes hidden states in files; they are read and removed only in a directory that you name: pass its shared_storage_path as --shared-storage-path DIR"
    )]
    NoStorage { url: String },
    #[error(
        "--shared-storage-path {} is not usable; it must be the directory of vLLM's \
         shared_storage_path, which this machine can read and write", .dir.display()
    )]
    BadStorage { dir: PathBuf, source: io::Error },
    /// `path` as given by the server.
    #[error(
        "{url} names {path} for its hidden states, which is not a .safetensors file in \
         --shared-storage-path {}; start vLLM with this directory as its shared_storage_path",
        .dir.display()
    )]
    OutsideStorage { url: String, path: String, dir: PathBuf },
    #[error(
        "cannot read {path}, where vLLM says it wrote hidden states; its shared_storage_path must be a directory that this machine can read and write"
    )]
    SharedFile { path: PathBuf, source: io::Error },
    #[error("{path} has {got} bytes, but {expected} were expected; it was not removed")]
    FileSize { path: PathBuf, got: u64, expected: String },
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
    Files(#[from] dflash_io::Error),
    #[error(
        "no stored hidden states for sample {sample} in {} ({reason}); generate them (--on-missing \
         generate) or skip such samples (--on-missing skip)", .dir.display()
    )]
    Missing { sample: u64, dir: PathBuf, reason: String },
    #[error(
        "gave up on sample {sample} after {attempts} attempts in {} s; make sure that the server runs and continue with --resume, or give it more time with --server-timeout", .after.as_secs()
    )]
    GaveUp { sample: u64, attempts: u32, after: Duration, source: Box<Error> },
    /// Then the setting is wrong, not the samples.
    #[error("{count} consecutive samples could not be used; the last one")]
    TooManyFailures { count: u32, source: Box<Error> },
    #[error("interrupted while waiting for hidden states")]
    Interrupted,
    #[error("cannot start the hidden-state client's threads")]
    Runtime(#[source] io::Error),
    #[error("cannot set up the HTTP client")]
    Client(#[source] reqwest::Error),
}

impl std::fmt::Display for NetworkFault {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0)
    }
}

impl std::error::Error for NetworkFault {}

impl From<reqwest::Error> for NetworkFault {
    /// Without the address, which may contain a password; the text may quote the server.
    fn from(error: reqwest::Error) -> Self {
        Self(clean(&chain_of(&error.without_url()), 300))
    }
}

/// A message with its causes on one line.
fn chain_of(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

impl Error {
    /// The message with its causes on one line, for log lines.
    pub(crate) fn chain(&self) -> String {
        chain_of(self)
    }
}
