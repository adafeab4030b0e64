//! Conversations to rendered, tokenized and masked Arrow shards.
//!
//! [`prepare`] is the whole command: it finds the data (local files, or a preset from the Hub),
//! renders every conversation with the target's own chat template, derives the loss mask from
//! render boundaries, cuts rows to the sequence length, and writes a dataset that appears whole or
//! not at all. Rows keep the order of the input whatever the number of workers.

mod boundary;
mod error;
mod model;
mod outcome;
mod pipeline;
mod preset;
mod progress;
mod provenance;
mod run;
mod source;

pub use boundary::{Refusal, conversation_rows};
pub use error::Error;
pub use outcome::{DropReason, Tally};
pub use preset::{PRESETS, Preset};
pub use run::{Summary, prepare};
