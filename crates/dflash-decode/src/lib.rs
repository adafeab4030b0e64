//! Speculative decoding, acceptance and speed measurement.
//!
//! [`PlainDecoder`] is the yardstick: greedy decoding of the target, one token a step.
//! [`Speculator`] makes the same text in fewer steps: the draft proposes a block, the target checks
//! it in one pass; [`NgramDecoder`] proposes from the text itself. [`Engine`] decodes several sequences
//! together. [`evaluate`] runs them over sets of prompts and reports acceptance, speed and
//! whether the texts agree; [`regenerate()`] answers many prompts in batches. Tensors carry a
//! lower-case shape suffix: `t` tokens, `b` slots of a block, `h` hidden, `v` vocabulary.

mod bench;
mod blocks;
mod dialogue;
mod drafter;
mod engine;
mod error;
mod eval;
mod few_rows;
mod generate;
mod lossless;
mod models;
mod ngram;
mod partial;
mod plain;
mod probe;
mod prompts;
mod regenerate;
mod rows;
mod sampling;
mod speculative;
mod stamp;
mod text;

pub use bench::{DecodeReport, TargetReport, bench_decode, bench_target};
pub use dflash_evaluation::{Difference, EvalReport, Lossless, Speed};
pub use engine::{
    Block, Engine, EngineOptions, Finish, Logprob, NewToken, Output, Request, SequenceId,
};
pub use error::Error;
pub use eval::{DraftSource, evaluate};
pub use generate::{Conversation, GenerateSummary, PlainSpeed};
pub use lossless::compare;
pub use models::{Models, ModelsConfig};
pub use ngram::NgramDecoder;
pub use plain::{Generation, Limits, PlainDecoder};
pub use probe::{Probe, ProbeConfig};
pub use regenerate::{Answered, BatchDecoder, RegenerateSummary, regenerate};
pub use sampling::{Sampler, Sampling};
pub use speculative::{Speculation, Speculator};
pub use text::TextStream;
