//! Prompts to measure on: the field's benchmark sets by name, and files.
//!
//! A named set is fetched from the Hub, and its questions are put as the client that the DFlash
//! authors publish puts them, so that figures can be compared with theirs. Each row comes out as a
//! benchmark row with `turns`; rows of files that have turns, messages or token ids stay as they are.

mod catalog;
mod error;
mod source;
mod turns;

pub use catalog::{NamedSet, SETS};
pub use error::Error;
pub use source::{PromptSet, Rows, SetRow, locate};
pub use turns::open_turns;
