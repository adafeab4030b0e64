//! Hidden states between a target and a trainer.
//!
//! A [`HiddenStates`] is the result of one forward pass of the target for one prompt: for each
//! selected layer the rows of the residual stream. This crate defines the record's format on the
//! wire (an Arrow IPC stream, [`encode_stream`] and [`decode_stream`]) and on disk
//! (`hs_{row}.safetensors`), implements its sources (our own server, a stock vLLM, files), and
//! delivers records to a synchronous trainer in order and within a memory bound ([`Stream`]).
//!
//! Layer ids count decoder layers that have run: 0 is the embedding's output, `k` the residual
//! stream after `k` layers, `n` the one after the last layer, before the final norm.

mod body;
mod counters;
mod digest;
mod endpoint;
mod error;
mod fetch;
mod offline;
mod own;
mod probe;
mod protocol;
mod record;
mod retry;
mod storage;
mod stream;
mod tensor_file;
#[cfg(test)]
mod tests;
mod text;
mod vllm;
mod vllm_check;
mod wire;

pub use counters::Counters;
pub use digest::{DIGEST_HEADER, Digest, prompt_digest};
pub use error::{Error, NetworkFault};
pub use fetch::{Fetched, Request};
pub use offline::OfflineFiles;
pub use probe::{LogProbability, Probe, probe};
pub use protocol::{
    Metadata, ModelCard, ModelList, PROTOCOL_VERSION, StatesRequest, TARGET_HEADER,
};
pub use record::{Dtype, HiddenStates};
pub use retry::RetryPolicy;
pub use stream::{FetchedRow, ServersSeen, Stream, StreamConfig, WantedRow};
pub use vllm_check::{LogitsFunction, TargetLogits};
pub use wire::{ARROW_STREAM, decode_stream, encode_stream};
