//! What an evaluation measured, whoever decoded: answers, the figures that follow from them, how far
//! chance moves these, and reports for people and programs.
//!
//! Everything is computed from [`Answer`]s, one for each prompt and way to decode. A [`Measured`] has
//! those of one set, way and draft; a [`EvalReport`] all of them.

mod advice;
mod answer;
mod baseline;
mod bootstrap;
mod error;
mod figures;
mod lossless;
mod page;
mod report;
mod speed;
mod table;
mod text;
pub mod turns;
mod write;

pub use advice::AUTO_SUFFIX;
pub use answer::{Answer, Verification};
pub use baseline::{Change, Comparison};
pub use dflash_run::Way;
pub use error::Error;
pub use figures::{Figures, Part, Whole};
pub use lossless::{Difference, Lossless};
pub use report::{DraftFacts, EvalReport, Facts, Measured, Memory, SetFacts};
pub use speed::Speed;
pub use write::{check_outputs, write};
