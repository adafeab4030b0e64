//! The results of an evaluation, by whatever engine: answers, metrics computed from them, standard
//! errors, and reports for people and programs.
//!
//! Everything is computed from [`Answer`]s, one for each prompt and decoding mode: times, tokens,
//! counts of verify steps. A [`Measured`] holds those of one set, mode and draft; an [`EvalReport`]
//! holds all of them. So every report uses the same definitions, whether this process or a server
//! decoded. [`sets`] names the prompts, and [`endpoint`] evaluates a drafter in a running server.

mod advice;
mod answer;
mod baseline;
mod bootstrap;
pub mod endpoint;
mod error;
mod facts;
mod figures;
mod lossless;
mod page;
mod report;
pub mod sets;
mod speed;
mod table;
mod text;
pub mod turns;
mod write;

pub use advice::AUTO_SUFFIX;
pub use answer::{Answer, Verification};
pub use baseline::{Change, Comparison};
pub use dflash_run::EvalMode;
pub use error::Error;
pub use figures::{Figures, SetPart, Whole};
pub use lossless::{Difference, Lossless};
pub use report::{DraftFacts, EvalReport, Facts, Measured, Memory, SetFacts};
pub use speed::Speed;
pub use write::{check_outputs, write};
