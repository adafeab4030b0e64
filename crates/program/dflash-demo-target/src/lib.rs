//! The demo's training data and target, made here so that nothing is downloaded.
//!
//! A synthetic corpus of word problems and small dialogues, a byte-level BPE tokenizer trained on
//! it, and a tiny Qwen3 target trained on both. The corpus is regular on purpose: a small model
//! learns it in a minute, and a draft can then predict it. Everything depends on one seed.

mod corpus;
mod error;
mod run;
mod tokenizer;
mod training;
mod widen;

pub use error::Error;
pub use run::{Event, Summary, run};
