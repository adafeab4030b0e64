//! Ranks, and retention of checkpoints.

use dflash_settings_derive::Classed;
use serde::{Deserialize, Serialize};

use crate::check::{Invalid, MOST_SECONDS, MOST_STEPS, within};
use crate::choices::Backend;

/// More GPUs than any machine has. How many fit on this one is checked when ranks are started.
pub(crate) const MOST_RANKS: u64 = 1024;
/// More machines than any cluster has.
pub(crate) const MOST_NODES: u64 = 65536;
/// After this many restarts something else is wrong.
const MOST_RESTARTS: u64 = 10_000;

/// Ranks: how many, where, and what happens when one dies.
#[derive(Debug, Clone, Serialize, Deserialize, Classed)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct LaunchSettings {
    /// Ranks to start on this machine. Default: one, or the number that torchrun or Slurm started.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    // Included in the recorded ranks and rows_per_step.
    #[setting(free)]
    pub nproc: Option<usize>,
    /// Machines in the job. Start the same command on each, with its own --node-rank.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 1))]
    #[setting(free)]
    pub nnodes: usize,
    /// Index of this machine among them, from 0.
    #[cfg_attr(feature = "clap", arg(long, value_name = "R"))]
    #[setting(free, may_differ)]
    pub node_rank: Option<usize>,
    /// Rendezvous address: the machine with --node-rank 0, and a free port on it.
    #[cfg_attr(feature = "clap", arg(long, value_name = "HOST:PORT"))]
    #[setting(free, may_differ)]
    pub rdzv_endpoint: Option<String>,
    /// Backend for gradients between GPUs; between CPUs it is gloo.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t = Backend::Auto))]
    #[setting(free)]
    pub backend: Backend,
    /// If a rank dies, restart all ranks from the last checkpoint, up to N times.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 0))]
    #[setting(free)]
    pub max_restarts: usize,
    /// Seconds that ranks and machines wait for each other to join.
    #[cfg_attr(feature = "clap", arg(long, hide = true, value_name = "S", default_value_t = 120))]
    #[setting(free)]
    pub join_timeout: u64,
    /// Timeout of a collective, in seconds. A rank that hangs ends the job after this time; a rank
    /// that waits for hidden states must not fall behind by more.
    #[cfg_attr(feature = "clap", arg(long, value_name = "S", default_value_t = 1800))]
    #[setting(free)]
    pub collective_timeout: u64,
}

/// When checkpoints are written and which are kept. The newest and the best always are.
#[derive(Debug, Clone, Default, Serialize, Deserialize, Classed)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct CheckpointSettings {
    /// Steps between checkpoints, in addition to those at the ends of epochs (unless
    /// --no-epoch-checkpoints) and of the run.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    #[setting(free)]
    pub save_every: Option<u64>,
    /// Write no checkpoints at the ends of epochs. The last one of a run is always written.
    #[cfg_attr(feature = "clap", arg(long))]
    #[setting(free)]
    pub no_epoch_checkpoints: bool,
    /// Keep only the last N checkpoints, and the best one; 0 keeps all. Default: 10, or for a
    /// resumed run the value that it began with.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    #[setting(free)]
    pub keep_last: Option<u64>,
    /// Also keep the checkpoints of steps that are multiples of N.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    #[setting(free)]
    pub keep_every: Option<u64>,
    /// Exit with code 0 instead of 143 if SIGTERM stopped the run before its end and it has saved.
    #[cfg_attr(feature = "clap", arg(long, hide = true))]
    #[setting(free)]
    pub sigterm_is_success: bool,
    /// Seconds that a run has after SIGTERM to finish its step and save. Default: 19, plus one for
    /// each 100 MB of a checkpoint.
    #[cfg_attr(feature = "clap", arg(long, hide = true, value_name = "SECONDS"))]
    #[setting(free)]
    pub grace: Option<u64>,
}

impl LaunchSettings {
    /// # Errors
    /// A number out of its range.
    pub fn check(&self) -> Result<(), Invalid> {
        within([
            ("nproc", self.nproc.unwrap_or(1) as u64, 1..=MOST_RANKS),
            ("nnodes", self.nnodes as u64, 1..=MOST_NODES),
            ("max_restarts", self.max_restarts as u64, 0..=MOST_RESTARTS),
            ("join_timeout", self.join_timeout, 1..=MOST_SECONDS),
            ("collective_timeout", self.collective_timeout, 1..=MOST_SECONDS),
        ])?;
        match self.node_rank {
            Some(node) if node >= self.nnodes => {
                let expected = format!(
                    "with --nnodes {} it must be at least 0 and at most {}",
                    self.nnodes,
                    self.nnodes - 1
                );
                Err(Invalid::new("node_rank", node, expected))
            }
            _ => Ok(()),
        }
    }
}

impl CheckpointSettings {
    /// Default number of checkpoints that are kept: one per epoch of the default recipe, and a
    /// bound on disk use if --save-every adds others.
    pub const DEFAULT_KEPT: u64 = 10;

    /// Number of newest checkpoints that are kept; `None` for all.
    pub fn kept(&self) -> Option<u64> {
        self.keep_last.filter(|&last| last > 0)
    }

    /// # Errors
    /// A number out of its range.
    pub fn check(&self) -> Result<(), Invalid> {
        within([
            ("save_every", self.save_every.unwrap_or(1), 1..=MOST_STEPS),
            ("keep_last", self.keep_last.unwrap_or(1), 0..=MOST_STEPS),
            ("keep_every", self.keep_every.unwrap_or(1), 1..=MOST_STEPS),
            ("grace", self.grace.unwrap_or(1), 1..=MOST_SECONDS),
        ])
    }
}
