//! NCCL calls in real processes, with a library that carries CPU tensors over shared memory: their
//! order and sizes, and the handling of errors and of peers that die or hang in them.

use std::process::{Child, Command};
use std::time::Instant;

use dflash_test_support::HostNccl;

use crate::free_port;
use crate::processes::{Outcome, PROMISE, START, probe, run, said, start, wait_within};

/// Type numbers from nccl.h.
const I64: u32 = 4;
const F32: u32 = 7;
const F64: u32 = 8;
const BF16: u32 = 9;

/// A fault at a call that never happens.
const NO_FAULT: &str = "0:1000000000:hang";

/// The calls of `dist-probe check` with `size` ranks.
fn expected_calls(size: usize) -> Vec<String> {
    let sum = |elements: usize, kind: u32| format!("all-reduce {elements} type {kind} op 0");
    // The group's trial sum.
    let mut calls = vec![sum(1024, F32)];
    calls.extend([F32, F64, BF16, I64].map(|kind| sum(5, kind)));
    calls.extend([(); 4].map(|()| sum(3, F32)));
    calls.extend((0..size).map(|root| format!("broadcast 7 type {F32} root {root}")));
    calls.push(format!("all-gather 3 type {F32} op 0"));
    calls.push(sum(100_003, F32));
    let numbered = calls.iter().enumerate().map(|(index, call)| format!("{} {call}", index + 1));
    let join = format!("join of {size}");
    std::iter::once(join).chain(numbered).chain(["abort".to_owned()]).collect()
}

fn check_calls(size: usize) {
    let nccl = HostNccl::build();
    let outcome = run(nccl.serve(&mut probe(&format!("launch {size} nccl check")), None));
    assert!(outcome.status.success(), "{}", outcome.stderr);
    for rank in 0..size {
        let line = format!("rank {rank} of {size}: all collectives agree");
        assert!((outcome.stdout.clone() + &outcome.stderr).contains(&line), "{}", outcome.stderr);
        assert_eq!(nccl.calls(rank), expected_calls(size), "rank {rank}");
    }
}

#[test]
fn two_ranks_make_the_same_calls_in_the_same_order() {
    check_calls(2);
}

#[test]
fn three_ranks_make_the_same_calls_in_the_same_order() {
    check_calls(3);
}

#[test]
fn without_such_a_library_the_cpu_has_no_nccl() {
    let outcome = run(&mut probe("launch 2 nccl check"));
    assert_eq!(outcome.status.code(), Some(1));
    assert!(outcome.stderr.contains("--backend nccl is not available"), "{}", outcome.stderr);
}

/// Two ranks sum until the fault; they must exit soon and print `expected`.
fn check_fault(fault: &str, task: &str, expected: &[&str]) -> HostNccl {
    let nccl = HostNccl::build();
    let begun = Instant::now();
    let outcome = run(nccl.serve(&mut probe(&format!("launch 2 nccl {task}")), Some(fault)));
    let took = begun.elapsed();
    let Outcome { status, stderr, .. } = outcome;
    assert_eq!(status.code(), Some(1), "{stderr}");
    for text in expected {
        assert!(stderr.contains(text), "{text:?} is not in {stderr}");
    }
    assert!(took < START, "took {took:?}");
    for rank in 0..2 {
        let calls = nccl.calls(rank);
        assert!(calls.iter().all(|call| !call.starts_with("MISUSE")), "rank {rank}: {calls:?}");
    }
    nccl
}

#[test]
fn an_error_that_a_call_returns_names_call_rank_and_remedy() {
    let expected = [
        "[rank 1] error: rank 1: all-reduce (sum) failed",
        "caused by: all-reduce between GPUs: unknown result code: a fault of the test's own; \
         NCCL_DEBUG=INFO in the environment shows more, and --backend gloo does without NCCL",
        "error: rank 1 (node 0, ",
        "exited with code 1; the other ranks were stopped",
    ];
    let nccl = check_fault("1:7:status=3", "sum", &expected);
    assert_eq!(nccl.calls(1).iter().filter(|call| call.contains("all-reduce")).count(), 7);
}

#[test]
fn a_group_that_does_not_come_together_is_no_group_for_any_rank() {
    let joining = "--backend nccl is not available: rank 1: joining between GPUs: unhandled system \
                   error; NCCL_DEBUG=INFO";
    check_fault("1:0:status=2", "sum", &[joining]);
    let trial =
        "--backend nccl is not available: rank 1: all-reduce between GPUs: invalid argument";
    check_fault("1:1:status=4", "sum", &[trial]);
}

#[test]
fn an_asynchronous_error_ends_all_ranks() {
    let expected = [
        "rank 0: all-reduce (sum) failed",
        "NCCL reports that a peer or the network failed: remote process exited or there was a \
         network error",
    ];
    let nccl = check_fault("0:5:async=6", "sum", &expected);
    assert_eq!(nccl.calls(0).last().unwrap(), "abort");
}

#[test]
fn a_collective_that_a_rank_never_starts_ends_after_its_timeout() {
    let expected = [
        "this all-reduce is not done after 1 s (--collective-timeout); a rank hangs or is far behind",
        "nothing was heard from rank 1",
    ];
    check_fault(NO_FAULT, "stall 1", &expected);
}

#[test]
fn ranks_that_do_not_call_the_same_are_found_out() {
    let nccl = check_fault(NO_FAULT, "differ", &["rank 0 calls all-reduce of 8, rank 1"]);
    assert!(nccl.calls(0).iter().any(|call| call.starts_with("MISMATCH")));
}

/// Ranks without a launcher to terminate them; they sum until the fault.
fn alone(nccl: &HostNccl, size: usize, fault: &str) -> Vec<Child> {
    let port = free_port().to_string();
    let worker = |rank: usize| {
        let mut command: Command = probe("nccl sum");
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", size.to_string());
        command.env("MASTER_ADDR", "localhost").env("MASTER_PORT", &port);
        start(nccl.serve(&mut command, Some(fault)))
    };
    (0..size).map(worker).collect()
}

/// The `victim` dies in the middle of a collective; the others must exit soon, by themselves.
fn check_death(victim: usize) {
    let nccl = HostNccl::build();
    let mut ranks = alone(&nccl, 3, &format!("{victim}:20:kill"));
    assert_eq!(wait_within(START, &mut ranks[victim]).code(), None, "killed by a signal");
    let died = Instant::now();
    for rank in (0..3).filter(|&rank| rank != victim) {
        let status = wait_within(PROMISE.saturating_sub(died.elapsed()), &mut ranks[rank]);
        let said = said(&mut ranks[rank]);
        assert_eq!(status.code(), Some(1), "rank {rank}: {said}");
        let failed = format!("error: rank {rank}: all-reduce (sum) failed");
        let cause =
            format!("all-reduce between GPUs: rank {victim} has ended or given up before its");
        assert!(said.contains(&failed) && said.contains(&cause), "rank {rank}: {said}");
        assert_eq!(nccl.calls(rank).last().unwrap(), "abort");
        assert!(nccl.calls(rank).iter().all(|call| !call.starts_with("MISUSE")));
    }
    println!("the others had ended after {:.1} s", died.elapsed().as_secs_f64());
}

#[test]
fn a_peer_that_dies_inside_a_collective_ends_the_others_within_seconds() {
    check_death(1);
}

#[test]
fn rank_0_that_dies_inside_a_collective_ends_the_others_within_seconds() {
    check_death(0);
}

#[test]
fn a_peer_that_dies_inside_a_collective_is_what_the_launcher_names() {
    let expected = ["error: rank 1 (node 0, ", "was killed by signal 9 (SIGKILL)"];
    check_fault("1:20:kill", "sum", &expected);
}
