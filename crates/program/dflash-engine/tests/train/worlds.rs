//! Jobs of one, two and four gloo processes train identically and resume each other's checkpoints.

use std::path::Path;

use crate::assert_same_losses;
use crate::world::{World, losses, sorted_checkpoints};

/// Ranks and micro-batches that give the same global batch of four rows.
const SPLITS: [[&str; 2]; 3] = [["1", "4"], ["2", "2"], ["4", "1"]];

fn flags<'a>([ranks, accumulation]: [&'a str; 2], more: &[&'a str]) -> Vec<&'a str> {
    // A rank whose peer never answers must fail the test, not hang it.
    let split = ["--nproc", ranks, "--gradient-accumulation-steps", accumulation];
    [&split[..], &["--collective-timeout", "60"], more].concat()
}

/// Trains with every split and compares.
fn check_splits(world: &World, more: &[&str]) {
    for split in SPLITS {
        let run = world.train(split[0], &flags(split, more));
        assert!(run.success(), "{split:?}: {}", run.stderr);
    }
    let expected = losses(&world.path("1"));
    for split in &SPLITS[1..] {
        assert_same_losses(&losses(&world.path(split[0])), &expected);
    }
}

fn position(checkpoint: &Path) -> serde_json::Value {
    let text = std::fs::read_to_string(checkpoint.join("trainer/state.json")).unwrap();
    let mut state: serde_json::Value = serde_json::from_str(&text).unwrap();
    // other world sizes sum in another order
    assert!(state["tensors_crc32"].take().is_u64());
    assert!(state["first_loss"].take().is_f64());
    assert!(state["recent_losses"].take().is_array());
    assert!(state["settings"]["ranks"].take().is_string());
    state
}

#[test]
fn equal_global_batches_give_equal_losses() {
    check_splits(&World::new(), &["--epochs", "4"]);
}

#[test]
fn ranks_without_anchors_hang_nobody() {
    // Most documents have no supervised token, and a row may consist of such documents.
    let world = World::with_mask(|index, t| index % 4 == 0 && t >= 3);
    check_splits(&world, &["--epochs", "2", "--total-seq-len", "20"]);
    assert!(losses(&world.path("4")).iter().any(|(_, loss)| *loss > 0.0));
}

#[test]
fn other_worlds_continue_a_run_of_two_ranks() {
    let world = World::new();
    let more = ["--epochs", "4", "--save-every", "2"];
    let run = world.train("2", &flags(["2", "2"], &more));
    assert!(run.success(), "{}", run.stderr);
    let expected = losses(&world.path("2"));
    let last = sorted_checkpoints(&world.path("2")).pop().unwrap();
    for split in [["1", "4"], ["4", "1"]] {
        copy(&world.path("2"), &world.path(split[0]));
        for later in
            sorted_checkpoints(&world.path(split[0])).iter().filter(|name| *name != "step-000002")
        {
            std::fs::remove_dir_all(world.path(split[0]).join(later)).unwrap();
        }
        let run = world.train(split[0], &flags(split, &[&more[..], &["--resume"]].concat()));
        assert!(run.success(), "{split:?}: {}", run.stderr);
        assert_same_losses(&losses(&world.path(split[0])), &expected);
        let end = |name: &str| position(&world.path(name).join(&last));
        assert_eq!(end(split[0]), end("2"), "the same rows and tokens");
    }
}

fn copy(from: &Path, to: &Path) {
    let status = std::process::Command::new("cp").arg("-r").args([from, to]).status().unwrap();
    assert!(status.success());
}
