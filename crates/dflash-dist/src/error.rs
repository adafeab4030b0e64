//! What can go wrong between processes.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use dflash_torch_sys::Error as TorchError;

/// Errors name the rank and the operation, the variable, or the process that died.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A launcher's variable has a value that cannot be.
    #[error("the environment variable {name} is {value:?}, expected {expected}")]
    BadVariable {
        /// The variable.
        name: &'static str,
        /// What it holds.
        value: String,
        /// What would do.
        expected: String,
    },
    /// A launcher set some of its variables, but not this one.
    #[error(
        "{present} is set but {missing} is not; start with `--nproc`, torchrun or srun, or set both"
    )]
    MissingVariable {
        /// The one that is there.
        present: &'static str,
        /// The one to set.
        missing: &'static str,
    },
    /// Rank 0 cannot listen on the rendezvous port.
    #[error("cannot listen on port {port} for the rendezvous; {remedy}")]
    Listen {
        /// The port.
        port: u16,
        /// Which setting chooses another.
        remedy: &'static str,
        /// c10d's answer.
        #[source]
        source: TorchError,
    },
    /// The rendezvous store was not reached.
    #[error("rank {rank}: nothing answers at {host}:{port} after {} s; is rank 0 running, and are MASTER_ADDR and MASTER_PORT right?", .waited.as_secs())]
    Unreachable {
        /// The process that tried.
        rank: usize,
        /// MASTER_ADDR.
        host: String,
        /// MASTER_PORT.
        port: u16,
        /// How long it tried.
        waited: Duration,
    },
    /// Some ranks did not come to the rendezvous.
    #[error("rank {rank}: {} of {world_size} ranks did not reach the rendezvous within {} s: {}", .missing.len(), .waited.as_secs(), list(.missing))]
    RanksMissing {
        /// The process that waited.
        rank: usize,
        /// The ranks that are missing.
        missing: Vec<usize>,
        /// How many there should be.
        world_size: usize,
        /// How long it waited.
        waited: Duration,
    },
    /// A rendezvous step failed.
    #[error("rank {rank}: the rendezvous at {host}:{port} failed")]
    Rendezvous {
        /// The process.
        rank: usize,
        /// MASTER_ADDR.
        host: String,
        /// MASTER_PORT.
        port: u16,
        /// c10d's answer.
        #[source]
        source: TorchError,
    },
    /// No address of this machine is known under which other nodes can reach it.
    #[error(
        "rank {rank}: this job spans nodes, but this machine has no address that others can reach; set GLOO_SOCKET_IFNAME to its network interface"
    )]
    NoAddress {
        /// The process.
        rank: usize,
    },
    /// A collective failed, most often because a peer died.
    #[error("rank {rank}: {operation} failed")]
    Collective {
        /// The process that saw it.
        rank: usize,
        /// The collective.
        operation: &'static str,
        /// gloo's answer.
        #[source]
        source: TorchError,
    },
    /// A tensor was handed to a collective that only takes contiguous ones.
    #[error(
        "rank {rank}: {operation} needs a contiguous tensor, got strides {strides:?} for shape {shape:?}"
    )]
    NotContiguous {
        /// The process.
        rank: usize,
        /// The collective.
        operation: &'static str,
        /// The tensor's shape.
        shape: Vec<i64>,
        /// Its strides, in elements.
        strides: Vec<i64>,
    },
    /// NCCL was asked for, and a rank cannot use it.
    #[error(
        "--backend nccl is not available: {reason}; --backend auto sends GPU tensors over the host where NCCL is missing"
    )]
    NoNccl {
        /// Whose, and why.
        reason: String,
    },
    /// The launcher's settings contradict one another.
    #[error("{flag} is {value}, expected {expected}")]
    BadLaunch {
        /// The flag.
        flag: &'static str,
        /// What it holds.
        value: String,
        /// What would do.
        expected: String,
    },
    /// A job of several nodes lacks a setting.
    #[error("{flag} is missing; --nnodes {nnodes} needs it on every node")]
    MissingFlag {
        /// The flag.
        flag: &'static str,
        /// Nodes of the job.
        nnodes: usize,
    },
    /// Node 0's launcher was not reached.
    #[error("nothing answers at --rdzv-endpoint {endpoint} after {} s ({source}); is the launcher of --node-rank 0 running on that host, and can this machine reach its port?", .waited.as_secs())]
    NoEndpoint {
        /// The endpoint.
        endpoint: String,
        /// How long it was tried.
        waited: Duration,
        /// The last attempt's answer.
        #[source]
        source: io::Error,
    },
    /// What answers at the endpoint does not behave as node 0's launcher.
    #[error("the rendezvous at {host}:{port} failed; is that the launcher of --node-rank 0?")]
    Endpoint {
        /// Its host.
        host: String,
        /// Its port.
        port: u16,
        /// c10d's answer.
        #[source]
        source: TorchError,
    },
    /// Some nodes did not come.
    #[error("{} of {nnodes} nodes did not join within {} s: node {}; start `dflash train` with --node-rank {} there", .missing.len(), .waited.as_secs(), list(.missing), list(.missing))]
    NodesMissing {
        /// The nodes that are missing.
        missing: Vec<usize>,
        /// How many there should be.
        nnodes: usize,
        /// How long they were waited for.
        waited: Duration,
    },
    /// Two launchers say that they are the same node.
    #[error(
        "--node-rank {node} has already joined; give every machine its own, and wait until an earlier launcher has ended"
    )]
    NodeTaken {
        /// The node.
        node: usize,
    },
    /// Launchers were started with different settings.
    #[error("node {node} was started with {own}, but node 0 with {first}; they must be the same")]
    NodesDiffer {
        /// This node.
        node: usize,
        /// Its settings.
        own: String,
        /// Node 0's.
        first: String,
    },
    /// A worker could not be started.
    #[error("cannot start rank {rank} ({program})")]
    Spawn {
        /// The worker.
        rank: usize,
        /// What was to be run.
        program: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// A signal handler could not be installed.
    #[error("cannot watch for signals")]
    Signals(#[source] io::Error),
    /// A worker ended the job by dying.
    #[error("rank {rank} (node {node}, {host}, process {pid}) {cause}{}; the other ranks were stopped", detail(.lost_peer, .silent))]
    WorkerDied {
        /// The worker that died first.
        rank: usize,
        /// Its node.
        node: usize,
        /// That machine's name.
        host: String,
        /// Its process id.
        pid: u32,
        /// How.
        cause: ExitCause,
        /// What the worker reported about a lost peer, where that is why it ended.
        lost_peer: Option<String>,
        /// The ranks that may be that peer: they had neither ended here nor reported anything.
        silent: Vec<usize>,
    },
    /// Another node's launcher named the cause.
    #[error("node {node} reports: {report}")]
    OtherNode {
        /// The node.
        node: usize,
        /// Its error.
        report: String,
    },
    /// All ranks were started again in vain.
    #[error("{source} (after {restarts} restart(s))")]
    GivenUp {
        /// How often.
        restarts: usize,
        /// What ended the last attempt.
        #[source]
        source: Box<Error>,
    },
    /// Workers did not end after SIGTERM.
    #[error(
        "rank {} did not end within {:.1} s of SIGTERM and was killed; what was not saved by then is lost",
        list(.ranks), .after.as_secs_f64()
    )]
    NotStopped {
        /// The ranks that were killed.
        ranks: Vec<usize>,
        /// The time they had.
        after: Duration,
    },
}

/// How a process ended when it should not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitCause {
    /// With an exit code other than 0.
    Code(i32),
    /// By a signal.
    Signal(i32),
}

impl std::fmt::Display for ExitCause {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Self::Code(code) => write!(formatter, "exited with code {code}"),
            Self::Signal(signal) => {
                let name = signal_hook::low_level::signal_name(signal).unwrap_or("unknown");
                write!(formatter, "was killed by signal {signal} ({name})")?;
                // What a kill out of nowhere nearly always is.
                let hint =
                    if signal == libc::SIGKILL { ", perhaps for lack of memory" } else { "" };
                formatter.write_str(hint)
            }
        }
    }
}

fn list(ranks: &[usize]) -> String {
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

fn detail(lost_peer: &Option<String>, silent: &[usize]) -> String {
    let Some(report) = lost_peer else { return String::new() };
    let suspects = match silent {
        [] => String::new(),
        ranks => format!("; nothing was heard of rank {}", list(ranks)),
    };
    format!(" after losing a peer ({report}){suspects}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_worker_is_named_with_its_cause() {
        let check = |cause, lost_peer: Option<&str>, silent: &[usize], expected: &str| {
            let (lost_peer, silent) = (lost_peer.map(str::to_owned), silent.to_vec());
            let (rank, node, host, pid) = (3, 1, "gpu-b".to_owned(), 42);
            let error = Error::WorkerDied { rank, node, host, pid, cause, lost_peer, silent };
            assert_eq!(error.to_string(), format!("rank 3 (node 1, gpu-b, process 42) {expected}"));
        };
        check(ExitCause::Code(3), None, &[], "exited with code 3; the other ranks were stopped");
        check(
            ExitCause::Signal(libc::SIGKILL),
            None,
            &[],
            "was killed by signal 9 (SIGKILL), perhaps for lack of memory; \
             the other ranks were stopped",
        );
        check(
            ExitCause::Code(1),
            Some("barrier failed"),
            &[0, 2],
            "exited with code 1 after losing a peer (barrier failed); \
             nothing was heard of rank 0, 2; the other ranks were stopped",
        );
    }

    #[test]
    fn missing_ranks_are_listed() {
        let waited = Duration::from_secs(60);
        let error =
            Error::RanksMissing { rank: 0, missing: vec![2, 3], world_size: 4, waited }.to_string();
        let expected = "rank 0: 2 of 4 ranks did not reach the rendezvous within 60 s: 2, 3";
        assert_eq!(error, expected);
    }
}
