//! Starts the workers of one machine, passes signals on, and ends the job when one dies.
//!
//! The launcher holds the rendezvous store itself, as torchrun's agent does, so no port is
//! guessed and the store outlives any rank. Three things keep workers from staying behind:
//! each is killed by the kernel when the launcher dies ([`process`]), each is killed when
//! [`Workers`] is dropped, and each ends by itself when a collective fails.

mod output;
mod process;
mod signals;
mod workers;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dflash_torch_sys::Store;

use crate::gloo::lost_peer_key;
use crate::rendezvous::store_prefix;
use crate::{Error, ExitCause};
use signals::Signals;
use workers::{Death, Workers};

/// Between two looks at the workers.
const POLL: Duration = Duration::from_millis(20);

/// How long others that fail are heard after the first: a rank that ends in an orderly way
/// closes its connections first, so that a peer may well be gone before it is.
const HEARING: Duration = Duration::from_millis(600);

/// From asking to killing. With the hearing and the last lines it keeps the end within the
/// five seconds that we promise.
const GRACE: Duration = Duration::from_secs(3);

/// What to start.
#[derive(Debug, Clone)]
pub struct LaunchConfig {
    /// The worker program.
    pub program: PathBuf,
    /// Its arguments, the same for all ranks; a worker is told from the launcher by its
    /// environment (see [`Role`](crate::Role)).
    pub args: Vec<OsString>,
    /// More variables for all ranks.
    pub env: Vec<(OsString, OsString)>,
    /// Workers to start on this machine.
    pub nproc: usize,
    /// Machines in the job; each runs a launcher with the same `nproc`.
    pub nnodes: usize,
    /// This machine among them, 0-based.
    pub node_rank: usize,
    /// `host:port` of node 0, where its launcher opens the store; required for more than
    /// one node, unused for one.
    pub rdzv_endpoint: Option<String>,
    /// From the passing on of a signal, or the death of a rank, to the killing of what
    /// still runs.
    pub grace: Duration,
}

impl LaunchConfig {
    /// `nproc` copies of `program` on this machine alone.
    pub fn new(program: PathBuf, args: Vec<OsString>, nproc: usize) -> Self {
        let (env, rdzv_endpoint) = (Vec::new(), None);
        Self { program, args, env, nproc, nnodes: 1, node_rank: 0, rdzv_endpoint, grace: GRACE }
    }

    fn check(&self) -> Result<(), Error> {
        let bad = |flag, value: usize, expected| {
            Err(Error::BadLaunch { flag, value: value.to_string(), expected })
        };
        if self.nproc == 0 {
            return bad("--nproc", self.nproc, "at least 1");
        }
        if self.nnodes == 0 {
            return bad("--nnodes", self.nnodes, "at least 1");
        }
        if self.node_rank >= self.nnodes {
            return bad("--node-rank", self.node_rank, "a number below --nnodes");
        }
        Ok(())
    }

    /// The endpoint of a job of several nodes; `None` for one node.
    fn endpoint(&self) -> Result<Option<(String, u16)>, Error> {
        if self.nnodes == 1 {
            return Ok(None);
        }
        let value = self.rdzv_endpoint.clone().unwrap_or_default();
        let parts = value.rsplit_once(':').and_then(|(host, port)| {
            let host = host.trim_start_matches('[').trim_end_matches(']');
            (!host.is_empty()).then_some((host.to_owned(), port.parse().ok()?))
        });
        let expected = "HOST:PORT of node 0, the same on all nodes";
        parts.map(Some).ok_or(Error::BadLaunch { flag: "--rdzv-endpoint", value, expected })
    }
}

/// How a job ended without a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finished {
    /// All workers exited with code 0.
    Completed,
    /// A signal or `stop` ended it.
    Stopped,
}

/// Where the workers meet, and the store if it is ours.
struct Venue {
    host: String,
    port: u16,
    run_id: String,
    store: Option<Store>,
}

/// Starts the workers and returns when the last has ended.
///
/// Rank 0 has our standard output and error; what other ranks write comes on standard
/// error with `[rank N]` before each line. SIGINT, SIGTERM and `stop` are passed on to the
/// workers, which have process groups of their own, so that the terminal's Ctrl-C reaches
/// them once. Call it on a thread that outlives the call, such as the main one: to the
/// kernel the workers' parent is that thread.
///
/// # Errors
/// [`Error::WorkerDied`] names the rank whose death ended the job; [`Error::Spawn`],
/// [`Error::Listen`], [`Error::BadLaunch`] where it did not begin.
pub fn launch(config: &LaunchConfig, stop: &AtomicBool) -> Result<Finished, Error> {
    config.check()?;
    let venue = open_venue(config)?;
    let signals = Signals::watch()?;
    let mut workers = Workers::start(config, &venue)?;
    let end = follow(&mut workers, &signals, stop);
    if let End::Asked = end {
        workers.signal(signals.to_pass_on());
    } else if let End::Death(_) = end {
        workers.signal(libc::SIGTERM);
    }
    workers.finish(config.grace);
    match end {
        End::AllDone => Ok(Finished::Completed),
        End::Asked => Ok(Finished::Stopped),
        End::Death(deaths) => Err(verdict(&deaths, &venue)),
    }
}

/// Why the launcher stopped waiting.
enum End {
    AllDone,
    Asked,
    Death(Vec<Death>),
}

/// Waits for the job's end, one way or another.
fn follow(workers: &mut Workers, signals: &Signals, stop: &AtomicBool) -> End {
    let mut hearing_ends: Option<Instant> = None;
    loop {
        workers.poll();
        if signals.any() || stop.load(Ordering::Relaxed) {
            return End::Asked;
        }
        let deaths = workers.deaths();
        let heard = hearing_ends.is_some_and(|end| Instant::now() >= end);
        if !deaths.is_empty() && (heard || workers.all_ended()) {
            return End::Death(deaths);
        }
        if workers.all_ended() {
            return End::AllDone;
        }
        if !deaths.is_empty() {
            hearing_ends.get_or_insert_with(|| Instant::now() + HEARING);
        }
        std::thread::sleep(POLL);
    }
}

/// Names the death that ended the job: one by a signal, which no peer's end causes, else
/// the first that no lost peer explains, else the first.
fn verdict(deaths: &[Death], venue: &Venue) -> Error {
    let report = |death: &Death| lost_peer(death.rank, venue);
    let cause = deaths
        .iter()
        .find(|death| matches!(death.cause, ExitCause::Signal(_)))
        .or_else(|| deaths.iter().find(|death| report(death).is_none()))
        .unwrap_or(&deaths[0]);
    let Death { rank, pid, cause: how } = *cause;
    Error::WorkerDied { rank, pid, cause: how, lost_peer: report(cause) }
}

/// What the rank wrote about a peer before it ended.
fn lost_peer(rank: usize, venue: &Venue) -> Option<String> {
    let store = venue.store.as_ref()?;
    let key = lost_peer_key(rank);
    let report = store.contains(&key).ok()?.then(|| store.get(&key).ok())??;
    Some(String::from_utf8_lossy(&report).into_owned())
}

/// Opens the store, or on other nodes than the first only learns where it is.
fn open_venue(config: &LaunchConfig) -> Result<Venue, Error> {
    let endpoint = config.endpoint()?;
    let port = endpoint.as_ref().map_or(0, |(_, port)| *port);
    // Nodes must agree on the name; one launcher alone needs no agreement.
    let run_id = match &endpoint {
        Some((host, port)) => format!("{host}:{port}"),
        None => format!("local-{}", std::process::id()),
    };
    let host = endpoint.map_or_else(|| "127.0.0.1".to_owned(), |(host, _)| host);
    if config.node_rank > 0 {
        return Ok(Venue { host, port, run_id, store: None });
    }
    let remedy = "another program has it: choose another with --rdzv-endpoint on all nodes";
    let limit = Duration::from_secs(10);
    let listen = |source| Error::Listen { port, remedy, source };
    let server = Store::serve(port, limit).map_err(listen)?;
    let store = server.prefixed(&store_prefix(&run_id, 0)).map_err(listen)?;
    Ok(Venue { host, port: server.port(), run_id, store: Some(store) })
}

#[cfg(test)]
mod tests;
