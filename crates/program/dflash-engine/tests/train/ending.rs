//! How runs end: SIGTERM in every kind of job, dead and hanging ranks, restarts, and which
//! checkpoints are kept.

use std::time::{Duration, Instant};

use dflash_draft::Draft;
use dflash_tensor::checkpoint::TensorFile;
use tch::{Device, Kind};

use crate::running::{Running, free_port, send, start_workers};
use crate::world::{Run, World, losses, sorted_checkpoints};

/// Documented limit after SIGTERM.
const TERMINATION: Duration = Duration::from_secs(20);

/// Documented limit after a death.
const DEATH: Duration = Duration::from_secs(6);

/// Long enough to be stopped in the middle.
const LONG: [&str; 2] = ["--epochs", "30"];

/// Checks the messages and leftovers of a run stopped by SIGTERM, and that it resumes exactly.
fn check_stopped(world: &World, name: &str, ranks: &str, run: &Run, asked: Instant) {
    assert!(asked.elapsed() < TERMINATION, "took {:?}", asked.elapsed());
    assert_eq!(run.code, Some(143), "{}", run.stderr);
    let last = sorted_checkpoints(&world.path(name)).pop().unwrap();
    assert!(run.stdout.trim().ends_with(&last), "{} is not {last}", run.stdout);
    let step: u64 = last.strip_prefix("step-").unwrap().parse().unwrap();
    assert!(run.stderr.contains(&format!("stopped at step {step};")), "{}", run.stderr);
    assert!(run.stderr.contains(&format!("stopped: {step} of ")), "{}", run.stderr);
    let whole = world.train(&format!("{name}-whole"), &[&LONG[..], &["--nproc", ranks]].concat());
    assert!(whole.success(), "{}", whole.stderr);
    let resumed = world.train(name, &[&LONG[..], &["--nproc", ranks, "--resume"]].concat());
    assert!(resumed.success(), "{}", resumed.stderr);
    let expected = losses(&world.path(&format!("{name}-whole")));
    assert!((step as usize) < expected.len(), "it was over before it could be stopped");
    assert_eq!(losses(&world.path(name)), expected);
}

#[test]
fn termination_of_one_process_saves() {
    let world = World::new();
    let mut run = Running::start(&mut world.command("one", &LONG));
    run.await_step(&world.path("one"), 3);
    send("-TERM", run.id());
    let asked = Instant::now();
    check_stopped(&world, "one", "1", &run.end(), asked);
}

#[test]
fn termination_of_the_launcher_reaches_all_ranks() {
    let world = World::new();
    let mut run =
        Running::start(&mut world.command("all", &[&LONG[..], &["--nproc", "2"]].concat()));
    run.await_step(&world.path("all"), 3);
    send("-TERM", run.id());
    let asked = Instant::now();
    check_stopped(&world, "all", "2", &run.end(), asked);
}

#[test]
fn termination_of_one_rank_stops_all_at_the_same_step() {
    let world = World::new();
    let mut run =
        Running::start(&mut world.command("some", &[&LONG[..], &["--nproc", "2"]].concat()));
    run.await_step(&world.path("some"), 3);
    send("-TERM", run.ranks()[1]);
    let asked = Instant::now();
    check_stopped(&world, "some", "2", &run.end(), asked);
}

#[test]
fn termination_of_one_worker_without_our_launcher_stops_all() {
    let world = World::new();
    let mut workers = start_workers(&world, "workers", &LONG, 2);
    workers[0].await_step(&world.path("workers"), 3);
    send("-TERM", workers[1].id());
    let asked = Instant::now();
    let second = workers.pop().unwrap().end();
    assert_eq!(second.code, Some(143), "{}", second.stderr);
    check_stopped(&world, "workers", "2", &workers.pop().unwrap().end(), asked);
}

/// Sends SIGTERM to a run of a large draft whose disk hangs for this many seconds while saving.
fn stop_while_the_disk_hangs(world: &World, name: &str, seconds: u64, more: &[&str]) -> Run {
    let mut run = Running::start(&mut world.command(name, &[&LONG[..], more].concat()));
    run.await_step(&world.path(name), 1);
    let writer = if more.contains(&"--nproc") { run.ranks()[0] } else { run.id() };
    send("-TERM", run.id());
    run.await_save(&world.path(name));
    send("-STOP", writer);
    std::thread::sleep(Duration::from_secs(seconds));
    send("-CONT", writer);
    run.end()
}

#[test]
fn a_large_state_is_saved_after_termination_in_the_time_that_it_is_given() {
    let world = World::large();
    let ranks = ["--nproc", "2", "--zero", "1", "--grace", "90"];
    let run = stop_while_the_disk_hangs(&world, "enough", 3, &ranks);
    assert_eq!(run.code, Some(143), "{}", run.stderr);
    let names = sorted_checkpoints(&world.path("enough"));
    assert_eq!(names.len(), 1);
    let dir = world.path("enough").join(&names[0]);
    assert!(run.stdout.trim().ends_with(&names[0]), "{}", run.stdout);
    let state = TensorFile::open(&dir.join("trainer/state.safetensors")).unwrap();
    let position = std::fs::read(dir.join("trainer/state.json")).unwrap();
    let position: serde_json::Value = serde_json::from_slice(&position).unwrap();
    assert_eq!(position["tensors_crc32"], state.crc32().unwrap());
    let draft = Draft::load(&dir, Device::Cpu, Kind::BFloat16).unwrap();
    assert!(draft.layout().elements() > 25_000_000);

    let run = stop_while_the_disk_hangs(&world, "short", 9, &["--grace", "8"]);
    assert_eq!(run.code, Some(143), "{}", run.stderr);
    assert!(run.stderr.contains("within 8.0 s; --grace"), "{}", run.stderr);
    let left = std::fs::read_dir(world.path("short")).unwrap();
    let left = left.filter(|entry| entry.as_ref().unwrap().path().join("trainer").exists());
    assert_eq!(left.count(), 0, "whole or absent");
}

#[test]
fn a_rank_that_fails_waits_until_what_was_trained_is_written() {
    let world = World::large();
    std::fs::remove_file(world.stored(17)).unwrap();
    let mut run =
        Running::start(&mut world.command("out", &[&LONG[..], &["--nproc", "2"]].concat()));
    run.await_said("training 2 layers", 1);
    let writer = run.ranks()[0];
    run.await_save(&world.path("out"));
    send("-STOP", writer);
    // longer than the launcher's grace for the others after a death
    std::thread::sleep(Duration::from_secs(5));
    send("-CONT", writer);
    let run = run.end();
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert!(run.stderr.contains("no stored hidden states for sample 17"), "{}", run.stderr);
    assert_eq!(sorted_checkpoints(&world.path("out")).len(), 1, "{}", run.stderr);
}

#[test]
fn an_interrupted_run_has_the_signal_s_code() {
    let world = World::new();
    let mut run =
        Running::start(&mut world.command("int", &[&LONG[..], &["--nproc", "2"]].concat()));
    run.await_step(&world.path("int"), 3);
    send("-INT", run.id());
    assert_eq!(run.end().code, Some(130));
}

#[test]
fn the_end_after_termination_may_count_as_success() {
    let world = World::new();
    for (name, ranks, signal, code) in
        [("one", "1", "-TERM", 0), ("all", "2", "-TERM", 0), ("hup", "2", "-HUP", 129)]
    {
        let more = [&LONG[..], &["--nproc", ranks, "--sigterm-is-success"]].concat();
        let mut run = Running::start(&mut world.command(name, &more));
        run.await_step(&world.path(name), 3);
        send(signal, run.id());
        let run = run.end();
        assert_eq!(run.code, Some(code), "{name}: {}", run.stderr);
        assert!(run.stderr.contains("stopped at step "), "{}", run.stderr);
    }
}

#[test]
fn a_closed_terminal_saves_unless_the_signal_is_ignored() {
    let world = World::new();
    for (name, ranks) in [("alone", "1"), ("both", "2")] {
        let more = [&LONG[..], &["--nproc", ranks, "--no-epoch-checkpoints"]].concat();
        let mut run = Running::start(&mut world.command(name, &more));
        run.await_step(&world.path(name), 3);
        send("-HUP", run.id());
        let run = run.end();
        assert_eq!(run.code, Some(129), "{}", run.stderr);
        assert_eq!(sorted_checkpoints(&world.path(name)).len(), 1, "{}", run.stderr);
    }
    let command = world.command("ignored", &[]);
    let mut nohup = std::process::Command::new("nohup");
    nohup.arg(command.get_program()).args(command.get_args()).env("OMP_NUM_THREADS", "1");
    let mut run = Running::start(nohup.stdin(std::process::Stdio::null()));
    run.await_step(&world.path("ignored"), 2);
    send("-HUP", run.id());
    let run = run.end();
    assert!(run.success(), "{}", run.stderr);
}

#[test]
fn a_run_saves_and_goes_on_when_it_is_asked_to() {
    let world = World::new();
    for (name, ranks) in [("alone", "1"), ("both", "2")] {
        let two = [&LONG[..], &["--nproc", ranks, "--no-epoch-checkpoints"]].concat();
        let mut run = Running::start(&mut world.command(name, &two));
        run.await_step(&world.path(name), 3);
        send("-USR1", run.id());
        run.await_said("saved ", 1);
        // one of several ranks suffices
        if ranks == "2" {
            send("-USR1", run.ranks()[1]);
            run.await_said("saved ", 2);
        }
        let run = run.end();
        assert!(run.success(), "{}", run.stderr);
        let saved = sorted_checkpoints(&world.path(name));
        let expected = 1 + ranks.parse::<usize>().unwrap();
        assert_eq!(saved.len(), expected, "{saved:?}: {}", run.stderr);
        let whole = world.train(&format!("{name}-whole"), &two);
        assert_eq!(losses(&world.path(name)), losses(&world.path(&format!("{name}-whole"))));
        let last = saved.last().unwrap();
        assert_eq!(world.state(name, last), world.state(&format!("{name}-whole"), last));
        assert!(whole.success());
    }
}

#[test]
fn a_second_run_in_the_same_path_is_refused() {
    let world = World::new();
    let mut first = Running::start(&mut world.command("shared", &LONG));
    first.await_step(&world.path("shared"), 3);
    let second = world.train("shared", &[&LONG[..], &["--resume"]].concat());
    assert_eq!(second.code, Some(1));
    assert!(second.stderr.contains("another run is writing to"), "{}", second.stderr);
    assert!(!first.has_ended());
}

#[test]
fn a_killed_rank_is_named_and_ends_the_job() {
    let world = World::new();
    let mut run =
        Running::start(&mut world.command("dead", &[&LONG[..], &["--nproc", "2"]].concat()));
    run.await_step(&world.path("dead"), 3);
    send("-KILL", run.ranks()[1]);
    let killed = Instant::now();
    let run = run.end();
    assert!(killed.elapsed() < DEATH, "took {:?}", killed.elapsed());
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert!(run.stderr.contains("error: rank 1 (node 0, "), "{}", run.stderr);
    assert!(run.stderr.contains("was killed by signal 9"), "{}", run.stderr);
}

#[test]
fn a_killed_rank_is_started_again_with_the_others() {
    let world = World::new();
    let two = [&LONG[..], &["--nproc", "2"]].concat();
    let whole = world.train("unhurt", &two);
    assert!(whole.success(), "{}", whole.stderr);
    let more = [&two[..], &["--max-restarts", "2", "--save-every", "3"]].concat();
    let mut run = Running::start(&mut world.command("hurt", &more));
    for death in 1..=2u64 {
        run.await_step(&world.path("hurt"), 20 * death);
        send("-KILL", run.ranks()[death as usize % 2]);
        run.await_said(&format!("starting all ranks again (restart {death} of 2)"), 1);
    }
    let run = run.end();
    assert!(run.success(), "{}", run.stderr);
    assert_eq!(losses(&world.path("hurt")), losses(&world.path("unhurt")));
}

#[test]
fn one_process_is_started_again_as_well() {
    let world = World::new();
    let more = [&LONG[..], &["--max-restarts", "1", "--save-every", "3"]].concat();
    let mut run = Running::start(&mut world.command("lone", &more));
    run.await_step(&world.path("lone"), 10);
    send("-KILL", run.ranks()[0]);
    let run = run.end();
    assert!(run.success(), "{}", run.stderr);
    assert!(run.stderr.contains("(restart 1 of 1)"), "{}", run.stderr);
}

#[test]
fn a_mistake_is_not_tried_again() {
    let world = World::new();
    let run = world.train("again", &["--max-restarts", "3", "--nproc", "2", "--epochs", "1"]);
    assert!(run.success(), "{}", run.stderr);
    // Only the ranks notice that the dataset differs.
    let more = ["--max-restarts", "3", "--nproc", "2", "--resume", "--seed", "7"];
    let run = world.train("again", &more);
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert!(run.stderr.contains("--seed 0, this run asks for 7"), "{}", run.stderr);
    assert!(!run.stderr.contains("starting all ranks again"), "{}", run.stderr);
}

#[test]
fn ranks_that_would_resume_different_checkpoints_are_refused() {
    let world = World::new();
    let run = world.train("mine", &["--epochs", "1"]);
    assert!(run.success(), "{}", run.stderr);
    let port = free_port().to_string();
    let ranks = ["mine", "theirs"].iter().enumerate().map(|(rank, save)| {
        let mut command = world.command(save, &["--resume-or-start", "--collective-timeout", "20"]);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
        Running::start(command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port))
    });
    for rank in ranks.collect::<Vec<_>>() {
        let run = rank.end();
        assert_eq!(run.code, Some(1));
        assert!(run.stderr.contains("rank 1 sees no checkpoint in "), "{}", run.stderr);
    }
}

#[test]
fn a_rank_that_hangs_ends_the_job_after_the_collective_timeout() {
    let world = World::new();
    let more = [&LONG[..], &["--nproc", "2", "--collective-timeout", "2"]].concat();
    let mut run = Running::start(&mut world.command("hung", &more));
    run.await_step(&world.path("hung"), 3);
    send("-STOP", run.ranks()[1]);
    let stopped = Instant::now();
    let run = run.end();
    assert!(stopped.elapsed() < Duration::from_secs(2) + 2 * DEATH, "{:?}", stopped.elapsed());
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert!(run.stderr.contains("nothing was heard from rank 1"), "{}", run.stderr);
}

#[test]
fn what_several_nodes_need_is_named() {
    let world = World::new();
    let endpoint = format!("127.0.0.1:{}", free_port());
    let check = |more: &[&str], expected: &str| {
        let run = world.train("nodes", more);
        assert_eq!(run.code, Some(1), "{}", run.stderr);
        assert!(run.stderr.contains(expected), "{more:?}: {}", run.stderr);
        assert!(!world.path("nodes").exists());
    };
    check(&["--nnodes", "2"], "--node-rank is missing; --nnodes 2 needs it");
    check(&["--nnodes", "2", "--node-rank", "1"], "--rdzv-endpoint is missing");
    let two = ["--nnodes", "2", "--rdzv-endpoint", &endpoint, "--join-timeout", "1", "--node-rank"];
    check(&[&two[..], &["2"]].concat(), "--node-rank is 2, but with --nnodes 2 it must be");
    check(&[&two[..], &["1"]].concat(), &format!("nothing answers at --rdzv-endpoint {endpoint}"));
    check(&[&two[..], &["0"]].concat(), "1 of 2 nodes did not join within 1 s: node 1");
    check(&["--nnodes", "0"], "--nnodes is 0");
    check(&["--nproc", "0"], "--nproc is 0");
    check(&["--backend", "nccl", "--device", "cpu"], "--backend nccl is not available");
}
