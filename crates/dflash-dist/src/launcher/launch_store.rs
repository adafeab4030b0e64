//! Where the workers meet: the store, which the launcher of node 0 holds.

use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dflash_torch_sys::Store;

use super::signals::Signals;
use super::{LaunchConfig, POLL};
use crate::Error;
use crate::gloo::{BEGAN_KEY, PERMANENT_KEY, lost_peer_key};
use crate::rendezvous::{self, store_prefix};

/// For one answer of the store.
const ANSWER: Duration = Duration::from_secs(10);

/// The store and its address, the same for all attempts.
pub(super) struct LaunchStore {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) run_id: String,
    /// On node 0 the server; elsewhere a client of it.
    pub(super) store: Arc<Store>,
}

/// What one attempt's workers are told, and what they say.
pub(super) struct AttemptStore {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) run_id: String,
    pub(super) attempt: usize,
    /// The keys of this attempt's workers; `None` only in tests.
    store: Option<Arc<Store>>,
}

impl LaunchStore {
    /// Opens the store, or on other nodes than the first connects to it; `None` where a signal came
    /// first.
    pub(super) fn open(config: &LaunchConfig, signals: &Signals) -> Result<Option<Self>, Error> {
        let Some((host, port)) = config.endpoint()? else { return Self::local().map(Some) };
        // A store serves one job, and nodes may name node 0 differently.
        let run_id = "nodes".to_owned();
        let store = if config.node_rank == 0 {
            serve(&host, port)?
        } else if await_listener(config, (&host, port), signals)? {
            let unreachable = |source| Error::Endpoint { host: host.clone(), port, source };
            Store::connect(&host, port, ANSWER).map_err(unreachable)?
        } else {
            return Ok(None);
        };
        Ok(Some(Self { host, port, run_id, store: Arc::new(store) }))
    }

    /// One machine needs no agreement on a port.
    fn local() -> Result<Self, Error> {
        let (host, run_id) = ("127.0.0.1".to_owned(), format!("local-{}", std::process::id()));
        let store = serve(&host, 0)?;
        Ok(Self { host, port: store.port(), run_id, store: Arc::new(store) })
    }

    /// The part of it that one attempt's workers use.
    pub(super) fn of_attempt(&self, attempt: usize) -> Result<AttemptStore, Error> {
        let Self { host, port, run_id, store } = self;
        let (host, port, run_id) = (host.clone(), *port, run_id.clone());
        let store = store.prefixed(&store_prefix(&run_id, attempt)).map_err(listen(port))?;
        Ok(AttemptStore { host, port, run_id, attempt, store: Some(Arc::new(store)) })
    }
}

impl AttemptStore {
    #[cfg(test)]
    pub(super) fn without_store(host: &str, port: u16, attempt: usize) -> Self {
        Self { host: host.to_owned(), port, run_id: "job".to_owned(), attempt, store: None }
    }

    #[cfg(test)]
    pub(super) fn set(&self, key: &str, value: &[u8]) {
        self.store.as_ref().unwrap().set(key, value).unwrap();
    }

    /// What the rank wrote about a peer before it ended.
    pub(super) fn lost_peer(&self, rank: usize) -> Option<String> {
        let key = lost_peer_key(rank);
        let report = self.ask(move |store| match store.contains(&key) {
            Ok(true) => store.get(&key).ok(),
            _ => None,
        })?;
        Some(String::from_utf8_lossy(&report).into_owned())
    }

    /// Whether a rank has said that its settings were good and its work under way, and none that
    /// its fault would come again.
    pub(super) fn may_improve(&self) -> bool {
        let has = |key: &'static str| self.ask(move |store| store.contains(key).ok());
        has(BEGAN_KEY).unwrap_or(false) && !has(PERMANENT_KEY).unwrap_or(false)
    }

    fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Store) -> Option<T> + Send + 'static,
    ) -> Option<T> {
        within(self.store.as_ref()?, question)
    }
}

/// Asks the store on a thread of its own: a node that lost its power does not close connections,
/// and the launcher must go on watching its workers. `None` where there was no answer.
pub(super) fn within<T: Send + 'static>(
    store: &Arc<Store>,
    question: impl FnOnce(&Store) -> Option<T> + Send + 'static,
) -> Option<T> {
    let store = Arc::clone(store);
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(question(&store)));
    receiver.recv_timeout(ANSWER).ok().flatten()
}

fn serve(host: &str, port: u16) -> Result<Store, Error> {
    rendezvous::serve(host, port, ANSWER).map_err(listen(port))
}

fn listen(port: u16) -> impl FnOnce(dflash_torch_sys::Error) -> Error {
    let remedy = "another program has it: choose another with --rdzv-endpoint on all nodes";
    move |source| Error::Listen { port, remedy, source }
}

/// Waits until node 0 listens: nodes start at different times. False where a signal came first.
fn await_listener(
    config: &LaunchConfig,
    (host, port): (&str, u16),
    signals: &Signals,
) -> Result<bool, Error> {
    let deadline = Instant::now() + config.join_timeout;
    loop {
        let problem = match answers(host, port) {
            Ok(()) => return Ok(true),
            Err(problem) => problem,
        };
        if signals.any() {
            return Ok(false);
        }
        if Instant::now() >= deadline {
            let (endpoint, waited) = (format!("{host}:{port}"), config.join_timeout);
            return Err(Error::NoEndpoint { endpoint, waited, source: problem });
        }
        std::thread::sleep(5 * POLL);
    }
}

fn answers(host: &str, port: u16) -> std::io::Result<()> {
    let mut last = std::io::Error::other("the name has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, Duration::from_secs(2)) {
            Ok(_) => return Ok(()),
            Err(error) => last = error,
        }
    }
    Err(last)
}
