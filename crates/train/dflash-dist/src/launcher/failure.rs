//! Why an attempt ended: separates the cause from its consequences, and decides whether to retry.

use super::LaunchConfig;
use super::launch_store::AttemptStore;
use super::workers::Death;
use crate::{Error, ExitCause};

/// Exit codes that mean that a restart cannot help: the rank's settings or command line are wrong.
const REFUSALS: [i32; 2] = [1, 2];

/// Exit codes of a rank that was told to end (SIGHUP, SIGINT, SIGTERM). It has saved, or reports
/// that there was no time to.
const ASKED: [i32; 3] = [129, 130, 143];

/// Why an attempt failed.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: Error,
    /// Whether a retry may succeed.
    pub(super) may_pass: bool,
    /// Whether it is the cause itself; otherwise a peer was lost, and another node may know why.
    pub(super) is_cause: bool,
    /// The node that reported it, if it was not this one.
    from: Option<usize>,
}

impl Failure {
    /// A permanent error.
    pub(super) fn lasting(error: Error) -> Self {
        Self { error, may_pass: false, is_cause: true, from: None }
    }

    /// The error of a job that was restarted `restarts` times.
    pub(super) fn after(self, restarts: usize) -> Error {
        match restarts {
            0 => self.error,
            _ => Error::GivenUp { restarts, source: Box::new(self.error) },
        }
    }

    /// Serialized for the store.
    pub(super) fn to_report(&self, node: usize) -> String {
        format!("{} {node} {}", u8::from(self.may_pass), self.error)
    }

    /// The inverse of [`Self::to_report`], from another node.
    pub(super) fn from_report(report: &str) -> Self {
        let mut parts = report.splitn(3, ' ');
        let may_pass = parts.next() == Some("1");
        let node = parts.next().and_then(|node| node.parse().ok()).unwrap_or(0);
        let report = parts.next().unwrap_or_default().to_owned();
        let error = Error::OtherNode { node, report };
        Self { error, may_pass, is_cause: true, from: Some(node) }
    }

    /// Whether it came from that node's report.
    pub(super) fn is_from(&self, node: usize) -> bool {
        self.from == Some(node)
    }
}

/// Chooses the death that ended the attempt: one by a signal, because a lost peer does not cause
/// that; else the first one that no lost peer explains; else the first.
pub(super) fn of_deaths(deaths: &[Death], config: &LaunchConfig, store: &AttemptStore) -> Failure {
    let cause = deaths
        .iter()
        .find(|death| matches!(death.cause, ExitCause::Signal(_)))
        .or_else(|| deaths.iter().find(|death| store.lost_peer(death.rank).is_none()))
        .unwrap_or(&deaths[0]);
    let Death { rank, pid, cause } = *cause;
    let lost_peer = match cause {
        ExitCause::Signal(_) => None,
        ExitCause::Code(_) => store.lost_peer(rank),
    };
    let silent = if lost_peer.is_some() { silent(deaths, config, store) } else { Vec::new() };
    let is_cause = lost_peer.is_none();
    let may_pass = match cause {
        ExitCause::Signal(_) => true,
        ExitCause::Code(code) if ASKED.contains(&code) => false,
        ExitCause::Code(code) if REFUSALS.contains(&code) => store.may_improve(),
        ExitCause::Code(_) => true,
    };
    let (node, host) = (config.node_rank, hostname());
    let error = Error::WorkerDied { rank, node, host, pid, cause, lost_peer, silent };
    Failure { error, may_pass, is_cause, from: None }
}

/// The ranks that have neither ended here nor reported a lost peer: if all others wait in a
/// collective, one of these hangs.
fn silent(deaths: &[Death], config: &LaunchConfig, store: &AttemptStore) -> Vec<usize> {
    (0..config.world_size())
        .filter(|rank| deaths.iter().all(|death| death.rank != *rank))
        .filter(|&rank| store.lost_peer(rank).is_none())
        .collect()
}

/// Whether these ranks ended because one of them was told to stop.
pub(super) fn were_stopped(deaths: &[Death]) -> bool {
    deaths.iter().all(|death| matches!(death.cause, ExitCause::Code(code) if ASKED.contains(&code)))
}

/// Whether a worker that was sent `signal` ended as expected.
pub(super) fn is_orderly(death: &Death, signal: i32) -> bool {
    match death.cause {
        ExitCause::Code(code) => code == 128 + signal,
        ExitCause::Signal(ended_by) => ended_by == signal,
    }
}

/// This machine's name, for people.
fn hostname() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}
