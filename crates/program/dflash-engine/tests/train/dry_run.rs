//! `dflash train --dry-run`: an untrained drafter that eval and export accept like any other.

use dflash_draft::Draft;
use tch::{Device, Kind};

use crate::world::{Run, World};

/// A dry run without data or server.
fn dry(world: &World, save: &str, more: &[&str]) -> Run {
    let path = |name: &str| world.path(name).to_string_lossy().into_owned();
    let (target, save) = (path("target"), path(save));
    let line = ["train", "--dry-run", "--target", &target, "--save-path", &save];
    let shape = ["--num-layers", "2", "--block-size", "4", "--target-layer-ids", "1"];
    world.engine(&[&line, &shape[..], more].concat())
}

#[test]
fn a_dry_run_writes_a_drafter_that_decodes_and_exports() {
    let world = World::new();
    let run = dry(&world, "save", &[]);
    assert!(run.success(), "{}", run.stderr);
    let path = world.path("save/dry-run");
    assert_eq!(run.stdout.trim_end(), path.to_string_lossy());
    let report = world.eval(&path);
    assert!(report["acceptance_length"].as_f64().unwrap() >= 1.0);
    let (draft, output) = (path.to_string_lossy(), world.path("draft.gguf"));
    let (target, output) = (world.path("target"), output.to_string_lossy().into_owned());
    let target = target.to_string_lossy();
    let line = ["export", "--draft", &draft, "--target", &target, "--format", "gguf"];
    let exported = world.engine(&[&line[..], &["--output", &output]].concat());
    assert!(exported.success(), "{}", exported.stderr);
}

#[test]
fn the_seed_decides_the_drafter_and_a_later_run_starts_beside_it() {
    let world = World::new();
    let weights = |more: &[&str]| {
        assert!(dry(&world, "save", more).success());
        let draft = Draft::load(&world.path("save/dry-run"), Device::Cpu, Kind::Float).unwrap();
        draft.flat().copy()
    };
    let first = weights(&[]);
    assert!(first.equal(&weights(&[])), "another dry run replaces it");
    assert!(!first.equal(&weights(&["--seed", "1"])));
    let run = world.train("save", &["--max-steps", "2"]);
    assert!(run.success(), "{}", run.stderr);
    assert!(world.path("save/dry-run/model.safetensors").is_file());
    assert!(world.path("save/latest/model.safetensors").is_file());
}

#[test]
fn only_a_pruned_vocabulary_needs_data() {
    let world = World::new();
    let missing = dry(&world, "save", &["--draft-vocab-size", "20"]);
    assert_eq!(missing.code, Some(2), "{}", missing.stderr);
    assert!(missing.stderr.contains("--data-path"), "{}", missing.stderr);
    let data = world.path("data").to_string_lossy().into_owned();
    let run = dry(&world, "save", &["--draft-vocab-size", "20", "--data-path", &data]);
    assert!(run.success(), "{}", run.stderr);
    assert!(world.path("save/dry-run/draft_vocabulary.safetensors").is_file());
    std::fs::create_dir_all(world.path("taken/dry-run/notes")).unwrap();
    assert_eq!(dry(&world, "taken", &[]).code, Some(1));
    assert!(world.path("taken/dry-run/notes").is_dir());
    let refused = dry(&world, "save", &["--target-layer-ids", "7"]);
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("layer id 7 is out of range"), "{}", refused.stderr);
}
