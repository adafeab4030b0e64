//! Conversations to rendered, tokenized and masked Arrow shards.
//!
//! [`prepare`] is the whole command: it finds the data (local files, or a preset from the Hub),
//! renders every conversation with the target's own chat template, derives the loss mask from
//! render boundaries, cuts samples to the sequence length, and writes a dataset that appears
//! complete or not at all. Samples keep the order of the input for any number of workers.

mod answer;
mod boundary;
mod error;
mod model;
mod outcome;
mod pipeline;
mod provenance;
mod run;
mod source;

pub use boundary::{ConversationRows, Refusal, conversation_rows};
pub use dflash_chat::panics_are_caught;
pub use error::Error;
pub use outcome::{Answers, DropReason, Dropped, Tally};
pub use run::{Summary, prepare};
pub use source::{Input, InputRow};
