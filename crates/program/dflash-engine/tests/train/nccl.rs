//! Whole trainings whose gradients go through NCCL's calls, with a library that carries CPU
//! tensors: the calls made, and how runs end when it fails.

use std::time::{Duration, Instant};

use dflash_draft::Draft;
use dflash_test_support::HostNccl;
use tch::{Device, Kind};

use crate::running::{Running, free_port};
use crate::world::{Run, World, losses, sorted_checkpoints};

const TWO: [&str; 4] = ["--nproc", "2", "--backend", "nccl"];

/// Documented limit after the death of a peer.
const DEATH: Duration = Duration::from_secs(5);

fn train(world: &World, nccl: &HostNccl, save: &str, more: &[&str], fault: Option<&str>) -> Run {
    let mut command = world.command(save, &[&TWO[..], more].concat());
    Run::of(nccl.serve(&mut command, fault))
}

/// The rank's calls without their numbers; checks that no forbidden one occurred.
fn calls(nccl: &HostNccl, rank: usize) -> Vec<String> {
    let calls = nccl.calls(rank);
    let strange = |call: &&String| call.starts_with("MISUSE") || call.starts_with("MISMATCH");
    assert_eq!(calls.iter().find(strange), None);
    let unnumbered =
        |call: &String| call.trim_start_matches(|c: char| c.is_ascii_digit()).trim().into();
    calls.iter().map(unnumbered).collect()
}

#[test]
fn a_step_sums_the_buckets_of_the_backward_pass_and_the_run_is_that_of_gloo() {
    let world = World::new();
    for (save, more) in [("whole", &["--zero", "0"][..]), ("split", &["--zero", "1"][..])] {
        let nccl = HostNccl::build();
        let run = train(&world, &nccl, save, more, None);
        assert!(run.success(), "{}", run.stderr);
        let gloo = format!("{save}-gloo");
        let by_gloo = world.train(&gloo, &[&["--nproc", "2"], more].concat());
        assert!(by_gloo.success(), "{}", by_gloo.stderr);
        let last = sorted_checkpoints(&world.path(&gloo)).pop().unwrap();
        assert_eq!(world.state(save, &last), world.state(&gloo, &last));
        assert_eq!(calls(&nccl, 0), calls(&nccl, 1), "all ranks call the same");
        if more.is_empty() {
            let dir = world.path(save).join(&last);
            check_steps(&calls(&nccl, 0), &Draft::load(&dir, Device::Cpu, Kind::Float).unwrap());
            assert_eq!(losses(&world.path(save)), losses(&world.path(&gloo)));
        }
    }
}

/// Every step sums the gradient's buckets in the order in which the backward pass finishes them,
/// then its counts, and broadcasts rank 0's norm.
fn check_steps(calls: &[String], draft: &Draft) {
    let buckets = draft.layout().buckets();
    let sums: Vec<String> = buckets
        .iter()
        .rev()
        .map(|(_, elements)| format!("all-reduce {elements} type 7 op 0"))
        .collect();
    let mut steps = 0;
    for (index, window) in calls.windows(sums.len() + 2).enumerate() {
        if window[..sums.len()] == sums {
            steps += 1;
            let [counts, norm] = &window[sums.len()..] else { unreachable!("two more") };
            assert!(counts.starts_with("all-reduce") && counts.ends_with("type 8 op 0"), "{index}");
            assert_eq!(norm, "broadcast 1 type 8 root 0", "{index}");
        }
    }
    let sums_of_float32 = calls.iter().filter(|call| call.ends_with("type 7 op 0")).count();
    // The additional one is the group's trial sum.
    assert_eq!(sums_of_float32, steps * sums.len() + 1);
    assert!(steps > 4, "{steps} steps");
}

#[test]
fn a_rank_that_dies_inside_a_sum_is_started_again_and_the_run_is_the_same() {
    let world = World::new();
    let more = ["--save-every", "2", "--max-restarts", "1"];
    let nccl = HostNccl::build();
    let hurt = train(&world, &nccl, "hurt", &more, Some("1:25:kill"));
    assert!(hurt.success(), "{}", hurt.stderr);
    assert!(hurt.stderr.contains("restart 1 of 1"), "{}", hurt.stderr);
    let whole = train(&world, &HostNccl::build(), "whole", &more, None);
    assert!(whole.success(), "{}", whole.stderr);
    let last = sorted_checkpoints(&world.path("whole")).pop().unwrap();
    assert_eq!(world.state("hurt", &last), world.state("whole", &last));
    assert_eq!(losses(&world.path("hurt")), losses(&world.path("whole")));
}

#[test]
fn a_gpu_without_memory_is_the_user_s_fault_and_no_reason_to_start_again() {
    let world = World::new();
    let nccl = HostNccl::build();
    let more = ["--save-every", "2", "--max-restarts", "2"];
    let run = train(&world, &nccl, "out", &more, Some("1:25:memory"));
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    for words in [
        "[rank 1] error: rank 1 ran out of memory ",
        "Cuda failure 2 'out of memory'",
        "lower --max-anchors (now 512), --total-seq-len (now 64)",
        "error: rank 1 (node 0, ",
        "exited with code 1; the other ranks were stopped",
    ] {
        assert!(run.stderr.contains(words), "{words:?} is not in {}", run.stderr);
    }
    assert!(!run.stderr.contains("restart 1 of"), "{}", run.stderr);
    assert!(!run.stderr.contains("internal error"), "{}", run.stderr);
    assert_eq!(nccl.calls(1).iter().filter(|call| call.starts_with("join")).count(), 1);
    let resumed = train(&world, &nccl, "out", &["--save-every", "2", "--resume"], None);
    assert!(resumed.success(), "{}", resumed.stderr);
}

#[test]
fn without_a_launcher_too_a_dead_peer_ends_the_rank_within_seconds() {
    let world = World::new();
    let nccl = HostNccl::build();
    let port = free_port().to_string();
    let mut ranks = [0, 1].map(|rank: usize| {
        let mut command = world.command("out", &["--epochs", "30", "--backend", "nccl"]);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        Running::start(nccl.serve(&mut command, Some("1:60:kill")))
    });
    ranks[0].await_step(&world.path("out"), 3);
    let [first, second] = ranks;
    assert_eq!(second.end().code, None, "killed by a signal");
    let died = Instant::now();
    let first = first.end();
    assert!(died.elapsed() < DEATH, "took {:?}", died.elapsed());
    assert_eq!(first.code, Some(1), "{}", first.stderr);
    assert!(
        first.stderr.contains("rank 1 has ended or given up before its part in this"),
        "{}",
        first.stderr
    );
}
