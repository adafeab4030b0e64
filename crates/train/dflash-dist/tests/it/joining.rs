//! Joining and launching a group, as far as a single process can test it: missing ranks are named.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use dflash_dist::{Communicator, ConnectOptions, Error, LaunchConfig, WorkerEnv, connect, launch};
use dflash_settings::Backend;
use dflash_torch_sys::{Store, find_nccl};
use tch::Device;

use crate::free_port;

const SHORT: Duration = Duration::from_millis(400);

/// One of `world_size` processes on this machine that meet at `master_port`.
fn env(rank: usize, world_size: usize, master_port: u16) -> WorkerEnv {
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

fn join(env: &WorkerEnv, backend: Backend, device: Device) -> Result<Box<dyn Communicator>, Error> {
    let options = ConnectOptions::cpu(Duration::from_secs(20));
    connect(env, &ConnectOptions { backend, device, ..options })
}

#[test]
fn alone_needs_no_store() {
    let communicator = connect(&WorkerEnv::alone(), &ConnectOptions::cpu(SHORT)).unwrap();
    assert_eq!((communicator.rank(), communicator.world_size()), (0, 1));
}

#[test]
fn a_group_of_one_over_gloo() {
    let communicator = join(&env(0, 1, free_port()), Backend::Auto, Device::Cpu).unwrap();
    assert_eq!(communicator.all_gather_bytes(b"").unwrap(), [Vec::<u8>::new()]);
    communicator.barrier().unwrap();
}

#[test]
fn what_keeps_ranks_from_meeting_is_named() {
    let check = |env: &WorkerEnv, expected: &str| {
        let error = connect(env, &ConnectOptions::cpu(SHORT)).err().expect("nobody is there");
        assert!(error.to_string().starts_with(expected), "{error}");
    };
    let absent = "rank 0: 2 of 3 ranks did not reach the rendezvous within 0 s: 1, 2";
    check(&env(0, 3, free_port()), absent);
    let port = free_port();
    check(&env(1, 2, port), &format!("rank 1: nothing answers at 127.0.0.1:{port} after 0 s"));
    let taken = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let remedy = "another program has it: set MASTER_PORT";
    let expected = format!("cannot listen on port {port} for the rendezvous; {remedy}");
    check(&env(0, 2, port), &expected);
}

#[test]
fn an_attempt_that_would_meet_the_same_fault_ends_at_once() {
    let limit = Duration::from_secs(20);
    let store = Store::serve(([127, 0, 0, 1], 0), limit).unwrap();
    let attempt = |restart_count| {
        let run_id = "job".to_owned();
        let env = env(0, 1, store.port());
        let env = WorkerEnv { restart_count, run_id, use_agent_store: true, ..env };
        connect(&env, &ConnectOptions::cpu(limit)).map(|group| group.announce_permanent_failure())
    };
    attempt(0).unwrap();
    attempt(2).unwrap();
    for hopeless in [1, 3, 4] {
        let error = attempt(hopeless).unwrap_err().to_string();
        let expected = format!("rank 0: restart {hopeless} would fail like");
        assert!(error.starts_with(&expected), "{error}");
    }
}

#[test]
fn nccl_is_not_a_choice_for_the_cpu() {
    let alone = WorkerEnv::alone();
    let refused = join(&alone, Backend::Nccl, Device::Cpu).err().unwrap();
    assert!(refused.to_string().contains("--backend nccl is not available"), "{refused}");
    for backend in [Backend::Auto, Backend::Gloo] {
        join(&alone, backend, Device::Cpu).unwrap();
    }
}

#[test]
fn without_nccl_gpu_tensors_are_staged_unless_it_was_asked_for() {
    if find_nccl().is_ok() {
        println!("skipped: NCCL is here");
        return;
    }
    let gpu = Device::Cuda(0);
    let staged = join(&env(0, 1, free_port()), Backend::Auto, gpu).unwrap();
    assert!(!staged.takes(gpu) && staged.takes(Device::Cpu));
    let refused = join(&env(0, 1, free_port()), Backend::Nccl, gpu).err().unwrap();
    assert!(refused.to_string().contains("rank 0: NCCL cannot be used"), "{refused}");
}

/// Launches something that cannot start, and checks how the error begins.
fn check_launch(change: impl FnOnce(&mut LaunchConfig), expected: &str) {
    let mut config = LaunchConfig::new("worker".into(), Vec::new(), 2);
    config.join_timeout = Duration::from_millis(300);
    change(&mut config);
    let message = launch(&config, &AtomicBool::new(false)).unwrap_err().to_string();
    assert!(message.starts_with(expected), "{message}");
}

#[test]
fn contradictions_name_the_flag() {
    check_launch(|config| config.nproc = 0, "--nproc is 0");
    check_launch(|config| config.nnodes = 0, "--nnodes is 0");
    check_launch(|config| config.node_rank = 1, "--node-rank is 1");
    check_launch(|config| config.nnodes = 2, "--rdzv-endpoint is missing; --nnodes 2 needs it");
    check_launch(
        |config| (config.nnodes, config.node_rank) = (2, 2),
        "--node-rank is 2, expected 0 to 1 (--nnodes is 2)",
    );
    check_launch(
        |config| (config.nnodes, config.rdzv_endpoint) = (2, Some("head".to_owned())),
        "--rdzv-endpoint is head",
    );
    check_launch(|config| config.program = "/no/such/program".into(), "cannot start rank 0");
}

#[test]
fn nodes_that_do_not_come_are_named() {
    let check = |node_rank, nnodes, endpoint: &str, expected: &str| {
        let place = |config: &mut LaunchConfig| {
            (config.nnodes, config.node_rank) = (nnodes, node_rank);
            config.rdzv_endpoint = Some(endpoint.to_owned());
        };
        check_launch(place, expected);
    };
    let endpoint = format!("127.0.0.1:{}", free_port());
    let silent = format!("nothing answers at --rdzv-endpoint {endpoint} after 0 s");
    check(1, 2, &endpoint, &silent);
    check(0, 3, &endpoint, "2 of 3 nodes did not join within 0 s: node 1, 2");
}
