//! Rendezvous of workers: a store at a known address, a roll call, then gloo's connections.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dflash_settings::Backend;
use dflash_torch_sys::{Bind, Error as TorchError, GlooConfig, ProcessGroup, Store};
use tch::Device;

use crate::agreement::{self, present_key};
use crate::gloo::PERMANENT_KEY;
use crate::lifeline::LifelineAddress;
use crate::nccl;
use crate::wait::until;
use crate::{Communicator, Error, Gloo, Single, WorkerEnv};

/// Interval between checks of who has arrived, or between attempts to reach the store.
const POLL: Duration = Duration::from_millis(50);

/// An address of a documentation network (RFC 5737) where nobody answers: the route to it shows
/// which of our addresses faces outward. Nothing is sent.
const ELSEWHERE: (Ipv4Addr, u16) = (Ipv4Addr::new(192, 0, 2, 1), 9);

/// The interface that the user chose for gloo, as torch reads it.
const INTERFACE_VARIABLE: &str = "GLOO_SOCKET_IFNAME";

/// Timeouts, and how tensors are exchanged.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    /// Timeout for all ranks to arrive at the rendezvous.
    pub join_timeout: Duration,
    /// Timeout of each collective: how far the slowest rank may lag behind the fastest.
    pub collective_timeout: Duration,
    /// Where this process computes.
    pub device: Device,
    /// Backend for GPU tensors.
    pub backend: Backend,
    /// Names, such as flags, and values that must be the same on all ranks.
    pub common: Vec<(String, String)>,
}

impl ConnectOptions {
    /// For a process on the CPU, with `timeout` for the rendezvous and each collective.
    pub fn cpu(timeout: Duration) -> Self {
        Self {
            join_timeout: timeout,
            collective_timeout: timeout,
            device: Device::Cpu,
            backend: Backend::Auto,
            common: Vec::new(),
        }
    }
}

/// Joins the group that `env` describes; returns when all ranks are connected.
///
/// # Errors
/// [`Error::Listen`] if rank 0's port is taken, [`Error::Unreachable`] if the store does not
/// answer, [`Error::RanksMissing`] if ranks do not arrive, [`Error::RanksDiffer`] if their settings
/// differ, [`Error::NoAddress`], [`Error::NoNccl`] if NCCL was requested and is not available, and
/// [`Error::Rendezvous`] for everything else.
pub fn connect(env: &WorkerEnv, options: &ConnectOptions) -> Result<Box<dyn Communicator>, Error> {
    nccl::check(options)?;
    let Some(host) = &env.master_addr else { return Ok(Box::new(Single)) };
    let meeting = Meeting { env, host, limit: options.join_timeout, start: Instant::now() };
    let store = meeting.open_store()?;
    let prefix = store_prefix(&env.run_id, env.restart_count);
    let own = store.prefixed(&prefix).map_err(|source| meeting.failed(source))?;
    meeting.refuse_hopeless(&store, &own)?;
    let store = own;
    meeting.call_roll(&store, &options.common)?;
    meeting.compare(&store)?;
    let bind = meeting.bind()?;
    let place = meeting.place(&bind);
    let timeout = options.collective_timeout;
    let config = GlooConfig { rank: env.rank, size: env.world_size, bind, timeout };
    let group = ProcessGroup::gloo(&store, &config).map_err(|source| meeting.failed(source))?;
    nccl::join_or_stage(Gloo::new(group, store, env, timeout), options, place)
}

/// A group of some of the ranks.
#[derive(Debug, Clone)]
pub struct GroupSpec {
    /// Its unique name.
    pub name: String,
    /// Its ranks among all, in the order of their ranks in the group.
    pub ranks: Vec<usize>,
    /// The device of its tensors; NCCL is tried for a GPU.
    pub device: Device,
    /// Timeout of each collective: how far its slowest rank may lag behind the fastest.
    pub timeout: Duration,
}

/// Joins every one of `groups` that this process belongs to; the others are `None`. All ranks must
/// pass the same groups. Returns when all ranks have arrived and its groups are connected.
///
/// # Errors
/// As [`connect`]'s.
pub fn connect_groups(
    env: &WorkerEnv,
    options: &ConnectOptions,
    groups: &[GroupSpec],
) -> Result<Vec<Option<Box<dyn Communicator>>>, Error> {
    let host = env.master_addr.as_deref().unwrap_or("localhost");
    let meeting = Meeting { env, host, limit: options.join_timeout, start: Instant::now() };
    let prefix = store_prefix(&env.run_id, env.restart_count);
    let store = meeting.open_store()?.prefixed(&prefix);
    let store = Arc::new(store.map_err(|source| meeting.failed(source))?);
    meeting.call_roll(&store, &options.common)?;
    meeting.compare(&store)?;
    let bind = meeting.bind()?;
    let join = |spec: &GroupSpec| match spec.ranks.iter().position(|&rank| rank == env.rank) {
        Some(index) => meeting.join(&store, options, spec, index, &bind).map(Some),
        None => Ok(None),
    };
    groups.iter().map(join).collect()
}

/// Separates the keys of different jobs and attempts in one store.
pub(crate) fn store_prefix(run_id: &str, restart_count: usize) -> String {
    format!("dflash/{run_id}/{restart_count}")
}

/// Opens the store at the address that `host` names, which may be loopback. It listens on all
/// interfaces if no address of `host` belongs to this machine (those of a gateway or a container's
/// host do not), or if a name resolves to loopback here: many distributions map a machine's own
/// name there, and other machines do not.
pub(crate) fn serve(host: &str, port: u16, limit: Duration) -> Result<Store, TorchError> {
    let reachable = |address: &SocketAddr| !address.ip().is_loopback() || names_loopback(host);
    for address in (host, port).to_socket_addrs().into_iter().flatten().filter(reachable) {
        match Store::serve(address, limit) {
            Err(TorchError::Listen { source, .. })
                if !matches!(source.kind(), ErrorKind::AddrInUse | ErrorKind::PermissionDenied) => {
            }
            outcome => return outcome,
        }
    }
    Store::serve_everywhere(port, limit)
}

/// Connects to the store at `host:port`. c10d waits without a limit for the first answer of
/// whatever listens there, which may be another program.
pub(crate) fn reach(host: &str, port: u16, limit: Duration) -> Result<Store, TorchError> {
    let host = host.to_owned();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(Store::connect(&host, port, limit)));
    let late = TorchError::StillRunning { operation: "reach the store", after: limit };
    receiver.recv_timeout(limit.saturating_add(Duration::from_secs(1))).unwrap_or(Err(late))
}

/// One process's attempt to meet the others.
struct Meeting<'a> {
    env: &'a WorkerEnv,
    host: &'a str,
    limit: Duration,
    start: Instant,
}

impl Meeting<'_> {
    fn open_store(&self) -> Result<Store, Error> {
        if self.env.rank == 0 && !self.env.use_agent_store {
            let port = self.env.master_port;
            let remedy = "another program has it: set MASTER_PORT to a free one in all ranks";
            let listen = |source| Error::Listen { port, remedy, source };
            return serve(self.host, port, self.limit).map_err(listen);
        }
        self.await_listener()?;
        let left = self.limit.saturating_sub(self.start.elapsed());
        reach(self.host, self.env.master_port, left).map_err(|source| self.failed(source))
    }

    /// Retries until someone listens. c10d would retry too, but slowly, and log its attempts.
    fn await_listener(&self) -> Result<(), Error> {
        let listening = || self.is_listening().then_some(());
        until(self.start, self.limit, POLL, listening).ok_or_else(|| {
            let (rank, port) = (self.env.rank, self.env.master_port);
            Error::Unreachable { rank, host: self.host.to_owned(), port, waited: self.limit }
        })
    }

    fn is_listening(&self) -> bool {
        let Ok(addresses) = (self.host, self.env.master_port).to_socket_addrs() else {
            return false;
        };
        let patience = self.limit.clamp(POLL, Duration::from_secs(5));
        addresses.into_iter().any(|address| TcpStream::connect_timeout(&address, patience).is_ok())
    }

    /// Ends an attempt at once if the previous one reported that it would fail in the same way: no
    /// exit code keeps torchrun from restarting ranks, but its store outlives them.
    fn refuse_hopeless(&self, whole: &Store, own: &Store) -> Result<(), Error> {
        let WorkerEnv { rank, restart_count, run_id, use_agent_store, .. } = self.env;
        if !use_agent_store || *restart_count == 0 {
            return Ok(());
        }
        let hopeless = whole
            .prefixed(&store_prefix(run_id, restart_count - 1))
            .and_then(|before| before.contains(PERMANENT_KEY))
            .map_err(|source| self.failed(source))?;
        if !hopeless {
            return Ok(());
        }
        own.set(PERMANENT_KEY, b"").map_err(|source| self.failed(source))?;
        Err(Error::Hopeless { rank: *rank, attempt: *restart_count })
    }

    /// Signs in and waits for all others, so that missing ranks can be named.
    fn call_roll(&self, store: &Store, common: &[(String, String)]) -> Result<(), Error> {
        let signed_in = agreement::sign_in(store, self.env.rank, common);
        signed_in.map_err(|source| self.failed(source))?;
        let (rank, world_size) = (self.env.rank, self.env.world_size);
        let mut missing: Vec<usize> = (0..world_size).collect();
        loop {
            missing = self.still_missing(store, &missing)?;
            if missing.is_empty() {
                return Ok(());
            }
            if self.start.elapsed() >= self.limit {
                return Err(Error::RanksMissing { rank, missing, world_size, waited: self.limit });
            }
            std::thread::sleep(POLL);
        }
    }

    /// Refuses ranks with other settings, data or programs.
    fn compare(&self, store: &Store) -> Result<(), Error> {
        let differences = agreement::differences(store, self.env.world_size);
        let differences = differences.map_err(|source| self.failed(source))?;
        if differences.is_empty() {
            return Ok(());
        }
        Err(Error::RanksDiffer { rank: self.env.rank, differences })
    }

    fn still_missing(&self, store: &Store, ranks: &[usize]) -> Result<Vec<usize>, Error> {
        let mut missing = Vec::new();
        for &rank in ranks {
            if !store.contains(&present_key(rank)).map_err(|source| self.failed(source))? {
                missing.push(rank);
            }
        }
        Ok(missing)
    }

    /// Where gloo listens: the user's interface, the first if there are several; else, on a single
    /// machine or if several launchers meet at loopback, loopback, which needs no network; else the
    /// address from which this machine reaches rank 0.
    fn bind(&self) -> Result<Bind, Error> {
        if let Some(name) = chosen_interface() {
            return Ok(Bind::Interface(name));
        }
        if self.env.is_single_node() || names_loopback(self.host) {
            return Ok(Bind::Address(Ipv4Addr::LOCALHOST.into()));
        }
        address_towards((self.host, self.env.master_port))
            .or_else(|| address_towards(ELSEWHERE))
            .map(Bind::Address)
            .ok_or(Error::NoAddress { rank: self.env.rank })
    }

    /// The address for our other connections, if gloo's go to `bind`.
    fn place(&self, bind: &Bind) -> LifelineAddress {
        match bind {
            Bind::Address(address) => LifelineAddress { reachable: *address, bind: *address },
            // Its address is not known; the others can probably reach that of the default route.
            Bind::Interface(_) => {
                let towards = address_towards((self.host, self.env.master_port));
                let reachable = towards.or_else(|| address_towards(ELSEWHERE));
                let reachable = reachable.unwrap_or(Ipv4Addr::LOCALHOST.into());
                let bind = if reachable.is_ipv4() { [0; 4].into() } else { [0u16; 8].into() };
                LifelineAddress { reachable, bind }
            }
        }
    }

    fn join(
        &self,
        store: &Arc<Store>,
        options: &ConnectOptions,
        spec: &GroupSpec,
        index: usize,
        bind: &Bind,
    ) -> Result<Box<dyn Communicator>, Error> {
        let prefixed = |name: &str| store.prefixed(name).map_err(|source| self.failed(source));
        let (size, timeout) = (spec.ranks.len(), spec.timeout);
        let config = GlooConfig { rank: index, size, bind: bind.clone(), timeout };
        let group = ProcessGroup::gloo(&prefixed(&format!("group/{}", spec.name))?, &config);
        let group = group.map_err(|source| self.failed(source))?;
        // The launcher's keys are written where it reads them, not under the group's prefix.
        let gloo = Gloo::of_some(group, Arc::clone(store), self.env.rank, index, size, timeout);
        let options =
            ConnectOptions { device: spec.device, collective_timeout: timeout, ..options.clone() };
        nccl::join_or_stage(gloo, &options, self.place(bind))
    }

    fn failed(&self, source: TorchError) -> Error {
        let (rank, port) = (self.env.rank, self.env.master_port);
        Error::Rendezvous { rank, host: self.host.to_owned(), port, source }
    }
}

fn chosen_interface() -> Option<String> {
    let names = std::env::var(INTERFACE_VARIABLE).ok()?;
    names.split(',').map(str::trim).find(|name| !name.is_empty()).map(str::to_owned)
}

/// Whether the user wrote loopback itself, where only one machine can meet. A host name that
/// resolves to it does not count: many distributions map a machine's own name there.
fn names_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

/// The local address of the route to `peer`, unless that is loopback, which others cannot reach.
fn address_towards(peer: impl ToSocketAddrs) -> Option<IpAddr> {
    let peer = peer.to_socket_addrs().ok()?.next()?;
    let any: IpAddr = if peer.is_ipv4() { [0; 4].into() } else { [0u16; 8].into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    // On a datagram socket this only looks up the route.
    socket.connect(peer).ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback()).then_some(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(400);

    #[test]
    fn the_loopback_is_not_an_address_for_others() {
        assert_eq!(address_towards(("127.0.0.1", 1)), None);
    }

    #[test]
    fn the_store_listens_where_its_host_says() {
        // The loopback interface's second address distinguishes one address from all.
        let elsewhere = |host| {
            let store = serve(host, 0, SHORT).unwrap();
            TcpStream::connect(("127.0.0.2", store.port())).is_ok()
        };
        assert!(!elsewhere("127.0.0.1"));
        assert!(!elsewhere("localhost"));
        // An address that no machine has (RFC 5737).
        assert!(elsewhere("192.0.2.1"));
    }

    #[test]
    fn another_program_at_the_store_s_port_is_not_waited_for() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = silent.local_addr().unwrap().port();
        let begun = Instant::now();
        let error = reach("127.0.0.1", port, SHORT).unwrap_err().to_string();
        assert!(error.starts_with("reach the store: "), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn only_the_loopback_itself_says_that_all_are_here() {
        let check = |host, expected| assert_eq!(names_loopback(host), expected, "{host}");
        check("localhost", true);
        check("127.0.0.1", true);
        check("127.0.1.1", true);
        check("::1", true);
        check("10.0.0.1", false);
        check("head", false);
    }

    #[test]
    fn keys_of_attempts_differ() {
        assert_ne!(store_prefix("job", 0), store_prefix("job", 1));
    }
}
