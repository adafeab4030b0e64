//! Whole runs: what they train, write and refuse.

mod checkpoints;
mod validation;
mod world;

use std::path::Path;

use dflash_data::{DatasetWriter, Sample, WriterOptions};
use dflash_draft::Draft;
use dflash_run::Checkpoint;
use dflash_settings::{Dtype, OnMissing, ResumeMode};
use dflash_tensor::checkpoint::TensorFile;
use tch::{Device, Kind, Tensor};

use world::{Saved, World, refused, resumed, with};

fn load(checkpoint: &Path) -> Draft {
    Draft::load(checkpoint, Device::Cpu, Kind::Float).unwrap()
}

/// A flat tensor of the stored state.
fn stored(checkpoint: &Path, name: &str) -> Tensor {
    let file = TensorFile::open(&checkpoint.join(Checkpoint::TENSORS)).unwrap();
    file.any_tensor(name).unwrap()
}

#[test]
fn a_token_that_the_target_does_not_have_is_named() {
    let world = World::new();
    let data = world.path("data");
    std::fs::remove_dir_all(&data).unwrap();
    let mut writer = DatasetWriter::create(&data, WriterOptions::default()).unwrap();
    writer.push(&Sample { input_ids: vec![1, 2, 64, 3], loss_mask: vec![true; 4] }).unwrap();
    writer.finish().unwrap();
    let error = refused(world.train(&world.config("out")));
    assert!(
        error.contains("sample 0 has token 64, but the target's embedding has 64 rows"),
        "{error}"
    );
}

/// A document's first token as anchor sees no context, and here it is the only anchor: neither the
/// missing context's offset nor the draft's pass over no context rows may fail.
#[test]
fn a_document_whose_only_anchor_is_its_first_token_trains() {
    let world = World::new();
    let data = world.path("data");
    std::fs::remove_dir_all(&data).unwrap();
    let mut writer = DatasetWriter::create(&data, WriterOptions::default()).unwrap();
    let config = dflash_target::TargetConfig::qwen3(World::HIDDEN, 2, World::VOCABULARY);
    let target = dflash_target::Target::random(config, 1, Device::Cpu);
    let input_ids = vec![1, 2];
    world.files.write(0, &input_ids, &World::aux_states(&target, &input_ids)).unwrap();
    writer.push(&Sample { input_ids, loss_mask: vec![true; 2] }).unwrap();
    writer.finish().unwrap();
    for anchors in [1, 8] {
        let config = with(world.config(&format!("out-{anchors}")), |settings| {
            settings.rows.anchors_per_sequence = anchors;
        });
        let outcome = world.train(&config).unwrap();
        assert_eq!((outcome.completed, outcome.step), (true, 2));
        assert!(load(&outcome.saved()).flat().isfinite().all().int64_value(&[]) == 1);
    }
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
        let file = world.files.path(missing);
        std::fs::rename(&file, world.path("aside")).unwrap();
        let error = refused(world.train(&config(&name)));
        std::fs::rename(world.path("aside"), &file).unwrap();
        assert!(error.contains(&format!("hidden states for sample {missing} ")), "{error}");
        let trained = world.losses(&name).last().map(|(step, _)| *step);
        assert_eq!(world.saved(&name), trained.into_iter().collect::<Vec<_>>());
        world
            .train(&with(config(&name), |settings| {
                settings.resume = trained.is_some().then_some(ResumeMode::Latest)
            }))
            .unwrap();
        assert_eq!(world.losses(&name), world.losses("whole"));
    }
}

#[test]
fn samples_without_states_are_left_out_of_their_rows_and_counted() {
    let world = World::new();
    world.train(&world.config("whole")).unwrap();
    for sample in [2, 11, 12] {
        std::fs::remove_file(world.files.path(sample)).unwrap();
    }
    let config =
        with(world.config("out"), |settings| settings.hidden_states.on_missing = OnMissing::Skip);
    world.train(&config).unwrap();
    let lines = world.lines("out", "metrics.jsonl");
    let last = lines.last().unwrap();
    assert_eq!(last["skipped_samples"], 2 * 3, "in each epoch");
    assert_ne!(world.losses("out"), world.losses("whole"));
}

#[test]
fn a_step_without_anything_to_learn_moves_nothing() {
    // one sample per row, of which only every fourth has supervised tokens
    let world = World::with_mask(|sample, t| sample % 4 == 0 && t >= 3);
    let config = |save: &str| {
        with(world.config(save), |settings| {
            settings.rows.total_seq_len = Some(20);
            settings.checkpoints.save_every = Some(1);
            settings.optimizer.weight_decay = 0.1;
            settings.optimizer.norm_weight_decay = 0.1;
        })
    };
    let whole = world.train(&config("whole")).unwrap();
    let master_weights = |save: &str, step: u64| {
        stored(&world.path(save).join(format!("step-{step:06}")), "masters")
    };
    let lines = world.lines("whole", "metrics.jsonl");
    let mut empty = 0;
    // An untrained state is not saved.
    let first = world.saved("whole")[0];
    let untrained = lines.iter().take_while(|line| line["loss"].is_null()).count();
    assert_eq!(first, untrained as u64 + 1);
    for pair in lines.windows(2) {
        let step = pair[1]["step"].as_u64().unwrap();
        if step <= first {
            empty += u64::from(pair[1]["loss"].is_null());
            continue;
        }
        let moved = !master_weights("whole", step - 1).equal(&master_weights("whole", step));
        assert_eq!(moved, !pair[1]["loss"].is_null(), "step {step}");
        empty += u64::from(!moved);
    }
    assert!(empty > 5, "{empty}");
    assert_eq!(lines.last().unwrap()["bad_steps"], 0);
    // the optimizer counts the effective steps, and a resumed run knows their number
    let last = world.saved("whole").pop().unwrap();
    for step in world.saved("whole").into_iter().filter(|step| *step < last / 2) {
        let (from, to) = (world.path("whole"), world.path("part"));
        let name = format!("step-{step:06}");
        let _ = std::fs::remove_dir_all(&to);
        std::fs::create_dir_all(to.join(&name).join("trainer")).unwrap();
        for file in ["config.json", "model.safetensors", Checkpoint::STATE, Checkpoint::TENSORS] {
            std::fs::copy(from.join(&name).join(file), to.join(&name).join(file)).unwrap();
        }
        let on = world.train(&resumed(&config("part"))).unwrap();
        assert_eq!(World::state(&on.saved()), World::state(&whole.saved()), "{step}");
    }
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
    assert_eq!(World::state(&kept.saved()), World::state(&again.saved()));
}

#[test]
fn bfloat16_keeps_float32_master_weights_and_close_losses() {
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
    let master_weights = stored(&narrow.saved(), "masters");
    assert_eq!(master_weights.kind(), Kind::Float);
    let rounded = master_weights.to_kind(Kind::BFloat16).to_kind(Kind::Float);
    assert!(!master_weights.equal(&rounded), "master weights were rounded");
}

#[test]
fn averaged_weights_are_what_is_served_and_it_is_said() {
    let world = World::new();
    let mut config = world.config("run");
    config.settings.optimizer.ema_decay = Some(0.8);
    let checkpoint = world.train(&config).unwrap().saved();
    let (average, master_weights) =
        (stored(&checkpoint, "average"), stored(&checkpoint, "masters"));
    let rounded = average.to_kind(Kind::BFloat16).to_kind(Kind::Float);
    assert!(load(&checkpoint).flat().equal(&rounded));
    assert!((average - master_weights).abs().max().double_value(&[]) > 1e-3);
    let state = std::fs::read_to_string(checkpoint.join("trainer/state.json")).unwrap();
    assert!(state.contains(r#""served_weights": "averaged""#), "{state}");
    assert_eq!(world.lines("run", "metrics.jsonl")[0]["ema_decay"], 0.8);
}
