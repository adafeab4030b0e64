//! The store through which the workers meet, held by the launcher of node 0.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dflash_torch_sys::Store;

use super::signals::Signals;
use super::{LaunchConfig, POLL};
use crate::Error;
use crate::gloo::{BEGAN_KEY, PERMANENT_KEY, lost_peer_key};
use crate::rendezvous::{self, store_prefix};

/// Timeout of a store request.
const ANSWER: Duration = Duration::from_secs(10);

/// Pause of requests after a timeout, so that a broken link does not delay every request.
const SILENCE: Duration = Duration::from_secs(60);

/// The store and its address, the same for all attempts.
#[derive(Clone)]
pub(super) struct LaunchStore {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) run_id: String,
    /// On node 0 the server; elsewhere a client of it.
    pub(super) store: Patient,
}

/// A store with a time limit per request. Clones and prefixes share the limit.
#[derive(Clone)]
pub(super) struct Patient {
    pub(super) store: Arc<Store>,
    /// When a request last timed out.
    silent: Arc<Mutex<Option<Instant>>>,
}

/// The part of the store for one attempt's workers.
pub(super) struct AttemptStore {
    pub(super) launch: LaunchStore,
    /// 0-based.
    pub(super) attempt: usize,
    /// The keys of this attempt's workers.
    pub(super) store: Patient,
}

impl LaunchStore {
    /// Opens the store, or connects to that of node 0; `None` if a signal came first.
    pub(super) fn open(config: &LaunchConfig, signals: &Signals) -> Result<Option<Self>, Error> {
        let Some((host, port)) = config.endpoint()? else { return Self::local().map(Some) };
        // A store serves one job, and nodes may use different names for node 0.
        let run_id = "nodes".to_owned();
        let store = if config.node_rank == 0 {
            serve(&host, port)?
        } else if await_listener(config, &host, port, signals)? {
            let unreachable = |source| Error::Endpoint { host: host.clone(), port, source };
            rendezvous::reach(&host, port, ANSWER).map_err(unreachable)?
        } else {
            return Ok(None);
        };
        Ok(Some(Self { host, port, run_id, store: Patient::new(store) }))
    }

    /// A single machine needs no agreed port.
    fn local() -> Result<Self, Error> {
        let (host, run_id) = ("127.0.0.1".to_owned(), format!("local-{}", std::process::id()));
        let store = serve(&host, 0)?;
        Ok(Self { host, port: store.port(), run_id, store: Patient::new(store) })
    }

    /// The part of it that one attempt's workers use.
    pub(super) fn of_attempt(&self, attempt: usize) -> Result<AttemptStore, Error> {
        let store = self.store.prefixed(&store_prefix(&self.run_id, attempt));
        let store = store.map_err(listen(self.port))?;
        Ok(AttemptStore { launch: self.clone(), attempt, store })
    }
}

impl AttemptStore {
    /// The rank's report about a lost peer.
    pub(super) fn lost_peer(&self, rank: usize) -> Option<String> {
        self.store.read(lost_peer_key(rank))
    }

    /// Whether a rank has reported that its settings are valid and its work in progress, and none
    /// that a restart would fail in the same way.
    pub(super) fn may_improve(&self) -> bool {
        self.has_begun() && !self.has(PERMANENT_KEY)
    }

    /// Whether the ranks' work is in progress.
    pub(super) fn has_begun(&self) -> bool {
        self.has(BEGAN_KEY)
    }

    fn has(&self, key: &'static str) -> bool {
        self.store.ask(move |store| store.contains(key).ok()).unwrap_or(false)
    }
}

impl Patient {
    pub(super) fn new(store: Store) -> Self {
        Self { store: Arc::new(store), silent: Arc::default() }
    }

    /// The part of it with this prefix.
    pub(super) fn prefixed(&self, prefix: &str) -> Result<Self, dflash_torch_sys::Error> {
        let store = Arc::new(self.store.prefixed(prefix)?);
        Ok(Self { store, silent: Arc::clone(&self.silent) })
    }

    /// Makes a request on a thread of its own: a node that lost power does not close connections,
    /// and the launcher must keep watching its workers. `None` without an answer.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Store) -> Option<T> + Send + 'static,
    ) -> Option<T> {
        if self.silent().is_some_and(|since| since.elapsed() < SILENCE) {
            return None;
        }
        let store = Arc::clone(&self.store);
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || sender.send(question(&store)));
        let answer = receiver.recv_timeout(ANSWER);
        *self.silent() = answer.is_err().then(Instant::now);
        answer.ok().flatten()
    }

    /// The text at `key`, if it is set.
    pub(super) fn read(&self, key: String) -> Option<String> {
        let text = self.ask(move |store| match store.contains(&key) {
            Ok(true) => store.get(&key).ok(),
            _ => None,
        })?;
        Some(String::from_utf8_lossy(&text).into_owned())
    }

    fn silent(&self) -> MutexGuard<'_, Option<Instant>> {
        self.silent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn serve(host: &str, port: u16) -> Result<Store, Error> {
    rendezvous::serve(host, port, ANSWER).map_err(listen(port))
}

fn listen(port: u16) -> impl FnOnce(dflash_torch_sys::Error) -> Error {
    move |source| {
        let remedy = match source {
            dflash_torch_sys::Error::Listen { .. } => {
                "another program has it: choose another with --rdzv-endpoint on all nodes"
            }
            _ => "the store does not answer there; see the cause",
        };
        Error::Listen { port, remedy, source }
    }
}

/// Waits until node 0 listens: nodes start at different times. False if a signal came first.
fn await_listener(
    config: &LaunchConfig,
    host: &str,
    port: u16,
    signals: &Signals,
) -> Result<bool, Error> {
    let start = Instant::now();
    loop {
        let Err(source) = answers(host, port) else { return Ok(true) };
        if signals.any() {
            return Ok(false);
        }
        if start.elapsed() >= config.join_timeout {
            let (endpoint, waited) = (format!("{host}:{port}"), config.join_timeout);
            return Err(Error::NoEndpoint { endpoint, waited, source });
        }
        std::thread::sleep(5 * POLL);
    }
}

fn answers(host: &str, port: u16) -> io::Result<()> {
    let mut last = io::Error::other("the name has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, Duration::from_secs(2)) {
            Ok(_) => return Ok(()),
            Err(error) => last = error,
        }
    }
    Err(last)
}
