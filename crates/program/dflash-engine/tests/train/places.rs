//! Where ranks find their files: changed data, and separate directories of the same name.

use std::path::Path;

use crate::running::{Running, free_port};
use crate::world::{Run, World};

/// Two ranks that save into separate directories, as on two nodes; returns both runs.
fn apart(world: &World, saves: [&str; 2], more: &[&str]) -> [Run; 2] {
    let port = free_port().to_string();
    let ranks = [0, 1].map(|rank| {
        let limits = ["--collective-timeout", "20", "--epochs", "1"];
        let mut command = world.command(saves[rank], &[&limits[..], more].concat());
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
        Running::start(command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port))
    });
    ranks.map(Running::end)
}

#[test]
fn equal_steps_of_different_runs_do_not_train_together() {
    let world = World::new();
    for (save, rate) in [("mine", "0.01"), ("theirs", "0.02")] {
        let run = world.train(save, &["--epochs", "1", "--max-steps", "3", "--lr", rate]);
        assert!(run.success(), "{}", run.stderr);
    }
    let more = ["--resume", "--allow-changed", "lr,max-steps,epochs,rows-per-step"];
    for run in apart(&world, ["mine", "theirs"], &more) {
        assert_eq!(run.code, Some(1), "{}", run.stderr);
        assert!(run.stderr.contains("rank 1 sees step 3 (checksum "), "{}", run.stderr);
        assert!(run.stderr.contains("but rank 0 sees step 3 (checksum "), "{}", run.stderr);
    }
    // A copy of a checkpoint is the same checkpoint.
    copy(&world.path("mine"), &world.path("copied"));
    for run in apart(&world, ["mine", "copied"], &more) {
        assert!(run.success(), "{}", run.stderr);
    }
}

fn copy(from: &Path, to: &Path) {
    let status = std::process::Command::new("cp").arg("-r").args([from, to]).status();
    assert!(status.unwrap().success());
}

#[test]
fn a_first_run_with_directories_of_its_own_is_told_at_its_start() {
    let world = World::new();
    let [first, second] = apart(&world, ["here", "there"], &[]);
    assert!(first.success() && second.success(), "{}{}", first.stderr, second.stderr);
    let told = "rank 1 does not see what rank 0 writes to ";
    assert_eq!(first.stderr.matches(told).count(), 1, "{}", first.stderr);
    assert!(first.stderr.find(told) < first.stderr.find("step 1/"), "{}", first.stderr);
    let [first, second] = apart(&world, ["one", "one"], &[]);
    assert!(first.success() && second.success(), "{}{}", first.stderr, second.stderr);
    assert!(!first.stderr.contains("does not see"), "{}", first.stderr);
}

#[test]
fn data_whose_tokens_were_changed_are_other_data() {
    let world = World::new();
    let more = ["--max-steps", "3"];
    let begun = world.train("out", &more);
    assert!(begun.success(), "{}", begun.stderr);
    // Changes one token of the last sample; lengths and recorded fingerprint stay.
    let shard = world.path("data/data-00000-of-00001.arrow");
    let mut bytes = std::fs::read(&shard).unwrap();
    let ids: Vec<i32> = (0..17).map(|t| (23 * 7 + t) % 60).collect();
    let wanted: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let at = bytes.windows(wanted.len()).position(|window| window == wanted).unwrap();
    bytes[at] ^= 1;
    std::fs::write(&shard, &bytes).unwrap();
    let resumed = world.train("out", &[&more[..], &["--resume"]].concat());
    assert_eq!(resumed.code, Some(1), "{}", resumed.stderr);
    let told = "it was trained with a dataset (--data-path) whose tokens have the digest ";
    assert!(resumed.stderr.contains(told), "{}", resumed.stderr);
    bytes[at] ^= 1;
    std::fs::write(&shard, &bytes).unwrap();
    let resumed = world.train("out", &[&more[..], &["--resume"]].concat());
    assert!(resumed.success(), "{}", resumed.stderr);
}
