//! Validation during training.

use dflash_draft::LoadedDraft;
use dflash_run::{Acceptance, Line, ValidationLine};
use dflash_train::config::TrainConfig;
use dflash_train::{ProbeError, Share};
use serde_json::Value;
use tch::Kind;

use crate::world::{World, refused, resumed, with};

/// Any file: the fake probe ignores it.
const PROMPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");

fn validated(config: TrainConfig, every: u64, measures: bool) -> TrainConfig {
    with(config, |settings| {
        settings.validation.eval_every = Some(every);
        settings.validation.validation_ratio = Some(0.25);
        settings.validation.eval_prompts = measures.then(|| PROMPTS.into());
    })
}

/// A probe whose acceptance is a function of the weights.
#[allow(clippy::unnecessary_wraps, reason = "a probe may fail")]
fn probe(served: &LoadedDraft, share: Share) -> Result<Option<Acceptance>, ProbeError> {
    assert_eq!(share, Share { rank: 0, ranks: 1, show: dflash_io::Show::Lines });
    let digest = served.draft.flat().abs().sum(Kind::Double).double_value(&[]) as u64;
    let reached = vec![100, digest % 101, digest % 13, 0];
    Ok(Some(Acceptance { reached, responses: 2, length_sum: 3.0 }))
}

#[test]
fn a_fault_in_a_validation_saves_what_was_trained() {
    let world = World::new();
    let config = validated(world.config("out"), 2, false);
    // the last sample is held out
    let last = World::SAMPLES - 1;
    std::fs::remove_file(world.files.path(last)).unwrap();
    let error = refused(world.train(&config));
    assert!(error.contains(&format!("for sample {last} ")), "{error}");
    assert_eq!(world.saved("out"), [2]);
}

#[test]
fn validation_does_not_change_what_is_trained() {
    let world = World::new();
    // holding out samples changes the training data, so it is the same in both
    world.train(&validated(world.config("plain"), 1000, false)).unwrap();
    let config = validated(world.config("measured"), 1, true);
    world.train_measured(&config, Some(&mut probe)).unwrap();
    assert_eq!(world.losses("plain"), world.losses("measured"));
}

#[test]
fn a_validation_that_was_cut_short_is_made_up_for() {
    let world = World::new();
    let config = validated(world.config("out"), 3, true);
    let train = |config: &TrainConfig| world.train_measured(config, Some(&mut probe)).unwrap();
    let figures = || -> Vec<Value> {
        let mut lines = world.lines("out", ValidationLine::FILE);
        lines.iter_mut().for_each(|line| line["seconds"] = 0.into());
        lines
    };
    train(&config);
    let all = figures();
    assert!(all.iter().all(|line| line["blocks"].as_u64().unwrap() > 0));
    let path = world.path("out").join(ValidationLine::FILE);
    let text = std::fs::read_to_string(&path).unwrap();
    let cut = text.trim_end().rfind('\n').unwrap();
    std::fs::write(&path, &text[..cut + 9]).unwrap();
    for _ in 0..2 {
        train(&resumed(&config));
        assert_eq!(figures(), all);
    }
}

#[test]
fn a_probe_that_was_stopped_or_failed_ends_the_run_in_its_own_way() {
    let world = World::new();
    let config = validated(world.config("stopped"), 2, true);
    let mut stopped = |_: &LoadedDraft, _: Share| Ok(None);
    let outcome = world.train_measured(&config, Some(&mut stopped)).unwrap();
    assert_eq!((outcome.step, outcome.completed), (2, false));
    assert!(!world.path("stopped").join(ValidationLine::FILE).exists());
    let config = validated(world.config("failed"), 2, true);
    let mut failing = |_: &LoadedDraft, _: Share| Err("no room".into());
    let error = refused(world.train_measured(&config, Some(&mut failing)));
    assert!(error.contains("rank 0 cannot measure acceptance: no room"), "{error}");
    assert_eq!(world.saved("failed"), [2]);
}

#[test]
fn without_an_interval_each_checkpoint_is_validated() {
    let world = World::new();
    let config = with(validated(world.config("out"), 1, false), |settings| {
        settings.validation.eval_every = None;
        settings.checkpoints.save_every = Some(2);
    });
    world.train(&config).unwrap();
    let steps = || -> Vec<u64> {
        let lines = world.lines("out", ValidationLine::FILE);
        lines.iter().map(|line| line["step"].as_u64().unwrap()).collect()
    };
    let saved = world.saved("out");
    assert!(saved.len() > 2, "{saved:?}");
    assert_eq!(steps(), saved);
    // a validation that was cut short is made up for, as at an interval
    let path = world.path("out").join(ValidationLine::FILE);
    std::fs::write(&path, "").unwrap();
    world.train(&resumed(&config)).unwrap();
    assert_eq!(steps(), saved[saved.len() - 1..]);
}
