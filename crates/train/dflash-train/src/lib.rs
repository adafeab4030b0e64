//! Training of a draft: rows in, checkpoints out.
//!
//! [`Prepared`] opens everything that the settings name and finds the user's mistakes before any
//! worker starts. [`Prepared::run`] runs one worker from start to end: it builds or restores the
//! draft, pulls packed rows with the target's hidden states from a bounded stream, and steps until
//! the schedule ends or it is told to stop.
//!
//! - [`dry_run()`] writes the drafter that a run would start from;
//! - [`config`] holds the resolved settings, [`schedule`] the learning rate, [`optimizer`] AdamW
//!   and Muon;
//! - `preflight` proves that a source's states are the target's, before the first step;
//! - `same_target` compares the target with those that data, checkpoints and states are of;
//! - `warm_start` takes the weights of another draft;
//! - `order` says which packed row is whose, `rows` reads and fetches it or `colocated` has a target in
//!   this process compute its `states`, `assembly` lays it out for the device, `prefetcher` does so on a
//!   thread of its own, `ready` is what the step takes, `batch` turns it into blocks and tensors, for
//!   training, validation, [`mod@bench`] and [`plan`] alike;
//! - `agreement` says what all ranks must have in common;
//! - `run` holds the loop, `vote` what ranks tell each other in a step, `no_memory` what becomes of
//!   an allocation that fails;
//! - `validation` measures on held-out rows and prompts;
//! - `trainer` does one step, `readback` brings what became of it to the host, `master_weights` holds the parameters in float32, `shards` says which rank
//!   holds what of them;
//! - `checkpoint` keeps it all in the run's directory ([`dflash_run`]), `metrics` shows it;
//! - [`machine`] knows what this machine can do, `gpus` what GPUs can, [`plan`] what a run will take of it.

mod agreement;
mod assembly;
mod batch;
pub mod bench;
mod checkpoint;
mod colocated;
pub mod config;
mod dry_run;
mod error;
#[cfg(test)]
mod fake;
mod gpus;
pub mod machine;
mod master_weights;
mod metrics;
mod no_memory;
pub mod optimizer;
mod order;
pub mod plan;
mod prefetcher;
mod preflight;
mod prepared;
mod readback;
mod ready;
mod rows;
mod run;
mod same_target;
pub mod schedule;
mod setup;
mod shards;
mod split;
mod states;
mod trainer;
mod validation;
mod vote;
mod warm_start;
#[cfg(test)]
#[path = "../tests/it/world.rs"]
mod world;

// The world of tests/it, which the unit tests take too, knows this crate by its name.
#[cfg(test)]
extern crate self as dflash_train;

pub use dflash_run::Acceptance;
pub use dry_run::dry_run;
pub use error::{Error, Mismatch, Mismatches};
pub use prepared::Prepared;
pub use run::Outcome;
pub use validation::{AcceptanceProbe, ProbeError, Share};
