//! Errors between processes.

use std::path::PathBuf;
use std::time::Duration;
use std::{fmt, io};

use dflash_torch_sys::Error as TorchError;

use crate::Difference;

/// Maximum differences between ranks in a message: another program may differ in everything.
const SHOWN_DIFFERENCES: usize = 8;

/// An error names the rank and operation, the variable, the flag, or the process that died.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the variants and their fields are")]
pub enum Error {
    #[error("the environment variable {name} is {value:?}, expected {expected}")]
    BadVariable { name: &'static str, value: String, expected: String },
    #[error(
        "{present} is set but {missing} is not; start with `--nproc`, torchrun or srun, or set both"
    )]
    MissingVariable { present: &'static str, missing: &'static str },
    #[error("cannot listen on port {port} for the rendezvous; {remedy}")]
    Listen { port: u16, remedy: &'static str, source: TorchError },
    #[error(
        "rank {rank}: nothing answers at {host}:{port} after {} s; is rank 0 running, and are \
         MASTER_ADDR and MASTER_PORT right?", .waited.as_secs()
    )]
    Unreachable { rank: usize, host: String, port: u16, waited: Duration },
    #[error(
        "rank {rank}: {} of {world_size} ranks did not reach the rendezvous within {} s: {}",
        .missing.len(), .waited.as_secs(), list(.missing)
    )]
    RanksMissing { rank: usize, missing: Vec<usize>, world_size: usize, waited: Duration },
    #[error(
        "rank {rank}: the ranks were not started alike: {}; give all of them the same settings, \
         data, target, program and threads", first_few(.differences)
    )]
    RanksDiffer { rank: usize, differences: Vec<Difference> },
    #[error("rank {rank}: the rendezvous at {host}:{port} failed")]
    Rendezvous { rank: usize, host: String, port: u16, source: TorchError },
    #[error(
        "rank {rank}: restart {attempt} would fail like the attempt before it; fix the error that its message names, and start the job again"
    )]
    Hopeless { rank: usize, attempt: usize },
    #[error(
        "rank {rank}: this job spans nodes, but this machine has no address that others can reach; \
         set GLOO_SOCKET_IFNAME to its network interface"
    )]
    NoAddress { rank: usize },
    /// Most often because a peer died.
    #[error("rank {rank}: {operation} failed")]
    Collective { rank: usize, operation: &'static str, source: TorchError },
    #[error(
        "rank {rank}: {operation} needs a contiguous tensor, got strides {strides:?} for shape \
         {shape:?}"
    )]
    NotContiguous { rank: usize, operation: &'static str, shape: Vec<i64>, strides: Vec<i64> },
    #[error(
        "--backend nccl is not available: {reason}; --backend auto sends GPU tensors through the host if NCCL is missing"
    )]
    NoNccl { reason: String },
    #[error("{flag} is {value}, expected {expected}")]
    BadLaunch { flag: &'static str, value: String, expected: String },
    #[error("{flag} is missing; --nnodes {nnodes} needs it on every node")]
    MissingFlag { flag: &'static str, nnodes: usize },
    #[error(
        "nothing answers at --rdzv-endpoint {endpoint} after {} s ({source}); is the launcher of \
         --node-rank 0 running on that host, and can this machine reach its port?",
        .waited.as_secs()
    )]
    NoEndpoint { endpoint: String, waited: Duration, source: io::Error },
    #[error("the rendezvous at {host}:{port} failed; is that the launcher of --node-rank 0?")]
    Endpoint { host: String, port: u16, source: TorchError },
    #[error(
        "{} of {nnodes} nodes did not join within {} s: node {}; start `dflash train` with \
         --node-rank {} there",
        .missing.len(), .waited.as_secs(), list(.missing), list(.missing)
    )]
    NodesMissing { missing: Vec<usize>, nnodes: usize, waited: Duration },
    #[error(
        "--node-rank {node} has already joined; give every machine its own, and wait until an \
         earlier launcher has ended"
    )]
    NodeTaken { node: usize },
    #[error("node {node} was started with {own}, but node 0 with {first}; they must be the same")]
    NodesDiffer { node: usize, own: String, first: String },
    #[error("cannot start rank {rank} ({program})")]
    Spawn { rank: usize, program: PathBuf, source: io::Error },
    #[error("cannot watch for signals")]
    Signals(#[source] io::Error),
    /// The worker whose death ended the job.
    #[error(
        "rank {rank} (node {node}, {host}, process {pid}) {cause}{}; the other ranks were stopped",
        detail(.lost_peer, .silent)
    )]
    WorkerDied {
        rank: usize,
        node: usize,
        host: String,
        pid: u32,
        cause: ExitCause,
        /// The worker's report about a lost peer, if that is why it ended.
        lost_peer: Option<String>,
        /// The ranks that may be that peer: they had neither ended here nor reported anything.
        silent: Vec<usize>,
    },
    #[error("node {node} reports: {report}")]
    OtherNode { node: usize, report: String },
    /// No restart helped; `source` ended the last attempt.
    #[error("{source} (after {restarts} restart(s))")]
    GivenUp { restarts: usize, source: Box<Error> },
    #[error(
        "rank {} did not end within {:.1} s of SIGTERM and was killed; unsaved work is lost", list(.ranks), .after.as_secs_f64()
    )]
    NotStopped { ranks: Vec<usize>, after: Duration },
}

/// How a process ended unexpectedly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitCause {
    /// With an exit code other than 0.
    Code(i32),
    /// By a signal.
    Signal(i32),
}

impl fmt::Display for ExitCause {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Code(code) => write!(formatter, "exited with code {code}"),
            Self::Signal(signal) => {
                let name = signal_hook::low_level::signal_name(signal).unwrap_or("unknown");
                // SIGKILL nearly always comes from the kernel's out-of-memory killer.
                let hint = if signal == libc::SIGKILL { ", perhaps out of memory" } else { "" };
                write!(formatter, "was killed by signal {signal} ({name}){hint}")
            }
        }
    }
}

fn list(ranks: &[usize]) -> String {
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

fn first_few(differences: &[Difference]) -> String {
    let shown = differences.iter().take(SHOWN_DIFFERENCES).map(ToString::to_string);
    let text = shown.collect::<Vec<_>>().join("; ");
    match differences.len().saturating_sub(SHOWN_DIFFERENCES) {
        0 => text,
        more => format!("{text}; and {more} more"),
    }
}

fn detail(lost_peer: &Option<String>, silent: &[usize]) -> String {
    let Some(report) = lost_peer else { return String::new() };
    let suspects = match silent {
        [] => String::new(),
        ranks => format!("; nothing was heard from rank {}", list(ranks)),
    };
    format!(" after losing a peer ({report}){suspects}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_listed_up_to_a_few() {
        let difference = |name: usize| Difference {
            name: format!("--flag-{name}"),
            values: vec![(Some("1".to_owned()), vec![0]), (Some("2".to_owned()), vec![1])],
        };
        let check = |count: usize, expected: &str| {
            let differences = (0..count).map(difference).collect();
            let text = Error::RanksDiffer { rank: 1, differences }.to_string();
            assert!(text.contains(expected), "{text}");
        };
        check(1, "alike: --flag-0 is 1 on rank 0 and 2 on rank 1; give all of them");
        check(2, "; --flag-1 is 1 on rank 0 and 2 on rank 1; give all");
        check(10, "; --flag-7 is 1 on rank 0 and 2 on rank 1; and 2 more; give all");
    }

    #[test]
    fn a_dead_worker_is_named_with_its_cause() {
        let check = |cause, lost_peer: Option<&str>, silent: &[usize], expected: &str| {
            let (lost_peer, silent) = (lost_peer.map(str::to_owned), silent.to_vec());
            let (rank, node, host, pid) = (3, 1, "gpu-b".to_owned(), 42);
            let error = Error::WorkerDied { rank, node, host, pid, cause, lost_peer, silent };
            let expected = format!(
                "rank 3 (node 1, gpu-b, process 42) {expected}; the other ranks were stopped"
            );
            assert_eq!(error.to_string(), expected);
        };
        check(ExitCause::Code(3), None, &[], "exited with code 3");
        let killed = "was killed by signal 9 (SIGKILL), perhaps out of memory";
        check(ExitCause::Signal(libc::SIGKILL), None, &[], killed);
        let lost = "exited with code 1 after losing a peer (barrier failed); \
                    nothing was heard from rank 0, 2";
        check(ExitCause::Code(1), Some("barrier failed"), &[0, 2], lost);
    }
}
