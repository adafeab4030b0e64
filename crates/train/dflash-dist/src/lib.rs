//! Processes that train together: launcher, rendezvous and collectives.
//!
//! A worker reads its rank from the environment ([`WorkerEnv`]: torchrun's variables, which our own
//! launcher sets too, or Slurm's), meets the others over libtorch's TCPStore ([`connect`]) and then
//! communicates through a [`Communicator`]. [`launch`] starts the workers of one machine and makes
//! sure that none outlives the job.

mod agreement;
mod communicator;
mod error;
mod gloo;
mod launcher;
mod lifeline;
mod nccl;
mod rendezvous;
mod single;
mod wait;
mod watch;
mod worker_env;

pub use agreement::Difference;
pub use communicator::{Communicator, Pending};
pub use error::{Error, ExitCause};
pub use gloo::Gloo;
pub use launcher::{Finished, LaunchConfig, launch};
pub use nccl::Nccl;
pub use rendezvous::{ConnectOptions, GroupSpec, connect, connect_groups};
pub use single::Single;
pub use worker_env::{Role, WorkerEnv};
