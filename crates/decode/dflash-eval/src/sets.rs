//! Benchmark sets by name, and prompts from files.
//!
//! A named set is fetched from the Hub, and its questions are worded as in the DFlash authors'
//! published client, so that results can be compared with theirs. Each row becomes a benchmark row
//! with `turns`; rows of files that have turns, messages or token ids are not changed.

mod catalog;
mod source;
mod turns;

pub use catalog::{NamedSet, SETS};
pub use source::{PromptSet, SetRow, SetRows, locate};
pub use turns::open_turns;
