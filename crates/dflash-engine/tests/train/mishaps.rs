//! What goes wrong in the middle of a run: numbers that overflow, states that are missing, checkpoints
//! that are damaged, validations that were cut short.

use std::path::Path;

use crate::world::{Run, World, losses, sorted_checkpoints};

/// Samples of the world.
const SAMPLES: u64 = 24;

fn fail(run: &Run, expected: &str) {
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert!(run.stderr.contains(expected), "{expected}: {}", run.stderr);
    assert!(!run.stderr.contains("panicked"), "{}", run.stderr);
}

#[test]
fn so_many_bad_steps_in_a_row_end_the_run_saved_and_for_good() {
    let world = World::new();
    (0..SAMPLES).for_each(|sample| world.spoil(sample));
    let bounded = ["--max-bad-steps", "3", "--nproc", "2", "--max-restarts", "2"];
    let run = world.train("out", &[&bounded[..], &["--gradient-accumulation-steps", "1"]].concat());
    fail(&run, "3 steps in a row is not finite (last: step 3)");
    assert!(!run.stderr.contains("starting all ranks again"), "{}", run.stderr);
    let steps: Vec<_> = world.lines("out", "metrics.jsonl");
    assert_eq!(steps.len(), 3);
    assert_eq!(steps[2]["bad_steps"], 3);
    assert!(steps[2]["loss"].is_null());
    assert_eq!(sorted_checkpoints(&world.path("out")), ["step-000003"]);
    // the count goes on where it stood
    let again = world.train("out", &[&bounded[..], &["--resume"]].concat());
    fail(&again, "4 steps in a row is not finite (last: step 4)");
    let none = world.train("none", &["--max-bad-steps", "0"]);
    assert!(!none.success() && none.stderr.contains("--max-bad-steps"), "{}", none.stderr);
}

#[test]
fn a_skipped_step_has_no_share_in_the_figures() {
    let world = World::new();
    world.spoil(5);
    let run = world.train("out", &["--log-every", "1000"]);
    assert!(run.success(), "{}", run.stderr);
    let lines = world.lines("out", "metrics.jsonl");
    assert_eq!((lines.len(), &lines[0]["bad_steps"]), (1, &serde_json::json!(2)));
    let loss = lines[0]["loss"].as_f64().unwrap();
    assert!(loss > 0.0 && loss < 5.0, "{loss}");
}

#[test]
fn states_that_go_missing_end_the_run_with_all_that_was_trained() {
    let world = World::new();
    let whole = world.train("whole", &["--nproc", "2"]);
    assert!(whole.success(), "{}", whole.stderr);
    let missing = world.stored(17);
    let aside = world.path("aside");
    for ranks in ["1", "2"] {
        std::fs::rename(&missing, &aside).unwrap();
        let rows = if ranks == "1" { "2" } else { "1" };
        let more = ["--nproc", ranks, "--gradient-accumulation-steps", rows];
        let run = world.train(ranks, &more);
        fail(&run, "no stored hidden states for sample 17");
        std::fs::rename(&aside, &missing).unwrap();
        let saved = sorted_checkpoints(&world.path(ranks));
        let trained = losses(&world.path(ranks)).last().map_or(0, |(step, _)| *step);
        let expected = (trained > 0).then(|| format!("step-{trained:06}"));
        assert_eq!(saved, expected.into_iter().collect::<Vec<_>>());
        let resumed = world.train(ranks, &[&more[..], &["--resume"]].concat());
        assert!(resumed.success(), "{}", resumed.stderr);
        super::assert_same_losses(&losses(&world.path("whole")), &losses(&world.path(ranks)));
    }
}

#[test]
fn broken_states_are_told_from_absent_ones() {
    let world = World::new();
    std::fs::write(world.stored(3), "no tensors").unwrap();
    let run = world.train("out", &[]);
    fail(&run, "no stored hidden states for sample 3");
    assert!(run.stderr.contains("hs_3.safetensors"), "{}", run.stderr);
    let nowhere = world.train("out", &["--hidden-states-path", "", "--on-missing", "skip"]);
    assert!(!nowhere.success(), "{}", nowhere.stderr);
}

#[test]
fn a_run_without_anything_to_learn_is_no_success() {
    // one supervised token a sample: no anchor has a token to predict
    let world = World::with_mask(|_, t| t == 5);
    let run = world.train("out", &[]);
    fail(&run, "had nothing to learn from");
    let line = world.lines("out", "metrics.jsonl").remove(0);
    for key in ["loss", "accuracy", "expected_acceptance_length"] {
        assert!(line[key].is_null(), "{line}");
    }
}

#[test]
fn damaged_checkpoints_are_named_and_the_one_before_goes_on() {
    let world = World::new();
    let train = |more: &[&str]| world.train("out", &[&["--save-every", "3"], more].concat());
    let whole = train(&[]);
    assert!(whole.success(), "{}", whole.stderr);
    let checkpoints = sorted_checkpoints(&world.path("out"));
    let last = world.path("out").join(checkpoints.last().unwrap());
    let before = &checkpoints[checkpoints.len() - 2];
    let expected = losses(&world.path("out"));
    let check = |file: &str, damage: fn(&Path)| {
        let (path, aside) = (last.join(file), world.path("aside"));
        std::fs::copy(&path, &aside).unwrap();
        damage(&path);
        let run = train(&["--resume"]);
        fail(&run, "which is damaged; remove it to go on from step ");
        let step = before.trim_start_matches("step-").trim_start_matches('0');
        assert!(run.stderr.contains(&format!("from step {step}")), "{}", run.stderr);
        assert!(run.stderr.contains(last.to_str().unwrap()), "{}", run.stderr);
        std::fs::copy(&aside, &path).unwrap();
    };
    check("trainer/state.safetensors", |path| {
        let mut bytes = std::fs::read(path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(path, bytes).unwrap();
    });
    check("trainer/state.safetensors", |path| {
        let file = std::fs::File::options().write(true).open(path).unwrap();
        file.set_len(1000).unwrap();
    });
    check("trainer/state.safetensors", |path| std::fs::write(path, "").unwrap());
    check("trainer/state.json", |path| std::fs::write(path, "{").unwrap());
    check("trainer/state.json", |path| {
        let state = std::fs::read_to_string(path).unwrap();
        std::fs::write(path, state.replacen("\"step\": ", "\"step\": 1", 1)).unwrap();
    });
    check("trainer/state.json", |path| std::fs::remove_file(path).unwrap());
    check("config.json", |path| std::fs::write(path, "{}").unwrap());
    check("config.json", |path| std::fs::remove_file(path).unwrap());
    std::fs::remove_dir_all(&last).unwrap();
    let resumed = train(&["--resume"]);
    assert!(resumed.success(), "{}", resumed.stderr);
    assert_eq!(losses(&world.path("out")), expected);
}

#[test]
fn another_draft_is_refused_by_the_flag_that_differs() {
    let world = World::new();
    let run = world.train("out", &[]);
    assert!(run.success(), "{}", run.stderr);
    let check = |flag: &str, value: &str, expected: &str| {
        let run = world.train("out", &["--resume", flag, value]);
        fail(&run, &format!("trained with {flag} {expected}"));
    };
    check("--num-layers", "1", "2, this run asks for 1");
    check("--block-size", "8", "4, this run asks for 8");
    check("--target-layer-ids", "0,2", "[1, 2], this run asks for [0, 2]");
    check("--sliding-window", "5", "off, this run asks for 5");
    check("--draft-vocab-size", "40", "off, this run asks for 40");
}

#[test]
fn a_mask_token_that_text_can_spell_is_refused() {
    let world = World::new();
    let run = world.train("out", &["--mask-token-id", "17"]);
    fail(&run, "--mask-token-id 17 is \"w17\", which occurs in text");
    assert!(!world.path("out").exists());
}

#[test]
fn a_validation_that_was_cut_short_is_made_up_for() {
    let world = World::new();
    let prompts = world.prompts("prompts.jsonl");
    let validated = ["--validation-ratio", "0.2", "--eval-every", "3", "--eval-prompts", &prompts];
    let run = world.train("out", &validated);
    assert!(run.success(), "{}", run.stderr);
    let figures = || -> Vec<serde_json::Value> {
        let mut lines = world.lines("out", "validation.jsonl");
        lines.iter_mut().for_each(|line| line["seconds"] = 0.into());
        lines
    };
    let all = figures();
    let path = world.path("out").join("validation.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    let cut = text.trim_end().rfind('\n').unwrap();
    std::fs::write(&path, &text[..cut + 9]).unwrap();
    let resumed = world.train("out", &[&validated[..], &["--resume"]].concat());
    assert!(resumed.success(), "{}", resumed.stderr);
    assert_eq!(figures(), all);
    let again = world.train("out", &[&validated[..], &["--resume"]].concat());
    assert!(again.success() && !again.stderr.contains("validation loss"), "{}", again.stderr);
    assert_eq!(figures(), all);
}

#[test]
fn prompts_that_cannot_be_used_are_found_before_the_first_step() {
    let world = World::new();
    let empty = world.path("empty.jsonl");
    std::fs::write(&empty, "").unwrap();
    let prompts = ["--eval-every", "1000", "--eval-prompts", empty.to_str().unwrap()];
    let run = world.train("out", &prompts);
    fail(&run, "empty.jsonl holds no prompt");
    assert!(!world.path("out").exists());
}

#[test]
fn weights_that_are_no_numbers_are_no_start() {
    let world = World::new();
    let first = world.train("first", &["--max-steps", "1"]);
    assert!(first.success(), "{}", first.stderr);
    let dir = Path::new(first.stdout.trim());
    let draft = dflash_model::draft::Draft::load(dir, tch::Device::Cpu, tch::Kind::Float).unwrap();
    let _ = draft.flat().narrow(0, 7, 1).fill_(f64::NAN);
    draft.save(dir).unwrap();
    std::fs::remove_dir_all(dir.join("trainer")).unwrap();
    let run = world.train("second", &["--from-pretrained", first.stdout.trim()]);
    fail(&run, "fc.weight holds values that are not finite");
}

#[test]
fn a_value_that_is_refused_is_traced_to_its_line() {
    let world = World::new();
    let file = world.run_file("out", &["--lr", "0.01"]);
    let text = std::fs::read_to_string(&file).unwrap();
    let line = 1 + text.lines().position(|line| line == "lr = 0.01").unwrap();
    std::fs::write(&file, text.replace("lr = 0.01", "lr = -0.01")).unwrap();
    let run = world.engine(&["train", &file]);
    fail(&run, &format!("error: {file}:{line}: --lr is -0.01, but"));
    let set = world.engine(&["train", &file, "--set", "train.lr=1e-3", "--set", "gamma=0"]);
    fail(&set, "error: --set: --gamma is 0, but");
    let typed = world.engine(&["train", &file, "--lr", "-2"]);
    fail(&typed, "error: --lr is -2, but");
}
