//! Groups of processes: what prevents them from forming, and what real processes do.

mod joining;
mod nccl;
mod processes;

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}
