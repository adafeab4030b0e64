//! Detects the end of a rank's process: every rank holds an idle connection to rank 0, which the
//! kernel closes with the process. Rank 0 tells the others.
//!
//! NCCL needs this: it does not report the death of a peer on the same machine, and a GPU that
//! waits for that peer waits forever. gloo notices by its own connections.

use std::hash::{BuildHasher, RandomState};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::wait::until;
use crate::{Communicator, Error, Gloo};

/// Time for all ranks to connect. They have just met, so only network latency counts.
const CONNECT: Duration = Duration::from_secs(10);

/// Interval between checks of who has connected.
const POLL: Duration = Duration::from_millis(5);

/// This rank's address, and the address where it listens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LifelineAddress {
    pub(crate) reachable: IpAddr,
    pub(crate) bind: IpAddr,
}

/// This rank's connections; empty if there are no other ranks.
#[derive(Debug, Default)]
pub(crate) struct Lifeline {
    lines: Vec<Line>,
    /// Whether to tell the others.
    is_hub: bool,
}

/// A connection to `rank`.
#[derive(Debug)]
struct Line {
    rank: usize,
    stream: TcpStream,
}

impl Lifeline {
    /// Connects the ranks of `gloo`; rank 0 listens at its `place`. The inner error, the same on
    /// all ranks, says why that is not possible.
    pub(crate) fn open(gloo: &Gloo, place: LifelineAddress) -> Result<Result<Self, String>, Error> {
        let size = gloo.world_size();
        if gloo.rank() == 0 {
            let hub = Hub::listen(place);
            let address = hub.as_ref().map(Hub::address).unwrap_or_default();
            gloo.all_gather_bytes(address.as_bytes())?;
            let opened = hub.and_then(|hub| hub.gather(size));
            return agree(gloo, opened.map_err(|error| error.to_string()));
        }
        let addresses = gloo.all_gather_bytes(&[])?;
        let address = String::from_utf8_lossy(&addresses[0]).into_owned();
        agree(gloo, reach(&address, gloo.rank()).map_err(|error| format!("{address}: {error}")))
    }

    /// A rank whose process has ended, reported once.
    pub(crate) fn gone(&mut self) -> Option<usize> {
        let found = self.lines.iter_mut().enumerate().find_map(|(index, line)| {
            let rank = line.look()?;
            Some((index, rank))
        });
        let (index, rank) = found?;
        if self.lines[index].rank == rank {
            self.lines.remove(index);
        }
        if self.is_hub {
            for line in &mut self.lines {
                // A rank that cannot receive it has ended too, and is detected next.
                let _ = line.stream.write_all(&word(rank));
            }
        }
        Some(rank)
    }
}

impl Line {
    /// The rank at the other end if it has ended, or the rank that it reports as ended.
    fn look(&mut self) -> Option<usize> {
        let mut said = [0; 8];
        match self.stream.read(&mut said) {
            Ok(8) => usize::try_from(u64::from_le_bytes(said)).ok(),
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                None
            }
            _ => Some(self.rank),
        }
    }
}

/// Rank 0 before the others have connected.
struct Hub {
    listener: TcpListener,
    address: SocketAddr,
    /// Distinguishes our ranks from other programs that find the port.
    key: u64,
}

impl Hub {
    fn listen(place: LifelineAddress) -> std::io::Result<Self> {
        let listener = TcpListener::bind((place.bind, 0))?;
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        let address = SocketAddr::new(place.reachable, port);
        Ok(Self { listener, address, key: RandomState::new().hash_one(port) })
    }

    /// The address and key that the others need to connect.
    fn address(&self) -> String {
        format!("{} {}", self.address, self.key)
    }

    fn gather(self, size: usize) -> std::io::Result<Lifeline> {
        let mut lines: Vec<Line> = Vec::new();
        let all = until(Instant::now(), CONNECT, POLL, || {
            while let Ok((stream, _)) = self.listener.accept() {
                lines.extend(self.welcome(stream).ok().flatten());
            }
            (lines.len() + 1 == size).then_some(())
        });
        match all {
            Some(()) => Ok(Lifeline { lines, is_hub: true }),
            None => Err(std::io::Error::other(format!(
                "{} of {} ranks connected to {} within {} s",
                lines.len(),
                size - 1,
                self.address,
                CONNECT.as_secs()
            ))),
        }
    }

    /// The connection of one of our ranks, which identifies itself.
    fn welcome(&self, mut stream: TcpStream) -> std::io::Result<Option<Line>> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        let (mut key, mut rank) = ([0; 8], [0; 8]);
        stream.read_exact(&mut key)?;
        stream.read_exact(&mut rank)?;
        stream.set_nonblocking(true)?;
        let rank = usize::try_from(u64::from_le_bytes(rank)).ok();
        let is_ours = u64::from_le_bytes(key) == self.key;
        Ok(rank.filter(|_| is_ours).map(|rank| Line { rank, stream }))
    }
}

/// Connects to rank 0 at its [`Hub::address`].
fn reach(address: &str, rank: usize) -> std::io::Result<Lifeline> {
    let parts = address.split_once(' ').and_then(|(at, key)| Some((at.parse().ok()?, key)));
    let parts = parts.and_then(|(at, key): (SocketAddr, _)| Some((at, key.parse::<u64>().ok()?)));
    let (at, key) = parts.ok_or_else(|| std::io::Error::other("rank 0 does not listen"))?;
    let mut stream = TcpStream::connect_timeout(&at, CONNECT)?;
    stream.write_all(&[key.to_le_bytes(), word(rank)].concat())?;
    stream.set_nonblocking(true)?;
    Ok(Lifeline { lines: vec![Line { rank: 0, stream }], is_hub: false })
}

fn word(rank: usize) -> [u8; 8] {
    (rank as u64).to_le_bytes()
}

/// Connections for all ranks, or for none.
fn agree(gloo: &Gloo, own: Result<Lifeline, String>) -> Result<Result<Lifeline, String>, Error> {
    let problem = own.as_ref().err().cloned().unwrap_or_default();
    let all = gloo.all_gather_bytes(problem.as_bytes())?;
    let Some(rank) = all.iter().position(|problem| !problem.is_empty()) else { return Ok(own) };
    Ok(Err(format!("rank {rank}: {}", String::from_utf8_lossy(&all[rank]))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const HERE: LifelineAddress = LifelineAddress {
        reachable: IpAddr::V4(Ipv4Addr::LOCALHOST),
        bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
    };

    /// The lines of `size` ranks, in their order.
    fn lines(size: usize) -> Vec<Lifeline> {
        let hub = Hub::listen(HERE).unwrap();
        let address = hub.address();
        std::thread::scope(|scope| {
            let gathering = scope.spawn(move || hub.gather(size).unwrap());
            let others: Vec<_> = (1..size).map(|rank| reach(&address, rank).unwrap()).collect();
            [gathering.join().unwrap()].into_iter().chain(others).collect()
        })
    }

    fn soon(line: &mut Lifeline) -> Option<usize> {
        until(Instant::now(), Duration::from_secs(10), POLL, || line.gone())
    }

    #[test]
    fn the_end_of_a_rank_reaches_all_others_once() {
        let mut lines = lines(4);
        assert!(lines.iter_mut().all(|line| line.gone().is_none()));
        drop(lines.remove(2));
        assert_eq!(soon(&mut lines[0]), Some(2));
        assert_eq!((soon(&mut lines[1]), soon(&mut lines[2])), (Some(2), Some(2)));
        assert!(lines.iter_mut().all(|line| line.gone().is_none()));
        drop(lines.remove(0));
        assert_eq!((soon(&mut lines[0]), soon(&mut lines[1])), (Some(0), Some(0)));
        assert_eq!(lines[0].gone(), None);
    }

    #[test]
    fn strangers_are_not_taken_for_ranks() {
        let hub = Hub::listen(HERE).unwrap();
        let address = hub.address();
        let mut stranger = TcpStream::connect(hub.address).unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        std::thread::scope(|scope| {
            let gathering = scope.spawn(move || hub.gather(2).unwrap());
            let _rank = reach(&address, 1).unwrap();
            let hub = gathering.join().unwrap();
            assert_eq!(hub.lines.iter().map(|line| line.rank).collect::<Vec<_>>(), [1]);
        });
        assert!(reach("", 1).unwrap_err().to_string().contains("rank 0 does not listen"));
    }
}
