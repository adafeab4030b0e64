//! Starts the workers of one machine, forwards signals, ends the job if one dies, and restarts it
//! if restarts are allowed.
//!
//! The launcher of node 0 holds the rendezvous store itself, as torchrun's agent does, so no port
//! is guessed and the store outlives every rank. Three mechanisms keep workers from being left
//! behind: the kernel kills each one if the launcher dies ([`process`]), each is killed when
//! `Workers` is dropped, and each ends by itself when a collective fails.

mod attempt;
mod config;
mod failure;
mod launch_store;
mod nodes;
mod output;
mod process;
mod signals;
mod workers;

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::Error;
use attempt::{Attempt, Ended};
pub use config::LaunchConfig;
use launch_store::LaunchStore;
use nodes::Nodes;
use signals::Signals;

/// Interval between checks of the workers.
const POLL: Duration = Duration::from_millis(20);

/// How a job ended without an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finished {
    /// All workers exited with code 0.
    Completed,
    /// A signal or `stop` ended it, and all workers shut down in order.
    Stopped,
}

/// Starts the workers and returns when the last has ended.
///
/// Rank 0 has our standard output and error; other ranks write to standard error with `[rank N]`
/// before each line. SIGINT, SIGTERM and `stop` are forwarded to the workers, which have their own
/// process groups, so that the terminal's Ctrl-C reaches them once; SIGUSR1, which makes them save,
/// goes to one of them as soon as their work is in progress. Call it on a thread that outlives the
/// call, such as the main one: for the kernel that thread is the workers' parent.
///
/// If a rank dies, all ranks, also those of other nodes, are restarted with a higher
/// `TORCHELASTIC_RESTART_COUNT`, up to [`LaunchConfig::max_restarts`] times; not if a restart
/// cannot help, because a rank rejected its settings before the work began.
///
/// # Errors
/// What ended the job, or why it did not start.
pub fn launch(config: &LaunchConfig, stop: &AtomicBool) -> Result<Finished, Error> {
    config.check()?;
    let signals = Signals::watch(stop)?;
    let Some(store) = LaunchStore::open(config, &signals)? else { return Ok(Finished::Stopped) };
    let mut nodes = Nodes::join(config, &store)?;
    let mut restarts = 0;
    loop {
        if !nodes.gather(restarts, &signals)? {
            return Ok(Finished::Stopped);
        }
        let attempt = Attempt { config, store: store.of_attempt(restarts)?, signals: &signals };
        let failure = match attempt.run(&mut nodes)? {
            Ended::Well(finished) => return Ok(finished),
            Ended::Badly(failure) => failure,
        };
        if !failure.may_pass || restarts == config.max_restarts {
            return Err(failure.after(restarts));
        }
        restarts += 1;
        let of = config.max_restarts;
        tracing::warn!("{}; starting all ranks again (restart {restarts} of {of})", failure.error);
    }
}

#[cfg(test)]
mod tests;
