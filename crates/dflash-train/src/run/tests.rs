//! Whole runs beside other ranks and on rows whose source a test controls. The rest is in tests/it.

use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use dflash_data::Sample;
use dflash_dist::Single;
use dflash_hidden::Counters;
use dflash_model::checkpoint::TensorFile;
use serde_json::json;

use crate::config::TrainConfig;
use crate::fake::{Beside, MemoryRows};
use crate::rows::{Samples, StreamedRows, TargetSamples};
use crate::world::{World, refused, resumed, with};
use crate::{Error, Prepared};

/// What the stream of a run brings.
fn streamed(config: &TrainConfig) -> StreamedRows {
    Prepared::open(config).unwrap().streamed_rows()
}

#[test]
fn equal_seeds_give_equal_bytes_from_memory_and_from_files() {
    let world = World::new();
    let memory = |save: &str| world.train_on(&world.config(save), &world.rows(), &Single).unwrap();
    let (first, second) = (memory("first"), memory("second"));
    assert!(first.completed);
    assert_eq!(World::state(&first.checkpoint), World::state(&second.checkpoint));
    let third = world.train(&world.config("third")).unwrap();
    assert_eq!(World::state(&first.checkpoint), World::state(&third.checkpoint));
    let losses = world.losses("first");
    assert_eq!(losses, world.losses("third"));
    assert!(losses.last().unwrap().1 < losses[0].1, "the loss falls: {losses:?}");
}

/// A dataset that cannot be read once, when it is asked for the n-th time.
struct FailsOnce {
    samples: TargetSamples,
    reads: Mutex<usize>,
    at: usize,
}

impl Samples for FailsOnce {
    fn sample(&self, index: u32) -> Result<Sample, Error> {
        let mut reads = self.reads.lock().unwrap();
        *reads += 1;
        if *reads == self.at {
            let path = "data-00000-of-00001.arrow".into();
            let source = std::io::Error::other("a network that blinked");
            let source = dflash_data::Error::Read { path, source };
            let path = self.samples.dataset.dir().into();
            return Err(Error::Sample { path, sample: index, source });
        }
        self.samples.sample(index)
    }
}

#[test]
fn a_sample_that_cannot_be_read_once_ends_the_run_by_its_name() {
    let world = World::new();
    let config =
        with(world.config("out"), |settings| settings.rows.gradient_accumulation_steps = 2);
    let whole =
        world.train(&with(config.clone(), |settings| settings.save_path = world.path("whole")));
    let samples = Arc::new(FailsOnce { samples: world.samples(), reads: Mutex::new(0), at: 27 });
    let source = StreamedRows { samples: samples.clone(), ..streamed(&config) };
    let error = refused(world.train_on(&config, &source, &Single));
    assert!(error.contains("cannot read sample "), "{error}");
    assert!(error.contains("data-00000-of-00001.arrow"), "{error}");
    assert_eq!(*samples.reads.lock().unwrap(), 27, "it goes on after the error");
    // what was trained before is kept, and goes on as if nothing had happened
    let kept = world.saved("out");
    assert_eq!(kept, [world.losses("out").last().unwrap().0]);
    let on = world.train(&resumed(&config)).unwrap();
    assert_eq!(World::state(&on.checkpoint), World::state(&whole.unwrap().checkpoint));
    assert_eq!(world.losses("out"), world.losses("whole"));
}

#[test]
fn every_sample_is_read_once_an_epoch() {
    struct Counted(TargetSamples, Mutex<Vec<u32>>);
    impl Samples for Counted {
        fn sample(&self, index: u32) -> Result<Sample, Error> {
            self.1.lock().unwrap().push(index);
            self.0.sample(index)
        }
    }
    let world = World::new();
    let config = world.config("out");
    let counted = Arc::new(Counted(world.samples(), Mutex::default()));
    let source = StreamedRows { samples: counted.clone(), ..streamed(&config) };
    world.train_on(&config, &source, &Single).unwrap();
    let mut read = std::mem::take(&mut *counted.1.lock().unwrap());
    read.sort_unstable();
    let twice: Vec<u32> = (0..World::SAMPLES as u32).flat_map(|sample| [sample; 2]).collect();
    assert_eq!(read, twice, "two epochs");
}

#[test]
fn so_many_bad_steps_in_a_row_end_the_run_saved_and_for_good() {
    let world = World::new();
    (0..World::SAMPLES).for_each(|sample| world.spoil(sample));
    let config = with(world.config("out"), |settings| settings.optimizer.max_bad_steps = 3);
    let launcher = Beside::default();
    let error = refused(world.train_on(&config, &streamed(&config), &launcher));
    assert!(error.contains("3 steps in a row is not finite (last: step 3)"), "{error}");
    assert_eq!((launcher.worked.load(Relaxed), launcher.permanent.load(Relaxed)), (1, 1));
    let lines = world.lines("out", "metrics.jsonl");
    assert_eq!((lines.len(), &lines[2]["bad_steps"]), (3, &json!(3)));
    assert!(lines[2]["loss"].is_null());
    assert_eq!(world.saved("out"), [3]);
    // the count goes on where it stood
    let error = refused(world.train(&resumed(&config)));
    assert!(error.contains("4 steps in a row is not finite (last: step 4)"), "{error}");
}

#[test]
fn a_bad_step_has_no_share_in_the_figures() {
    let world = World::new();
    world.spoil(5);
    let config = with(world.config("out"), |settings| settings.log_every = 1000);
    world.train(&config).unwrap();
    let lines = world.lines("out", "metrics.jsonl");
    // the first step, and all others with the last
    assert_eq!((lines.len(), &lines[1]["bad_steps"]), (2, &json!(2)));
    let loss = lines[1]["loss"].as_f64().unwrap();
    assert!(loss > 0.0 && loss < 5.0, "{loss}");
}

#[test]
fn another_rank_s_fault_ends_the_run_saved_and_without_an_error() {
    let world = World::new();
    let config = world.config("out");
    let beside = Beside { fails_at: Some(4), ..Beside::default() };
    let outcome = world.train_on(&config, &world.rows(), &beside).unwrap();
    assert_eq!((outcome.step, outcome.completed), (3, false), "the fourth step is void");
    assert_eq!(world.saved("out"), [3]);
    world.train(&resumed(&config)).unwrap();
    world.train(&world.config("whole")).unwrap();
    assert_eq!(world.losses("out"), world.losses("whole"));
}

#[test]
fn a_stop_while_waiting_for_rows_keeps_the_steps_before_it() {
    let world = World::new();
    let config = world.config("out");
    let rows = MemoryRows { interrupted_after: Some(3), ..world.rows() };
    let outcome = world.train_on(&config, &rows, &Single).unwrap();
    assert_eq!((outcome.step, outcome.completed), (3, false));
    let on = world.train(&resumed(&config)).unwrap();
    let whole = world.train(&world.config("whole")).unwrap();
    assert_eq!(World::state(&on.checkpoint), World::state(&whole.checkpoint));
}

#[test]
fn a_stop_between_rows_counts_the_step_that_it_met() {
    let world = World::new();
    let config = world.config("out");
    config.stop.store(true, Relaxed);
    let outcome = world.train_on(&config, &world.rows(), &Single).unwrap();
    assert_eq!((outcome.step, outcome.completed), (1, false));
    assert_eq!(world.saved("out"), [1]);
}

#[test]
fn metrics_have_what_the_streams_of_all_ranks_counted() {
    let world = World::new();
    let config = world.config("out");
    let counted = Counters { retries: 1, busy: 2, stale: 3, ..Counters::default() };
    let two = Beside { alike: 1, ..Beside::default() };
    let rows = MemoryRows { counted, ..world.rows() };
    world.train_on(&config, &rows, &two).unwrap();
    for line in &world.lines("out", "metrics.jsonl")[..2] {
        // one row ahead of those that this rank had, and the same on the other
        let ahead = line["step"].as_u64().unwrap()
            * config.settings.rows.gradient_accumulation_steps as u64
            + 1;
        let found = ["retries", "busy", "stale"].map(|key| line["stream"][key].as_u64().unwrap());
        assert_eq!(found, [1, 2, 3].map(|each| 2 * each * ahead), "{line}");
    }
}

#[test]
fn a_run_without_anything_to_learn_fails() {
    // one supervised token a sample: no anchor has a token to predict
    let world = World::with_mask(|_, t| t == 5);
    let launcher = Beside::default();
    let error = refused(world.train_on(&world.config("out"), &world.rows(), &launcher));
    assert!(error.contains("had nothing to learn from"), "{error}");
    assert_eq!(launcher.permanent.load(Relaxed), 1);
    let line = world.lines("out", "metrics.jsonl").remove(0);
    for key in ["loss", "accuracy", "expected_acceptance_length"] {
        assert!(line[key].is_null(), "{line}");
    }
}

#[test]
fn all_ranks_clip_by_the_norm_of_rank_0() {
    let world = World::new();
    let one = |save: &str| with(world.config(save), |settings| settings.rows.max_steps = Some(1));
    let own = world.train(&one("own")).unwrap();
    let norm = world.lines("own", "metrics.jsonl")[0]["gradient_norm"].as_f64().unwrap();
    let told = |save: &str, norm: f64| {
        let rank_0 = Beside { broadcast_value: Some(norm), ..Beside::default() };
        world.train_on(&one(save), &world.rows(), &rank_0).unwrap().checkpoint
    };
    assert_eq!(World::state(&told("same", norm)), World::state(&own.checkpoint));
    let other = told("other", 100.0 * norm);
    assert_eq!(world.lines("other", "metrics.jsonl")[0]["gradient_norm"], 100.0 * norm);
    let mean = |checkpoint: &Path| {
        let file = TensorFile::open(&checkpoint.join("trainer/state.safetensors")).unwrap();
        file.any_tensor("mean").unwrap().abs().max().double_value(&[])
    };
    assert!(mean(&other) < 0.02 * mean(&own.checkpoint), "clipped by the other norm");
    let none = told("none", f64::NAN);
    assert_eq!(world.lines("none", "metrics.jsonl")[0]["bad_steps"], 1);
    assert_eq!(mean(&none), 0.0);
}
