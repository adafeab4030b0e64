//! Failures that show only with real processes: several ranks, stored states, flags. The library's
//! tests cover the rest with rows in memory.

use crate::world::{Run, World, losses, sorted_checkpoints};

fn fail(run: &Run, expected: &str) {
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert!(run.stderr.contains(expected), "{expected}: {}", run.stderr);
    assert!(!run.stderr.contains("panicked"), "{}", run.stderr);
}

#[test]
fn states_that_go_missing_on_one_rank_end_the_run_with_all_that_was_trained() {
    let world = World::new();
    let two = ["--nproc", "2"];
    let whole = world.train("whole", &two);
    assert!(whole.success(), "{}", whole.stderr);
    let (missing, aside) = (world.stored(17), world.path("aside"));
    std::fs::rename(&missing, &aside).unwrap();
    fail(&world.train("part", &two), "no stored hidden states for sample 17");
    std::fs::rename(&aside, &missing).unwrap();
    let saved = sorted_checkpoints(&world.path("part"));
    let trained = losses(&world.path("part")).last().map_or(0, |(step, _)| *step);
    let expected = (trained > 0).then(|| format!("step-{trained:06}"));
    assert_eq!(saved, expected.into_iter().collect::<Vec<_>>());
    let resumed = world.train("part", &[&two[..], &["--resume-or-start"]].concat());
    assert!(resumed.success(), "{}", resumed.stderr);
    super::assert_same_losses(&losses(&world.path("whole")), &losses(&world.path("part")));
}

#[test]
fn a_run_that_diverges_is_not_started_again() {
    let world = World::new();
    (0..24).for_each(|sample| world.spoil(sample));
    let more = ["--max-bad-steps", "3", "--nproc", "2", "--max-restarts", "2"];
    let run = world.train("out", &more);
    fail(&run, "3 consecutive steps is not finite (last: step 3)");
    assert!(!run.stderr.contains("starting all ranks again"), "{}", run.stderr);
    let none = world.train("none", &["--max-bad-steps", "0"]);
    assert!(!none.success() && none.stderr.contains("--max-bad-steps"), "{}", none.stderr);
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
fn a_mask_token_that_text_can_spell_is_refused() {
    let world = World::new();
    let run = world.train("out", &["--mask-token-id", "17"]);
    fail(&run, "--mask-token-id 17 is \"w17\", which occurs in text");
    assert!(!world.path("out").exists());
}

#[test]
fn prompts_that_cannot_be_used_are_found_before_the_first_step() {
    let world = World::new();
    let empty = world.path("empty.jsonl");
    std::fs::write(&empty, "").unwrap();
    let prompts = ["--eval-every", "1000", "--eval-prompts", empty.to_str().unwrap()];
    let run = world.train("out", &prompts);
    fail(&run, "empty.jsonl has no prompt");
    assert!(!world.path("out").exists());
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
