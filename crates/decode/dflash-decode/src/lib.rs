//! Speculative decoding, acceptance and speed measurement.
//!
//! [`Engine`] decodes sequences together, plainly or with proposals from a draft or from the text
//! itself, which the target verifies in one pass, so the text is always the target's own.
//! [`answer()`] runs one request through it. [`evaluate`] runs prompt sets and reports acceptance,
//! speed and whether the texts agree; [`regenerate()`] answers many prompts in batches. Tensors
//! carry a lower-case shape suffix: `t` tokens, `b` slots of a block, `h` hidden, `v` vocabulary.

mod adjust;
mod answer;
mod bench;
mod blocks;
mod dialogue;
mod drafter;
mod engine;
mod error;
mod eval;
mod generate;
mod grammar;
mod limits;
mod lossless;
mod models;
mod partial;
mod probe;
mod prompts;
mod regenerate;
mod rows;
mod sampling;
mod stamp;
mod text;

pub use adjust::LogitAdjustments;
pub use answer::{Generation, answer};
pub use bench::{DecodeReport, TargetReport, bench_decode, bench_target};
pub use dflash_eval::{Difference, EvalReport, Lossless, Speed};
pub use engine::{
    Block, Engine, EngineOptions, Finish, Logprob, NewToken, Output, Proposals, Request, SequenceId,
};
pub use error::Error;
pub use eval::evaluate;
pub use generate::{Conversation, GenerateSummary, PlainSpeed};
pub use grammar::{Grammar, GrammarSource, GrammarVocabulary};
pub use limits::Limits;
pub use lossless::compare;
pub use models::{DraftSource, LoadedProposer, Models, ModelsConfig};
pub use probe::{Probe, ProbeConfig};
pub use regenerate::{RegenerateData, RegenerateSummary, regenerate};
pub use sampling::{Sampler, Sampling};
pub use text::TextStream;
