//! The flags that start ranks and say what remains of a run's checkpoints.

use clap::{Args, ValueEnum};

/// Ranks: how many, where, and what happens when one dies.
#[derive(Debug, Clone, Args)]
pub struct LaunchArgs {
    /// Ranks to start on this machine. Default: one, or what torchrun or Slurm started.
    #[arg(long, value_name = "N")]
    pub nproc: Option<usize>,
    /// Machines in the job. Start the same command on each, with its own --node-rank.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub nnodes: usize,
    /// This machine among them, from 0.
    #[arg(long, value_name = "R")]
    pub node_rank: Option<usize>,
    /// Where the machines meet: an address of the machine with --node-rank 0 and a free port there.
    #[arg(long, value_name = "HOST:PORT")]
    pub rdzv_endpoint: Option<String>,
    /// What carries gradients between ranks on GPUs; between CPUs it is gloo.
    #[arg(long, value_enum, default_value_t = BackendArg::Auto)]
    pub backend: BackendArg,
    /// Start all ranks again from the last checkpoint when one dies, up to N times.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub max_restarts: usize,
    /// Seconds that ranks and machines wait for each other to come.
    #[arg(long, value_name = "S", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..))]
    pub join_timeout: u64,
    /// Seconds that a rank waits for the others in a collective. A rank that hangs ends the job
    /// after this; one that waits for hidden states must not lag behind by more.
    #[arg(long, value_name = "S", default_value_t = 1800, value_parser = clap::value_parser!(u64).range(1..))]
    pub collective_timeout: u64,
}

/// When checkpoints are written and which stay.
#[derive(Debug, Clone, Args)]
pub struct CheckpointArgs {
    /// Steps between checkpoints, besides those at the ends of epochs.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub save_every: Option<u64>,
    /// Keep only the last N checkpoints, and the best one where best.json names it. Default: all.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub keep_last: Option<u64>,
    /// With --keep-last: also keep those of steps that are multiples of N.
    #[arg(long, value_name = "N", requires = "keep_last", value_parser = clap::value_parser!(u64).range(1..))]
    pub keep_every: Option<u64>,
    /// Seconds that a run has after SIGTERM to end its step and save. Default: 19, and one more for
    /// each 100 MB of a checkpoint.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub grace: Option<u64>,
}

/// Carriers of gradients between GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendArg {
    /// NCCL where all ranks can use it, else gloo.
    Auto,
    /// NCCL, or an error.
    Nccl,
    /// Over the host.
    Gloo,
}
