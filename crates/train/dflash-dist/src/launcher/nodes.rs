//! How the launchers of several nodes agree, over the store of node 0, on when an attempt begins,
//! what ended it, and when all are done.
//!
//! Each launcher watches its own ranks. The store outlives every rank. Every node writes its own
//! keys, except for an attempt's failure: the first launcher to report it names the cause for all,
//! and a launcher whose ranks only lost a peer waits a moment for one that knows more. A restart is
//! a new attempt with its own keys; its ranks see a restart count above 0 and resume whatever the
//! command says. Ranks report their first finished step, so that settings that are refused before
//! it are not retried. A single launcher agrees with itself.

use std::time::{Duration, Instant};

use dflash_torch_sys::Store;

use super::failure::Failure;
use super::launch_store::{LaunchStore, Patient};
use super::signals::Signals;
use super::{LaunchConfig, POLL};
use crate::Error;
use crate::wait::until;

/// Interval between checks of other nodes' keys.
const LOOK: Duration = Duration::from_millis(250);

/// The other nodes of the job.
pub(super) struct Nodes {
    node_rank: usize,
    nnodes: usize,
    join_timeout: Duration,
    /// `None` for one node.
    store: Option<Patient>,
    attempt: usize,
    looked: Instant,
}

impl Nodes {
    /// Signs in; refuses a second launcher of a node, and settings that differ from node 0's.
    pub(super) fn join(config: &LaunchConfig, launch: &LaunchStore) -> Result<Self, Error> {
        let LaunchConfig { nnodes, node_rank, join_timeout, .. } = *config;
        let mut store = None;
        if nnodes > 1 {
            let prefixed = launch.store.prefixed(&format!("dflash/{}/launchers", launch.run_id));
            let (host, port) = (launch.host.clone(), launch.port);
            let failed = |source| Error::Endpoint { host, port, source };
            store = Some(prefixed.map_err(failed)?);
        }
        let looked = Instant::now();
        let nodes = Self { node_rank, nnodes, join_timeout, store, attempt: 0, looked };
        nodes.sign_in(config).map(|()| nodes)
    }

    fn sign_in(&self, config: &LaunchConfig) -> Result<(), Error> {
        let node = self.node_rank;
        if self.store.is_none() {
            return Ok(());
        }
        let key = format!("claims/{node}");
        if self.ask(move |store| store.add(&key, 1).ok()).is_some_and(|claims| claims > 1) {
            return Err(Error::NodeTaken { node });
        }
        let LaunchConfig { nnodes, nproc, max_restarts, .. } = config;
        let own = format!("--nnodes {nnodes} --nproc {nproc} --max-restarts {max_restarts}");
        if node == 0 {
            self.set("settings", &own);
            return Ok(());
        }
        // Written as soon as node 0's store is open; the read waits for it.
        let first = self.ask(|store| store.get("settings").ok()).unwrap_or_default();
        let first = String::from_utf8_lossy(&first).into_owned();
        if first == own { Ok(()) } else { Err(Error::NodesDiffer { node, own, first }) }
    }

    /// Waits until all nodes are ready for an attempt; false if a signal came first.
    pub(super) fn gather(&mut self, attempt: usize, signals: &Signals) -> Result<bool, Error> {
        self.attempt = attempt;
        self.set(&self.own_key("ready"), "");
        let start = Instant::now();
        loop {
            // No answer means that node 0, which holds the store, is gone.
            let missing = self.missing("ready").unwrap_or_else(|| vec![0]);
            if missing.is_empty() {
                return Ok(true);
            }
            if signals.any() {
                return Ok(false);
            }
            if start.elapsed() >= self.join_timeout {
                let (nnodes, waited) = (self.nnodes, self.join_timeout);
                return Err(Error::NodesMissing { missing, nnodes, waited });
            }
            std::thread::sleep(5 * POLL);
        }
    }

    /// The failure that ended the attempt on another node; checked every [`LOOK`].
    pub(super) fn news(&mut self) -> Option<Failure> {
        if self.store.is_none() || self.looked.elapsed() < LOOK {
            return None;
        }
        self.looked = Instant::now();
        let failure = self.failure()?;
        self.set(&self.own_key("read"), "");
        Some(failure)
    }

    /// Reports what ended the attempt here; returns the first report, the cause for all nodes.
    pub(super) fn agree(&self, failure: Failure) -> Failure {
        let (claim, key) = (self.key("failing"), self.key("failed"));
        let text = failure.to_report(self.node_rank);
        self.ask(move |store| match store.add(&claim, 1) {
            Ok(1) => store.set(&key, text.as_bytes()).ok(),
            _ => None,
        });
        let agreed = self.await_failure(Duration::from_secs(2));
        self.leave_last("read");
        match agreed {
            Some(agreed) if !agreed.is_from(self.node_rank) => agreed,
            _ => failure,
        }
    }

    /// Waits for another node's report about the end of the attempt.
    pub(super) fn await_failure(&self, limit: Duration) -> Option<Failure> {
        self.store.as_ref()?;
        until(Instant::now(), limit, 5 * POLL, || self.failure())
    }

    /// Reports success here, and waits for the others; `Some` is their failure. Without an answer
    /// within `limit` this node's result is taken as the job's.
    pub(super) fn all_done(&self, limit: Duration) -> Option<Failure> {
        self.set(&self.own_key("done"), "");
        let failure = until(Instant::now(), limit, 5 * POLL, || {
            if self.all_have("done") { Some(None) } else { self.failure().map(Some) }
        });
        if let Some(Some(failure)) = failure {
            return Some(failure);
        }
        self.leave_last("left");
        None
    }

    /// The store ends with node 0's launcher, so that one waits a little until all others have read
    /// what they need, which each confirms under `what`.
    fn leave_last(&self, what: &str) {
        self.set(&self.own_key(what), "");
        if self.node_rank == 0 {
            let limit = Duration::from_secs(2);
            until(Instant::now(), limit, POLL, || self.all_have(what).then_some(()));
        }
    }

    fn failure(&self) -> Option<Failure> {
        let report = self.store.as_ref()?.read(self.key("failed"))?;
        Some(Failure::from_report(&report))
    }

    /// Whether all nodes have set `what` for this attempt, or the store is gone.
    fn all_have(&self, what: &str) -> bool {
        self.missing(what).is_none_or(|nodes| nodes.is_empty())
    }

    /// The nodes that have not set `what` for this attempt; `None` if the store is gone.
    fn missing(&self, what: &str) -> Option<Vec<usize>> {
        if self.store.is_none() {
            return Some(Vec::new());
        }
        let (nnodes, key) = (self.nnodes, self.key(what));
        self.ask(move |store| {
            let mut missing = Vec::new();
            for node in 0..nnodes {
                if !store.contains(&format!("{key}/{node}")).ok()? {
                    missing.push(node);
                }
            }
            Some(missing)
        })
    }

    /// A key of this attempt.
    fn key(&self, what: &str) -> String {
        format!("{what}/{}", self.attempt)
    }

    /// This node's key in this attempt.
    fn own_key(&self, what: &str) -> String {
        format!("{}/{}", self.key(what), self.node_rank)
    }

    fn set(&self, key: &str, value: &str) {
        let (key, value) = (key.to_owned(), value.to_owned());
        self.ask(move |store| store.set(&key, value.as_bytes()).ok());
    }

    fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Store) -> Option<T> + Send + 'static,
    ) -> Option<T> {
        self.store.as_ref()?.ask(question)
    }
}
