//! Groups of processes: what keeps one from coming together, and what real processes do.

mod joining;
mod nccl;
mod processes;

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}
