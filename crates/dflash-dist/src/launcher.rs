//! Starts the workers of one machine, passes signals on, ends the job when one dies, and starts it
//! again if restarts are allowed.
//!
//! The launcher of node 0 holds the rendezvous store itself, as torchrun's agent does, so no port
//! is guessed and the store outlives any rank. Three things keep workers from staying behind:
//! the kernel kills each when the launcher dies ([`process`]), each is killed when `Workers` is
//! dropped, and each ends by itself when a collective fails.

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

/// Between two looks at the workers.
const POLL: Duration = Duration::from_millis(20);

/// How a job ended without a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finished {
    /// All workers exited with code 0.
    Completed,
    /// A signal or `stop` ended it, and all workers ended in an orderly way.
    Stopped,
}

/// Starts the workers and returns when the last has ended.
///
/// Rank 0 has our standard output and error; what other ranks write comes on standard
/// error with `[rank N]` before each line. SIGINT, SIGTERM and `stop` are passed on to the
/// workers, which have process groups of their own, so that the terminal's Ctrl-C reaches
/// them once; SIGUSR1, by which they save, goes to one of them as soon as their work is under way.
/// Call it on a thread that outlives the call, such as the main one: to the kernel that thread is
/// the workers' parent.
///
/// After a death all ranks, those of other nodes too, are started again, with a higher
/// `TORCHELASTIC_RESTART_COUNT`, up to [`LaunchConfig::max_restarts`] times; not if a restart
/// cannot help, because a rank refused its settings before the work began.
///
/// # Errors
/// What ended the job, or why it did not begin.
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
