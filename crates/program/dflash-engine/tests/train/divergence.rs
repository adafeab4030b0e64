//! How diverging runs end: what they report, what they leave behind, and that their advice works.

use dflash_draft::Draft;
use tch::{Device, Kind};

use crate::world::{Run, World, sorted_checkpoints};

fn fail(world: &World, save: &str, more: &[&str], expected: &str) -> Run {
    let run = world.train(save, more);
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert!(run.stderr.contains(expected), "{expected}: {}", run.stderr);
    run
}

/// The flags that a failed run advises adding.
fn advice(run: &Run) -> Vec<String> {
    let (_, flags) = run.stderr.split_once("add to the command: ").expect(&run.stderr);
    flags.lines().next().unwrap().split(' ').map(str::to_owned).collect()
}

/// Follows the advice of a failed run; returns the path of its last checkpoint, a usable draft.
fn follow(world: &World, save: &str, (more, failed): (&[&str], &Run)) -> Run {
    let advice = advice(failed);
    let more: Vec<&str> = more.iter().copied().chain(advice.iter().map(String::as_str)).collect();
    let run = world.train(save, &more);
    assert!(run.success(), "{advice:?}: {}", run.stderr);
    let draft = Draft::load(run.stdout.trim().as_ref(), Device::Cpu, Kind::Float).unwrap();
    assert!(draft.flat().abs().max().double_value(&[]) < 100.0, "{advice:?}");
    run
}

const DIVERGE: [&str; 5] = ["--lr", "1e12", "--allow-any-lr", "--max-bad-steps", "3"];

#[test]
fn a_run_that_diverges_keeps_its_last_good_checkpoint_and_its_advice_works() {
    let world = World::new();
    let good = ["--epochs", "9", "--save-every", "2", "--keep-last", "1", "--max-steps", "6"];
    let begun = world.train("out", &good);
    assert!(begun.success(), "{}", begun.stderr);
    let longer = ["--epochs", "9", "--save-every", "2", "--keep-last", "1", "--max-steps", "20"];
    let leave = ["--resume", "--allow-changed", "lr,max-steps"];
    let more = [&longer[..], &DIVERGE, &leave].concat();
    let run = fail(&world, "out", &more, "not finite");
    assert!(run.stderr.contains("the last good checkpoint is "), "{}", run.stderr);
    assert!(run.stderr.contains("step-000006; to go on"), "{}", run.stderr);
    assert!(!run.stdout.contains("step-"), "{}", run.stdout);
    // --resume alone selects the good one too, despite the others
    let lower = [&longer[..], &["--resume", "--allow-changed", "max-steps"]].concat();
    copy(&world, "out", "alone");
    let alone = world.train("alone", &lower);
    assert!(alone.success(), "{}", alone.stderr);
    assert!(alone.stderr.contains("resuming step 6 of 20"), "{}", alone.stderr);
    let on = follow(&world, "out", (&more, &run));
    assert!(on.stderr.contains("resuming step 6 of 20"), "{}", on.stderr);
    assert!(on.stderr.contains("changed: lr 0.01 -> 0.0006"), "{}", on.stderr);
}

fn copy(world: &World, from: &str, to: &str) {
    let mut command = std::process::Command::new("cp");
    assert!(command.arg("-r").args([world.path(from), world.path(to)]).status().unwrap().success());
}

#[test]
fn a_run_that_diverges_at_once_says_how_to_begin_again() {
    let world = World::new();
    for (save, more) in [("saves", &["--save-every", "1"][..]), ("never", &["--epochs", "20"])] {
        let more = [&DIVERGE[..], more].concat();
        let run = fail(&world, save, &more, "not finite");
        assert!(run.stderr.contains("there is no good checkpoint"), "{}", run.stderr);
        let resumed = world.train(save, &[&more[..], &["--resume"]].concat());
        assert_eq!(resumed.code, Some(1), "{}", resumed.stderr);
        follow(&world, save, (&more, &run));
    }
}

#[test]
fn weights_beyond_reason_are_no_success() {
    let world = World::new();
    let more = ["--lr", "1000", "--allow-any-lr", "--save-every", "4", "--epochs", "3"];
    let run = fail(&world, "out", &more, "the run has diverged: at step ");
    assert!(run.stderr.contains("--resume will not take step "), "{}", run.stderr);
    assert!(run.stderr.contains("weights are beyond 1000"), "{}", run.stderr);
    let advice = follow(&world, "out", (&more, &run));
    assert!(!advice.stderr.contains("diverged"), "{}", advice.stderr);
}

#[test]
fn steps_that_are_not_finite_are_said_and_summed_up() {
    let world = World::new();
    world.spoil(5);
    let run = world.train("out", &["--log-every", "100"]);
    assert!(run.success(), "{}", run.stderr);
    for said in [
        "loss or gradient is not finite (gradient norm ",
        "it is the 1st such step",
        "it is the 2nd such step",
        "2 of 14 steps were not finite and changed nothing (last: step ",
    ] {
        assert!(run.stderr.contains(said), "{said}: {}", run.stderr);
    }
    assert_eq!(sorted_checkpoints(&world.path("out")).len(), 2);
}
