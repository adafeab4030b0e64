//! Training of a draft: rows in, checkpoints out.
//!
//! [`run()`] is one worker's whole life: it opens the dataset, builds or restores the draft, pulls
//! packed rows with the target's hidden states from a bounded stream, and steps until the schedule
//! ends or it is told to stop. [`validate`] finds the user's mistakes before any worker starts.
//!
//! - [`config`] holds the resolved settings, [`schedule`] the learning rate, [`optimizer`] AdamW
//!   and Muon;
//! - `warm_start` takes the weights of another draft;
//! - `order` says which packed row is whose, `rows` fetches it, `batch` turns it into tensors;
//! - `validation` measures on held-out rows and prompts;
//! - `trainer` does one step, `masters` holds the float32 side of the parameters, `shards` says which
//!   rank holds what of it;
//! - `checkpoint` keeps it all in the run's directory ([`dflash_run`]), `metrics` shows it;
//! - [`machine`] knows what the hardware can do, [`plan`] what a run will take of it.

mod batch;
pub mod bench;
mod checkpoint;
pub mod config;
mod error;
pub mod machine;
mod masters;
mod metrics;
pub mod optimizer;
mod order;
pub mod plan;
mod rows;
mod run;
pub mod schedule;
mod setup;
mod shards;
mod trainer;
mod validation;
mod warm_start;

pub use checkpoint::time_to_save;
pub use dflash_run::{Acceptance, Retention};
pub use error::Error;
pub use run::{Outcome, run, validate};
pub use validation::{AcceptanceProbe, ProbeError, Served, Share};
