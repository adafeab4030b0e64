//! Whole runs in this process, on rows in memory and, where the stream matters, on stored states.

mod checkpoints;

use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use dflash_data::Sample;
use dflash_dist::Single;
use dflash_hidden::Counters;
use dflash_model::checkpoint::TensorFile;
use dflash_model::draft::Draft;
use dflash_run::{Acceptance, Line, ValidationLine};
use dflash_settings::{CheckpointSettings, Dtype, TrainSettings};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::config::TrainConfig;
use crate::fake::{Beside, MemoryRows, World};
use crate::rows::{Samples, StreamedRows, TargetSamples};
use crate::validation::{Served, Share};
use crate::{Error, Outcome, Prepared};

/// `config` with other settings.
fn with(mut config: TrainConfig, change: impl FnOnce(&mut TrainSettings)) -> TrainConfig {
    change(&mut config.settings);
    config
}

fn validated(config: TrainConfig, every: u64, measures: bool) -> TrainConfig {
    with(config, |settings| {
        settings.validation.eval_every = Some(every);
        settings.validation.validation_ratio = 0.25;
        settings.validation.eval_prompts = measures.then(|| "prompts".into());
    })
}

fn resumed(config: &TrainConfig) -> TrainConfig {
    with(config.clone(), |settings| settings.resume = true)
}

fn refused(result: Result<Outcome, Error>) -> String {
    let error = result.expect_err("the run fails");
    let source = std::error::Error::source(&error).map(|source| format!(": {source}"));
    format!("{error}{}", source.unwrap_or_default())
}

/// Rank 0 of a lone run that notes what the launcher would hear.
fn alone() -> Beside {
    Beside::default()
}

fn load(checkpoint: &Path) -> Draft {
    Draft::load(checkpoint, Device::Cpu, Kind::Float).unwrap()
}

/// A part of the stored state, flat.
fn stored(checkpoint: &Path, name: &str) -> Tensor {
    let file = TensorFile::open(&checkpoint.join("trainer/state.safetensors")).unwrap();
    file.any_tensor(name).unwrap()
}

#[test]
fn equal_seeds_give_equal_bytes_from_memory_and_from_files() {
    let world = World::new();
    let first = world.train(&world.config("first")).unwrap();
    let second = world.train(&world.config("second")).unwrap();
    assert!(first.completed);
    assert_eq!(World::state(&first.checkpoint), World::state(&second.checkpoint));
    world.store_states();
    let config = world.config("third");
    let streamed = Prepared::open(&config).unwrap().streamed_rows();
    let third = world.train_on(&config, &streamed, &Single, None).unwrap();
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
    world.store_states();
    let config =
        with(world.config("out"), |settings| settings.rows.gradient_accumulation_steps = 2);
    let whole =
        world.train(&with(config.clone(), |settings| settings.save_path = world.path("whole")));
    let streamed = Prepared::open(&config).unwrap().streamed_rows();
    let samples = Arc::new(FailsOnce { samples: world.samples(), reads: Mutex::new(0), at: 27 });
    let source = StreamedRows { samples: samples.clone(), ..streamed.clone() };
    let error = refused(world.train_on(&config, &source, &Single, None));
    assert!(error.contains("cannot read sample "), "{error}");
    assert!(error.contains("data-00000-of-00001.arrow"), "{error}");
    assert_eq!(*samples.reads.lock().unwrap(), 27, "it goes on after the error");
    // what was trained before is kept, and goes on as if nothing had happened
    let kept = world.saved("out");
    assert_eq!(kept, [world.losses("out").last().unwrap().0]);
    let on = world.train_on(&resumed(&config), &streamed, &Single, None).unwrap();
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
    world.store_states();
    let config = world.config("out");
    let streamed = Prepared::open(&config).unwrap().streamed_rows();
    let counted = Arc::new(Counted(world.samples(), Mutex::default()));
    let source = StreamedRows { samples: counted.clone(), ..streamed };
    world.train_on(&config, &source, &Single, None).unwrap();
    let mut read = std::mem::take(&mut *counted.1.lock().unwrap());
    read.sort_unstable();
    let twice: Vec<u32> = (0..World::SAMPLES as u32).flat_map(|sample| [sample; 2]).collect();
    assert_eq!(read, twice, "two epochs");
}

#[test]
fn a_token_that_the_target_does_not_have_is_named() {
    let world = World::new();
    world.store_states();
    let config = world.config("out");
    let samples = TargetSamples { embedding_rows: 20, ..world.samples() };
    let streamed = Prepared::open(&config).unwrap().streamed_rows();
    let source = StreamedRows { samples: Arc::new(samples), ..streamed };
    let error = refused(world.train_on(&config, &source, &Single, None));
    assert!(error.contains("but the target's embedding has 20 rows"), "{error}");
}

#[test]
fn so_many_bad_steps_in_a_row_end_the_run_saved_and_for_good() {
    let mut world = World::new();
    (0..World::SAMPLES).for_each(|sample| world.spoil(sample));
    let config = with(world.config("out"), |settings| settings.optimizer.max_bad_steps = 3);
    let launcher = alone();
    let error = refused(world.train_on(&config, &world.rows(), &launcher, None));
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
    let mut world = World::new();
    world.spoil(5);
    let config = with(world.config("out"), |settings| settings.log_every = 1000);
    world.train(&config).unwrap();
    let lines = world.lines("out", "metrics.jsonl");
    assert_eq!((lines.len(), &lines[0]["bad_steps"]), (1, &json!(2)));
    let loss = lines[0]["loss"].as_f64().unwrap();
    assert!(loss > 0.0 && loss < 5.0, "{loss}");
}

#[test]
fn states_that_go_missing_end_the_run_with_all_that_was_trained() {
    let world = World::new();
    let config = |save: &str| {
        with(world.config(save), |settings| settings.rows.gradient_accumulation_steps = 2)
    };
    world.train(&config("whole")).unwrap();
    for missing in [17, 3] {
        let name = missing.to_string();
        let rows = MemoryRows { missing: Some(missing), ..world.rows() };
        let error = refused(world.train_on(&config(&name), &rows, &Single, None));
        assert!(error.contains(&format!("hidden states for sample {missing} ")), "{error}");
        let trained = world.losses(&name).last().map(|(step, _)| *step);
        assert_eq!(world.saved(&name), trained.into_iter().collect::<Vec<_>>());
        world.train(&with(config(&name), |settings| settings.resume = trained.is_some())).unwrap();
        assert_eq!(world.losses(&name), world.losses("whole"));
    }
}

#[test]
fn another_rank_s_fault_ends_the_run_saved_and_without_an_error() {
    let world = World::new();
    let config = world.config("out");
    let beside = Beside { fails_at: Some(4), ..Beside::default() };
    let outcome = world.train_on(&config, &world.rows(), &beside, None).unwrap();
    assert_eq!((outcome.step, outcome.completed), (3, false), "the fourth step is void");
    assert_eq!(world.saved("out"), [3]);
    world.train(&resumed(&config)).unwrap();
    world.train(&world.config("whole")).unwrap();
    assert_eq!(world.losses("out"), world.losses("whole"));
}

#[test]
fn a_fault_in_a_validation_saves_what_was_trained() {
    let world = World::new();
    let config = validated(world.config("out"), 2, false);
    // the last sample is held out
    let last = World::SAMPLES as u32 - 1;
    let rows = MemoryRows { missing: Some(last), ..world.rows() };
    let error = refused(world.train_on(&config, &rows, &Single, None));
    assert!(error.contains(&format!("for sample {last} ")), "{error}");
    assert_eq!(world.saved("out"), [2]);
}

#[test]
fn a_stop_while_waiting_for_rows_keeps_the_steps_before_it() {
    let world = World::new();
    let config = world.config("out");
    let rows = MemoryRows { interrupted_after: Some(3), ..world.rows() };
    let outcome = world.train_on(&config, &rows, &Single, None).unwrap();
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
    let outcome = world.train(&config).unwrap();
    assert_eq!((outcome.step, outcome.completed), (1, false));
    assert_eq!(world.saved("out"), [1]);
}

#[test]
fn samples_without_states_are_left_out_of_their_rows_and_counted() {
    let world = World::new();
    let config = world.config("out");
    let left_out = [2, 11, 12].into();
    let rows = MemoryRows { left_out, ..world.rows() };
    world.train_on(&config, &rows, &Single, None).unwrap();
    let lines = world.lines("out", "metrics.jsonl");
    let last = lines.last().unwrap();
    assert_eq!(last["skipped_samples"], 2 * 3, "in each epoch");
    world.train(&world.config("whole")).unwrap();
    assert_ne!(world.losses("out"), world.losses("whole"));
}

#[test]
fn metrics_have_what_the_streams_of_all_ranks_counted() {
    let world = World::new();
    let config = world.config("out");
    let counted = Counters { retries: 1, busy: 2, stale: 3, ..Counters::default() };
    let two = Beside { alike: 1, ..Beside::default() };
    let rows = MemoryRows { counted, ..world.rows() };
    world.train_on(&config, &rows, &two, None).unwrap();
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
    let launcher = alone();
    let error = refused(world.train_on(&world.config("out"), &world.rows(), &launcher, None));
    assert!(error.contains("had nothing to learn from"), "{error}");
    assert_eq!(launcher.permanent.load(Relaxed), 1);
    let line = world.lines("out", "metrics.jsonl").remove(0);
    for key in ["loss", "accuracy", "expected_acceptance_length"] {
        assert!(line[key].is_null(), "{line}");
    }
}

#[test]
fn a_step_without_anything_to_learn_moves_nothing() {
    // a row of one sample each, and of these only every fourth has anything to learn
    let world = World::with_mask(|sample, t| sample % 4 == 0 && t >= 3);
    let config = |save: &str| {
        with(world.config(save), |settings| {
            settings.rows.total_seq_len = 20;
            settings.checkpoints.save_every = Some(1);
            settings.optimizer.weight_decay = 0.1;
            settings.optimizer.norm_weight_decay = 0.1;
        })
    };
    let whole = world.train(&config("whole")).unwrap();
    let masters = |save: &str, step: u64| {
        stored(&world.path(save).join(format!("step-{step:06}")), "masters")
    };
    let lines = world.lines("whole", "metrics.jsonl");
    let mut empty = 0;
    for pair in lines.windows(2) {
        let step = pair[1]["step"].as_u64().unwrap();
        let moved = !masters("whole", step - 1).equal(&masters("whole", step));
        assert_eq!(moved, !pair[1]["loss"].is_null(), "step {step}");
        empty += u64::from(!moved);
    }
    assert!(empty > 5, "{empty}");
    assert_eq!(lines.last().unwrap()["bad_steps"], 0);
    // the optimizer has counted the steps that moved something, and a resumed run knows
    let last = world.saved("whole").pop().unwrap();
    for step in world.saved("whole").into_iter().filter(|step| *step < last / 2) {
        let (from, to) = (world.path("whole"), world.path("part"));
        let name = format!("step-{step:06}");
        let _ = std::fs::remove_dir_all(&to);
        std::fs::create_dir_all(to.join(&name).join("trainer")).unwrap();
        for file in ["config.json", "model.safetensors", "trainer/state.json"] {
            std::fs::copy(from.join(&name).join(file), to.join(&name).join(file)).unwrap();
        }
        let state = "trainer/state.safetensors";
        std::fs::copy(from.join(&name).join(state), to.join(&name).join(state)).unwrap();
        let on = world.train(&resumed(&config("part"))).unwrap();
        assert_eq!(World::state(&on.checkpoint), World::state(&whole.checkpoint), "{step}");
    }
}

#[test]
fn all_ranks_clip_by_the_norm_of_rank_0() {
    let world = World::new();
    let one = |save: &str| with(world.config(save), |settings| settings.rows.max_steps = Some(1));
    let own = world.train(&one("own")).unwrap();
    let norm = world.lines("own", "metrics.jsonl")[0]["gradient_norm"].as_f64().unwrap();
    let told = |save: &str, norm: f64| {
        let rank_0 = Beside { broadcasts: Some(norm), ..Beside::default() };
        world.train_on(&one(save), &world.rows(), &rank_0, None).unwrap().checkpoint
    };
    assert_eq!(World::state(&told("same", norm)), World::state(&own.checkpoint));
    let other = told("other", 100.0 * norm);
    assert_eq!(world.lines("other", "metrics.jsonl")[0]["gradient_norm"], 100.0 * norm);
    let mean = |checkpoint: &Path| stored(checkpoint, "mean").abs().max().double_value(&[]);
    assert!(mean(&other) < 0.02 * mean(&own.checkpoint), "clipped by the other norm");
    let none = told("none", f64::NAN);
    assert_eq!(world.lines("none", "metrics.jsonl")[0]["bad_steps"], 1);
    assert_eq!(mean(&none), 0.0);
}

#[test]
fn metrics_tell_arithmetic_waiting_and_memory() {
    let world = World::new();
    world.train(&with(world.config("out"), |settings| settings.peak_tflops = Some(0.5))).unwrap();
    for line in world.lines("out", "metrics.jsonl") {
        let number = |key: &str| line[key].as_f64().unwrap_or_else(|| panic!("{key} in {line}"));
        assert!(number("tflops") > 0.0);
        assert!((number("mfu") - number("tflops") / 0.5).abs() < 1e-12);
        let share = number("data_wait_s") / number("interval_s");
        assert!((number("data_wait_share") - share).abs() < 1e-9);
        assert!(number("peak_memory_mib") > 50.0 && number("peak_memory_mib") < 4000.0);
    }
}

#[test]
fn windows_of_any_length_train() {
    let world = World::new();
    let mut seen = Vec::new();
    for window in [None, Some(1), Some(2), Some(5), Some(11)] {
        let save = format!("{window:?}");
        let mut config = with(world.config(&save), |settings| settings.rows.max_steps = Some(4));
        config.draft.sliding_window = window;
        world.train(&config).unwrap();
        let losses = world.losses(&save);
        assert!(!seen.contains(&losses), "a window of {window:?} changes nothing");
        seen.push(losses);
    }
}

#[test]
fn recomputing_activations_changes_no_bit() {
    let world = World::new();
    let kept = world.train(&world.config("kept")).unwrap();
    let again = with(world.config("again"), |settings| settings.compute.recompute = true);
    let again = world.train(&again).unwrap();
    assert_eq!(World::state(&kept.checkpoint), World::state(&again.checkpoint));
}

#[test]
fn bfloat16_keeps_float32_masters_and_close_losses() {
    let world = World::new();
    let compute =
        |save, kind| with(world.config(save), |settings| settings.compute.compute_dtype = kind);
    let narrow = world.train(&compute("narrow", Dtype::Bfloat16)).unwrap();
    world.train(&compute("wide", Dtype::Float32)).unwrap();
    let (narrow_losses, wide_losses) = (world.losses("narrow"), world.losses("wide"));
    assert_eq!(narrow_losses.len(), wide_losses.len());
    for ((step, narrow), (_, wide)) in narrow_losses.iter().zip(&wide_losses) {
        // numbers of 8 bits
        assert!((narrow - wide).abs() <= 0.02 * wide, "step {step}: {narrow} and {wide}");
    }
    assert_ne!(narrow_losses, wide_losses);
    let masters = stored(&narrow.checkpoint, "masters");
    assert_eq!(masters.kind(), Kind::Float);
    let rounded = masters.to_kind(Kind::BFloat16).to_kind(Kind::Float);
    assert!(!masters.equal(&rounded), "masters were rounded");
}

#[test]
fn averaged_weights_are_what_is_served_and_it_is_said() {
    let world = World::new();
    let mut config = world.config("run");
    config.settings.optimizer.ema_decay = Some(0.8);
    let checkpoint = world.train(&config).unwrap().checkpoint;
    let (average, masters) = (stored(&checkpoint, "average"), stored(&checkpoint, "masters"));
    let rounded = average.to_kind(Kind::BFloat16).to_kind(Kind::Float);
    assert!(load(&checkpoint).flat().equal(&rounded));
    assert!((average - masters).abs().max().double_value(&[]) > 1e-3);
    let state = std::fs::read_to_string(checkpoint.join("trainer/state.json")).unwrap();
    assert!(state.contains(r#""served_weights": "averaged""#), "{state}");
    assert_eq!(world.lines("run", "metrics.jsonl")[0]["ema_decay"], 0.8);
}

#[test]
fn validation_does_not_change_what_is_trained() {
    let world = World::new();
    // the hold-out itself changes the data, so it is the same in both
    world.train(&validated(world.config("plain"), 1000, false)).unwrap();
    let config = validated(world.config("measured"), 1, true);
    world.train_on(&config, &world.rows(), &Single, Some(&mut probe)).unwrap();
    assert_eq!(world.losses("plain"), world.losses("measured"));
}

/// Says that acceptance follows from the weights, which it does.
#[allow(clippy::unnecessary_wraps, reason = "a probe may fail")]
fn probe((draft, _): Served<'_>, share: Share) -> Result<Option<Acceptance>, crate::ProbeError> {
    assert_eq!(share, Share { rank: 0, ranks: 1 });
    let digest = draft.flat().abs().sum(Kind::Double).double_value(&[]) as u64;
    let reached = vec![100, digest % 101, digest % 13, 0];
    Ok(Some(Acceptance { reached, responses: 2, length_sum: 3.0 }))
}

#[test]
fn a_validation_that_was_cut_short_is_made_up_for() {
    let world = World::new();
    let config = validated(world.config("out"), 3, true);
    let train = |config: &TrainConfig| {
        world.train_on(config, &world.rows(), &Single, Some(&mut probe)).unwrap()
    };
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
    let mut stopped = |_: Served<'_>, _: Share| Ok(None);
    let outcome = world.train_on(&config, &world.rows(), &Single, Some(&mut stopped)).unwrap();
    assert_eq!((outcome.step, outcome.completed), (2, false));
    assert!(!world.path("stopped").join(ValidationLine::FILE).exists());
    let config = validated(world.config("failed"), 2, true);
    let mut failing = |_: Served<'_>, _: Share| Err("no room".into());
    let error = refused(world.train_on(&config, &world.rows(), &Single, Some(&mut failing)));
    assert!(error.contains("rank 0 cannot measure acceptance: no room"), "{error}");
    assert_eq!(world.saved("failed"), [2]);
}
