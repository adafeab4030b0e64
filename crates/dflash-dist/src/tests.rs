//! What the tests of several modules share.

use crate::WorkerEnv;

pub(crate) fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// One of `world_size` processes of this machine, which meet at `master_port`.
pub(crate) fn env(rank: usize, world_size: usize, master_port: u16) -> WorkerEnv {
    WorkerEnv {
        rank,
        local_rank: rank,
        world_size,
        local_world_size: world_size,
        master_addr: Some("127.0.0.1".to_owned()),
        master_port,
        ..WorkerEnv::alone()
    }
}
