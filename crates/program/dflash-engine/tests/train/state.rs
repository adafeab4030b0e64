//! Training state: optimizers, averaged weights, split state, computation types.

use std::path::Path;

use dflash_tensor::checkpoint::TensorFile;
use tch::Tensor;

use super::assert_same_losses;
use super::world::{World, losses, sorted_checkpoints};

/// Muon with every kind of state and parameter group.
const MUON: [&str; 8] = [
    "--optimizer",
    "muon",
    "--ema-decay",
    "0.8",
    "--weight-decay",
    "0.01",
    "--norm-weight-decay",
    "0.001",
];

/// Runs a training that must succeed; returns its stderr.
fn succeed(world: &World, name: &str, arguments: &[&str]) -> String {
    let run = world.train(name, arguments);
    assert!(run.success(), "{name}: {}", run.stderr);
    run.stderr
}

/// Millions of float32 numbers of state per rank, as announced by a run.
fn announced(stderr: &str) -> f64 {
    let before = stderr.split(" M float32 numbers of state").next().unwrap();
    before.split_whitespace().last().unwrap().parse().unwrap()
}

/// Recreates in `to` what run `from` would have left if killed after checkpoint `last`.
fn cut_short(world: &World, from: &str, to: &str, last: &str) {
    copy_dir(&world.path(from), &world.path(to));
    for name in sorted_checkpoints(&world.path(to)).iter().filter(|name| name.as_str() > last) {
        std::fs::remove_dir_all(world.path(to).join(name)).unwrap();
    }
}

fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            copy_dir(&entry.path(), &target);
        } else if kind.is_symlink() {
            std::os::unix::fs::symlink(std::fs::read_link(entry.path()).unwrap(), target).unwrap();
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// A tensor of the last checkpoint's trainer state.
fn stored(world: &World, run: &str, name: &str) -> Tensor {
    let last = sorted_checkpoints(&world.path(run)).pop().unwrap();
    let path = world.path(run).join(last).join("trainer/state.safetensors");
    TensorFile::open(&path).unwrap().any_tensor(name).unwrap()
}

fn assert_same_state(world: &World, a: &str, b: &str, names: &[&str]) {
    for name in names {
        let difference = (stored(world, a, name) - stored(world, b, name)).abs().max();
        assert!(difference.double_value(&[]) <= 1e-6, "{name} of {a} and {b}: {difference:?}");
    }
}

#[test]
fn muon_and_the_average_resume_exactly_and_only_as_themselves() {
    let world = World::new();
    succeed(&world, "whole", &[&MUON[..], &["--save-every", "3"]].concat());
    let last = sorted_checkpoints(&world.path("whole")).pop().unwrap();
    cut_short(&world, "whole", "part", "step-000003");
    let refuse = |arguments: &[&str], expect: &str| {
        let run = world.train("part", &[arguments, &["--resume"]].concat());
        assert_eq!(run.code, Some(1), "{}", run.stderr);
        assert!(run.stderr.contains(expect), "{}", run.stderr);
    };
    refuse(&MUON[2..], "trained with --optimizer muon, this run asks for adamw");
    refuse(&MUON[..2], "trained with --ema-decay 0.8, this run asks for off");
    succeed(&world, "part", &[&MUON[..], &["--save-every", "3", "--resume"]].concat());
    assert_eq!(world.state("whole", &last), world.state("part", &last));
    assert_eq!(losses(&world.path("whole")), losses(&world.path("part")));
}

#[test]
fn validation_measures_the_averaged_weights_split_or_not() {
    let world = World::new();
    let validated = ["--validation-ratio", "0.2", "--eval-every", "100"];
    let with = |name: &str, more: &[&str]| {
        succeed(&world, name, &[&validated[..], more].concat());
        let text = std::fs::read_to_string(world.path(name).join("validation.jsonl")).unwrap();
        let line: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        line["loss"].as_f64().unwrap()
    };
    let rows = ["--gradient-accumulation-steps", "2"];
    let last = with("last", &rows);
    let averaged = with("averaged", &[&rows[..], &["--ema-decay", "0.8"]].concat());
    let split = ["--nproc", "2", "--zero", "1", "--ema-decay", "0.8"];
    let split = with("split", &split);
    assert_same_losses(&losses(&world.path("last")), &losses(&world.path("averaged")));
    assert!((last - averaged).abs() > 1e-3 * last, "{last} and {averaged}");
    assert!((split - averaged).abs() <= 1e-5 * averaged, "{split} and {averaged}");
}

/// Two ranks that split the state train like two that do not; their checkpoint resumes anywhere.
fn check_split(world: &World, more: &[&str], state: &[&str]) {
    let two = [more, &["--nproc", "2", "--gradient-accumulation-steps", "2"]].concat();
    let two = [&two[..], &["--epochs", "4", "--save-every", "3"]].concat();
    let all = announced(&succeed(world, "copies", &[&two[..], &["--zero", "0"]].concat()));
    let part = announced(&succeed(world, "split", &[&two[..], &["--zero", "1"]].concat()));
    assert!(part <= 0.6 * all, "{part} of {all}");
    assert_same_losses(&losses(&world.path("copies")), &losses(&world.path("split")));
    assert_same_state(world, "copies", "split", state);
    cut_short(world, "split", "one", "step-000003");
    cut_short(world, "split", "four", "step-000003");
    let on = |ranks: &'static str, rows: &'static str| {
        let place = ["--nproc", ranks, "--gradient-accumulation-steps", rows];
        [more, &place, &["--epochs", "4", "--save-every", "3", "--resume"]].concat()
    };
    succeed(world, "one", &on("1", "4"));
    succeed(world, "four", &[&on("4", "1")[..], &["--zero", "1"]].concat());
    for name in ["one", "four"] {
        assert_same_losses(&losses(&world.path("copies")), &losses(&world.path(name)));
    }
}

#[test]
fn split_state_of_adamw_trains_the_same_and_resumes_on_one_rank_and_on_four() {
    let state = ["masters", "mean", "variance", "average"];
    check_split(&World::new(), &["--ema-decay", "0.8", "--weight-decay", "0.01"], &state);
}

#[test]
fn split_state_of_muon_trains_the_same_and_resumes_on_one_rank_and_on_four() {
    let state = ["masters", "momentum", "norm_mean", "norm_variance", "average"];
    check_split(&World::new(), &MUON, &state);
}

#[test]
fn split_state_works_in_bfloat16_too() {
    let world = World::new();
    let two = ["--nproc", "2", "--compute-dtype", "bfloat16"];
    succeed(&world, "copies", &[&two[..], &["--zero", "0"]].concat());
    succeed(&world, "split", &[&two[..], &["--zero", "1"]].concat());
    assert_same_losses(&losses(&world.path("copies")), &losses(&world.path("split")));
    assert_same_state(&world, "copies", "split", &["masters", "mean", "variance"]);
}
