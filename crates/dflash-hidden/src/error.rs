//! What can go wrong between a target's layers and the trainer, each with what to do about it.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use arrow::error::ArrowError;

use crate::record::Dtype;

/// A failure, naming the endpoint, file or sample it concerns.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An endpoint that is not an address.
    #[error("{endpoint:?} is not an endpoint: {reason}; pass something like http://localhost:8000")]
    BadEndpoint {
        /// As the user wrote it.
        endpoint: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// Samples have to be generated, and no server was named.
    #[error(
        "no hidden-state server was given; pass --endpoint, or --on-missing skip to train on \
         stored hidden states only"
    )]
    NoEndpoint,
    /// Nothing listens, or the connection broke.
    #[error(
        "cannot reach the hidden-state server at {url}; start it with `dflash hidden-server DIR \
         --target-layer-ids ...`, or correct the endpoint"
    )]
    Unreachable {
        /// The request's URL.
        url: String,
        /// The transport's reason.
        #[source]
        source: reqwest::Error,
    },
    /// The server took the request and did not answer in time.
    #[error("{url} did not answer within {} s", .after.as_secs_f32())]
    Timeout {
        /// The request's URL.
        url: String,
        /// The time given.
        after: Duration,
    },
    /// Something answers, and it is neither our server nor vLLM.
    #[error(
        "{url} is not a hidden-state server: {found}; expected `dflash hidden-server` or a vLLM \
         with the extract_hidden_states method"
    )]
    UnknownServer {
        /// The URL that was asked.
        url: String,
        /// What it answered.
        found: String,
    },
    /// The server does not capture what the trainer needs.
    #[error(
        "{url} serves layers {served:?}, the draft needs {wanted:?}; start the server with \
         --target-layer-ids {}", crate::protocol::spaced(.wanted)
    )]
    LayerMismatch {
        /// The endpoint.
        url: String,
        /// What the trainer needs.
        wanted: Vec<u32>,
        /// What the server has.
        served: Vec<u32>,
    },
    /// The server runs another model.
    #[error(
        "{url} serves {model} with {key} {got}, the target's is {expected}; server and trainer \
         must use the same target"
    )]
    ModelMismatch {
        /// The endpoint.
        url: String,
        /// The served model's id.
        model: String,
        /// The configuration key that differs.
        key: &'static str,
        /// The trainer's value.
        expected: usize,
        /// The server's value.
        got: usize,
    },
    /// A reply with an HTTP error status.
    #[error("{url} answered {status}: {message}")]
    Status {
        /// The request's URL.
        url: String,
        /// The HTTP status code.
        status: u16,
        /// The body, or the message inside it.
        message: String,
    },
    /// A prompt that the server's context cannot hold.
    #[error(
        "sample {sample} has {tokens} tokens, {url} takes {limit}; start the server with a longer \
         --max-model-len or shorten --total-seq-len"
    )]
    PromptTooLong {
        /// The dataset row.
        sample: u64,
        /// Its length.
        tokens: usize,
        /// The server's longest prompt.
        limit: usize,
        /// The endpoint.
        url: String,
    },
    /// The bytes are not an Arrow IPC stream, or end early.
    #[error("{origin} sent a broken Arrow stream")]
    BrokenStream {
        /// Where the bytes came from.
        origin: String,
        /// The reader's reason.
        #[source]
        source: ArrowError,
    },
    /// A readable Arrow stream, or reply, without what the protocol promises.
    #[error("{origin} sent a reply without {missing}")]
    Incomplete {
        /// Where the bytes came from.
        origin: String,
        /// The missing part.
        missing: &'static str,
    },
    /// The stock server's reply names no file.
    #[error(
        "{url} answered without kv_transfer_params.hidden_states_path; start vLLM with the \
         extract_hidden_states method and the ExampleHiddenStatesConnector as KV connector"
    )]
    NoStatesPath {
        /// The request's URL.
        url: String,
    },
    /// The prompt that was run is not the one that was sent.
    #[error("{origin} has other tokens than sample {sample}, first at position {position}")]
    OtherTokens {
        /// The endpoint or file.
        origin: String,
        /// The dataset row.
        sample: u64,
        /// Where the two differ; the shorter one's length when one is a prefix.
        position: usize,
    },
    /// Fewer or more rows than tokens.
    #[error(
        "{origin} gave {got} rows for {expected} tokens; a vLLM must run with \
         --no-enable-prefix-caching and --no-enable-chunked-prefill"
    )]
    RowCount {
        /// The endpoint or file.
        origin: String,
        /// The prompt's tokens.
        expected: usize,
        /// The rows that came.
        got: usize,
    },
    /// A reply or file whose columns are not what was asked for.
    #[error("{origin} holds {got}, expected {expected}")]
    Shape {
        /// The endpoint or file.
        origin: String,
        /// What was asked for.
        expected: String,
        /// What is there.
        got: String,
    },
    /// A row of zeros: the server handed out memory that it had not written.
    #[error(
        "{origin}: row {row} of layer {layer} is all zero; a vLLM must run with \
         --no-enable-prefix-caching and --no-enable-chunked-prefill"
    )]
    ZeroRow {
        /// The endpoint or file.
        origin: String,
        /// The layer id.
        layer: u32,
        /// The token's position.
        row: usize,
    },
    /// NaN or infinity.
    #[error(
        "{origin}: row {row} of layer {layer} holds NaN or infinity; run the target in another \
         --dtype (bfloat16 rather than float16)"
    )]
    NonFinite {
        /// The endpoint or file.
        origin: String,
        /// The layer id.
        layer: u32,
        /// The token's position.
        row: usize,
    },
    /// A layer's bytes do not make whole rows.
    #[error("layer {layer} has {got} bytes, {expected} make {dtype} rows of its shape")]
    LayerBytes {
        /// The layer id.
        layer: u32,
        /// Bytes for the stated shape.
        expected: usize,
        /// Bytes given.
        got: usize,
        /// The element type.
        dtype: Dtype,
    },
    /// The file that a stock vLLM names cannot be used.
    #[error(
        "cannot read {path}, where vLLM says it left hidden states; its shared_storage_path must \
         be a directory that this machine sees and may change"
    )]
    SharedFile {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The stock server never let go of its lock.
    #[error("{path} was still locked, or absent, after {} s; vLLM did not finish writing", .after.as_secs_f32())]
    StillLocked {
        /// The lock file.
        path: PathBuf,
        /// The time given.
        after: Duration,
    },
    /// A file that is not a safetensors file of the expected layout.
    #[error("{path} is not a file of hidden states: {reason}; remove it")]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Reading a stored sample failed.
    #[error("cannot read {path}")]
    ReadFile {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// Storing a sample failed.
    #[error(transparent)]
    Files(#[from] dflash_files::Error),
    /// `--on-missing raise`, and a sample is missing.
    #[error(
        "no stored hidden states for sample {sample} in {} ({reason}); generate them (--on-missing \
         generate) or leave such samples out (--on-missing skip)", .dir.display()
    )]
    Missing {
        /// The dataset row.
        sample: u64,
        /// Where they were looked for.
        dir: PathBuf,
        /// Whether there is nothing, or what is wrong with what there is.
        reason: String,
    },

    /// One sample was not available from any endpoint in the time given.
    #[error("gave up on sample {sample} after {attempts} attempts in {} s", .after.as_secs())]
    GaveUp {
        /// The dataset row.
        sample: u64,
        /// Requests made.
        attempts: u32,
        /// The policy's deadline.
        after: Duration,
        /// The last attempt's failure.
        #[source]
        last: Box<Error>,
    },
    /// Sample after sample is refused: the setting is wrong, not the samples.
    #[error("{count} samples in a row could not be used; the last one")]
    TooManyFailures {
        /// Samples in a row.
        count: u32,
        /// The last one's failure.
        #[source]
        last: Box<Error>,
    },
    /// The stop flag was set while waiting.
    #[error("interrupted while waiting for hidden states")]
    Interrupted,
    /// The operating system refused threads or sockets.
    #[error("cannot start the hidden-state client's threads")]
    Runtime(#[source] io::Error),
    /// The HTTP client could not be set up.
    #[error("cannot set up the HTTP client")]
    Client(#[source] reqwest::Error),
}

impl Error {
    /// The message with its causes on one line, for log lines.
    pub(crate) fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            text.push_str(": ");
            text.push_str(&error.to_string());
            cause = error.source();
        }
        text
    }
}
