//! `dflash train` as users run it: real processes on a small target with stored hidden states.

#[path = "../../../base/dflash-hub/tests/it/fake_hub.rs"]
mod fake_hub;

#[path = "train/alike.rs"]
mod alike;
#[path = "train/colocate.rs"]
mod colocate;
#[path = "train/divergence.rs"]
mod divergence;
#[path = "train/dry_run.rs"]
mod dry_run;
#[path = "train/ending.rs"]
mod ending;
#[path = "train/export.rs"]
mod export;
#[path = "train/families.rs"]
mod families;
#[path = "train/first_step.rs"]
mod first_step;
#[path = "train/heads.rs"]
mod heads;
#[path = "train/identity.rs"]
mod identity;
#[path = "train/limits.rs"]
mod limits;
#[path = "train/mishaps.rs"]
mod mishaps;
#[path = "train/nccl.rs"]
mod nccl;
#[path = "train/no_memory.rs"]
mod no_memory;
#[path = "train/nodes.rs"]
mod nodes;
#[path = "train/places.rs"]
mod places;
#[path = "train/preflight.rs"]
mod preflight;
#[path = "train/resume.rs"]
mod resume;
#[path = "train/running.rs"]
mod running;
#[path = "train/servers.rs"]
mod servers;
#[path = "train/soak.rs"]
mod soak;
#[path = "train/speaking.rs"]
mod speaking;
#[path = "train/state.rs"]
mod state;
#[path = "train/world.rs"]
mod world;
#[path = "train/worlds.rs"]
mod worlds;

use fake_hub::{Branch, FakeHub};
use world::{World, losses, sorted_checkpoints};

/// Relative tolerance for sums in different orders.
const ROUNDING: f64 = 1e-5;

fn assert_same_losses(a: &[(u64, f64)], b: &[(u64, f64)]) {
    assert!(!a.is_empty());
    assert_eq!(a.len(), b.len());
    for ((step, loss), (other_step, other)) in a.iter().zip(b) {
        assert_eq!(step, other_step);
        assert!((loss - other).abs() <= ROUNDING * loss.abs(), "step {step}: {loss} and {other}");
    }
}

#[test]
fn two_ranks_train_as_one_with_two_micro_batches() {
    let world = World::new();
    let two = world.train("two", &["--nproc", "2"]);
    assert!(two.success(), "{}", two.stderr);
    let one = world.train("one", &["--gradient-accumulation-steps", "2"]);
    assert!(one.success(), "{}", one.stderr);
    assert_same_losses(&losses(&world.path("two")), &losses(&world.path("one")));
}

#[test]
fn real_torchrun_starts_the_ranks() {
    let world = World::new();
    let Some(torchrun) = world::torchrun() else {
        println!("skipped: no torchrun in DFLASH_TORCHRUN or PATH");
        return;
    };
    let alone = world.train("one", &["--gradient-accumulation-steps", "2"]);
    assert!(alone.success(), "{}", alone.stderr);
    let under = world.torchrun(&torchrun, "under", 2);
    assert!(under.success(), "{}", under.stderr);
    assert_same_losses(&losses(&world.path("under")), &losses(&world.path("one")));
}

#[test]
fn a_run_file_trains_as_its_flags_do() {
    let world = World::new();
    let flags = world.train("flags", &["--nproc", "2", "--lr", "0.003"]);
    assert!(flags.success(), "{}", flags.stderr);
    let file = world.run_file("file", &["--nproc", "2", "--lr", "0.003"]);
    let run = world.engine(&["train", &file, "--set", "train.max-anchors=3072"]);
    assert!(run.success(), "{}", run.stderr);
    assert_eq!(losses(&world.path("file")), losses(&world.path("flags")));
    let last = sorted_checkpoints(&world.path("flags")).pop().unwrap();
    assert_eq!(world.state("file", &last), world.state("flags", &last));
}

#[test]
fn equal_seeds_give_equal_bytes_and_a_resumed_run_continues_exactly() {
    let world = World::new();
    for name in ["a", "b"] {
        let run = world.train(name, &["--save-every", "3"]);
        assert!(run.success(), "{}", run.stderr);
    }
    let last = sorted_checkpoints(&world.path("a")).pop().unwrap();
    assert_eq!(world.state("a", &last), world.state("b", &last));
    // leftovers of a run that was killed after its checkpoint of step 3
    for name in
        sorted_checkpoints(&world.path("b")).into_iter().filter(|name| name != "step-000003")
    {
        std::fs::remove_dir_all(world.path("b").join(name)).unwrap();
    }
    let refused = world.train("b", &["--save-every", "3"]);
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("pass --resume"), "{}", refused.stderr);
    let resumed = world.train("b", &["--save-every", "3", "--resume"]);
    assert!(resumed.success(), "{}", resumed.stderr);
    assert_eq!(world.state("a", &last), world.state("b", &last));
    assert_eq!(losses(&world.path("a")), losses(&world.path("b")));
    let text = std::fs::read_to_string(world.path("b").join("run.json")).unwrap();
    let provenance: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(provenance["resumed_at_step"], 3);
    assert_eq!(provenance["earlier_starts"][0]["resumed_at_step"], 0);
}

#[test]
fn a_run_leaves_a_draft_metrics_events_and_provenance() {
    let world = World::new();
    let run = world.train("out", &["--loss", "ce=0.5,kl", "--dpace-alpha", "0.5"]);
    assert!(run.success(), "{}", run.stderr);
    let out = world.path("out");
    let checkpoint = run.stdout.trim();
    let draft = dflash_draft::Draft::load(
        std::path::Path::new(checkpoint),
        tch::Device::Cpu,
        tch::Kind::Float,
    );
    assert_eq!(draft.unwrap().config().target_layer_ids, world::LAYER_IDS);
    let provenance = std::fs::read_to_string(out.join("run.json")).unwrap();
    assert!(provenance.contains("\"--dpace-alpha\""), "{provenance}");
    assert!(std::fs::read_dir(out.join("tensorboard")).unwrap().count() > 0);
    let recorded = losses(&out);
    assert!(recorded.last().unwrap().1 < recorded[0].1, "the loss falls: {recorded:?}");
}

#[test]
fn a_pruned_vocabulary_travels_with_the_checkpoint() {
    let world = World::new();
    let prompts = world.prompts("prompts.jsonl");
    let measured = ["--eval-every", "1000", "--eval-prompts", &prompts];
    let more = ["--eval-max-new-tokens", "24", "--draft-vocab-size", "24"];
    let run = world.train("pruned", &[measured, more].concat());
    assert!(run.success(), "{}", run.stderr);
    let dir = std::path::PathBuf::from(run.stdout.trim());
    let vocabulary = dflash_draft::objective::DraftVocabulary::load(&dir).unwrap().unwrap();
    assert_eq!(vocabulary.selected().len(), 24);
    let report = world.eval(&dir);
    assert_eq!(report["draft_vocabulary"], 24);
    assert_eq!(report["lossless"]["holds"], true);
    // The checkpoint reproduces training's last measurement with the same reduced vocabulary.
    let lines = world.lines("pruned", "validation.jsonl");
    assert_eq!(lines.last().unwrap()["acceptance_length"], report["acceptance_length"]);
    // Starting from it or resuming keeps the selection, although the data would select others.
    let load = |dir: &str| {
        dflash_draft::objective::DraftVocabulary::load(std::path::Path::new(dir)).unwrap()
    };
    let other = dflash_draft::objective::DraftVocabulary::new((0..24).collect(), 64);
    assert_ne!(other, vocabulary);
    other.save(&dir).unwrap();
    let draft = dir.to_str().unwrap();
    let warm = world.train("warm", &["--from-pretrained", draft, "--max-steps", "3"]);
    assert!(warm.success(), "{}", warm.stderr);
    assert!(warm.stderr.contains("it proposes 24 of the target's 64 tokens"), "{}", warm.stderr);
    assert_eq!(load(warm.stdout.trim()), Some(other.clone()));
    let longer = ["--max-steps", "6", "--resume", "--allow-changed", "max-steps"];
    let on = world.train("warm", &longer);
    assert!(on.success(), "{}", on.stderr);
    assert_eq!(load(on.stdout.trim()), Some(other));
    let all = ["--draft-vocab-size", "64", "--from-pretrained", draft, "--max-steps", "1"];
    let all = world.train("all", &all);
    assert_eq!(load(all.stdout.trim()), None);
}

#[test]
fn adamw_s_constants_are_settings() {
    let world = World::new();
    let train = |name: &str, more: &[&str]| {
        let run = world.train(name, &[&["--max-steps", "4"], more].concat());
        assert!(run.success(), "{}", run.stderr);
        losses(&world.path(name))
    };
    let usual = train("usual", &[]);
    let same = ["--adam-betas", "0.9,0.95", "--adam-epsilon", "1e-8"];
    assert_eq!(train("same", &same), usual);
    for (index, other) in
        [["--adam-betas", "0.5,0.95"], ["--adam-beta2", "0.999"], ["--adam-epsilon", "1"]]
            .iter()
            .enumerate()
    {
        assert_ne!(train(&format!("other-{index}"), other), usual, "{other:?}");
    }
}

#[test]
fn mistakes_are_named() {
    let world = World::new();
    let check = |arguments: &[&str], expect: &str| {
        let run = world.train("mistake", arguments);
        assert_eq!(run.code, Some(1), "{arguments:?}: {}", run.stderr);
        assert!(run.stderr.contains(expect), "{arguments:?}: {}", run.stderr);
        assert!(!run.stderr.contains("RUST_BACKTRACE"), "{}", run.stderr);
        assert!(!world.path("mistake").exists(), "{arguments:?} left something behind");
    };
    check(&["--target-layer-ids", "1", "9"], "target layer id 9 is out of range");
    check(&["--target-layer-ids", "2", "1"], "ascending");
    check(&["--mask-token-id", "60"], "mask token 60");
    check(&["--mask-token-id", "61"], "mask token 61");
    check(&["--mask-token-id", "64"], "mask token 64");
    check(&["--block-size", "1"], "--block-size is 1");
    check(&["--block-size", "5000"], "--block-size is 5000");
    check(&["--total-seq-len", "1"], "--total-seq-len is 1");
    check(&["--max-steps", "9999999999", "--epochs", "999999"], "--epochs is 999999");
    check(&["--num-layers", "0"], "--num-layers is 0");
    check(&["--draft-vocab-size", "1000"], "--draft-vocab-size is 1000");
    check(&["--lr", "0"], "--lr is 0");
    check(&["--peak-tflops=-1"], "--peak-tflops is -1");
    check(&["--from-pretrained", "./nowhere"], "no such directory");
    check(&["--muon-lr", "0.1"], "--muon-lr needs --optimizer muon");
    check(&["--optimizer", "muon", "--muon-lr", "0"], "--muon-lr is 0");
    check(&["--ema-decay", "1"], "--ema-decay is 1");
    check(&["--adam-betas", "1,0.9"], "--adam-betas is 1,0.9, but");
    check(&["--adam-betas", "0.9"], "it must be two numbers B1,B2");
    check(&["--adam-beta2", "NaN"], "--adam-betas is 0.9,NaN, but");
    check(&["--adam-epsilon", "0"], "--adam-epsilon is 0, but");
    check(&["--log-to", "none,mlflow"], "--log-to names both trackers and none");
    check(&["--run-name", ""], "--run-name is \"\", but");
    check(&["--weight-decay=-1"], "--weight-decay is -1");
    check(&["--norm-weight-decay", "NaN"], "--norm-weight-decay is NaN");
    check(&["--data-path", "/nonexistent"], "/nonexistent");
    check(&["--verifier-name-or-path", "/nonexistent"], "/nonexistent");
    let loss = world.train("mistake", &["--loss", "hinge"]);
    assert_eq!(loss.code, Some(2), "{}", loss.stderr);
    assert!(loss.stderr.contains("'hinge' for '--loss <TERMS>': the terms are ce, kl"));
    // with stored states present the server is only asked for missing ones
    let elsewhere = ["--hidden-states-path", "/nonexistent", "--on-missing", "generate"];
    let absent = ["--endpoint", "http://127.0.0.1:9", "--wait-for-server", "0"];
    check(&[&elsewhere[..], &absent].concat(), "127.0.0.1:9");
    check(&["--server-timeout", "0"], "--server-timeout is 0, but it must be at least 1");
    check(&["--wait-for-server", "99999999"], "--wait-for-server is 99999999, but");
}

#[test]
fn an_interrupt_ends_all_ranks_soon_and_the_run_can_go_on() {
    let world = World::new();
    let whole = world.train("whole", &["--nproc", "2", "--epochs", "60"]);
    assert!(whole.success(), "{}", whole.stderr);
    let took = world.interrupt("part", &["--nproc", "2", "--epochs", "60"]);
    assert!(took.as_secs_f64() < 5.0, "took {took:?}");
    let resumed = world.train("part", &["--nproc", "2", "--epochs", "60", "--resume"]);
    assert!(resumed.success(), "{}", resumed.stderr);
    assert_same_losses(&losses(&world.path("whole")), &losses(&world.path("part")));
}

#[test]
fn a_run_starts_from_another_draft_and_says_what_that_means() {
    let world = World::new();
    let first = world.train("first", &["--max-steps", "3"]);
    assert!(first.success(), "{}", first.stderr);
    let draft = first.stdout.trim();
    // one more layer and another block size; everything else is the checkpoint's
    let second = world.train(
        "second",
        &["--from-pretrained", draft, "--num-layers", "3", "--block-size", "6", "--lr", "1e-12"],
    );
    assert!(second.success(), "{}", second.stderr);
    for said in ["float32 weights", "layer 2 starts fresh", "blocks of"] {
        assert!(second.stderr.contains(said), "no '{said}' in {}", second.stderr);
    }
    let load = |dir: &str| {
        let kind = tch::Kind::Float;
        dflash_draft::Draft::load(std::path::Path::new(dir), tch::Device::Cpu, kind).unwrap()
    };
    let (before, after) = (load(draft), load(second.stdout.trim()));
    for parameter in before.layout().parameters() {
        let kept = after.layout().parameters().iter().find(|p| p.name == parameter.name).unwrap();
        let distance = (parameter.view(before.flat()) - kept.view(after.flat())).abs().max();
        assert!(distance.double_value(&[]) < 1e-6, "{}", parameter.name);
    }
}

#[test]
fn a_run_starts_from_speculators_layout() {
    let world = World::new();
    let first = world.train("first", &["--max-steps", "3"]);
    let (ours, theirs) = (std::path::PathBuf::from(first.stdout.trim()), world.path("theirs"));
    std::fs::create_dir(&theirs).unwrap();
    std::fs::copy(ours.join("model.safetensors"), theirs.join("model.safetensors")).unwrap();
    let config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(ours.join("config.json")).unwrap()).unwrap();
    // the keys that speculators 0.9 writes; auxiliary layers are counted as ours
    let converted = serde_json::json!({
        "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": world::LAYER_IDS, "block_size": config["block_size"],
        "mask_token_id": config["dflash_config"]["mask_token_id"],
        "draft_vocab_size": config["vocab_size"], "sample_from_anchor": false,
        "sliding_window_non_causal": false, "transformer_layer_config": config,
    });
    std::fs::write(theirs.join("config.json"), converted.to_string()).unwrap();
    let theirs = theirs.to_string_lossy().into_owned();
    let run = world.train("second", &["--from-pretrained", &theirs, "--lr", "1e-12"]);
    assert!(run.success(), "{}", run.stderr);
    assert!(run.stderr.contains("stored weights"), "{}", run.stderr);
    let weights = |dir: &std::path::Path| std::fs::read(dir.join("model.safetensors")).unwrap();
    assert_eq!(weights(std::path::Path::new(run.stdout.trim())), weights(&ours));
}

#[test]
fn target_and_draft_may_be_names_on_the_hub() {
    let world = World::new();
    let first = world.train("first", &["--max-steps", "3"]);
    let target = world.path("target");
    let hub = FakeHub::start(vec![
        Branch::main("models/some/target", &target),
        Branch::main("models/some/draft", std::path::Path::new(first.stdout.trim())),
    ]);
    let cache = world.path("cache").to_string_lossy().into_owned();
    let run = |save: &str, draft: &str, offline: &str| {
        let more = ["--from-pretrained", draft, "--lr", "1e-12", "--nproc", "2"];
        let mut arguments = world.arguments(save, &more);
        let named = arguments.iter_mut().find(|argument| **argument == target.to_string_lossy());
        *named.unwrap() = "some/target".into();
        let variables = [
            ("HF_HOME", cache.as_str()),
            ("HF_ENDPOINT", &hub.endpoint),
            ("HF_HUB_OFFLINE", offline),
        ];
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        world.engine_with(&arguments, &variables)
    };
    let second = run("second", "some/draft", "0");
    assert!(second.success(), "{}", second.stderr);
    assert!(second.stderr.contains("stored weights"), "{}", second.stderr);
    // The launcher makes the requests, and the ranks use what it fetched.
    let asked = hub.requests();
    for repository in ["some/target", "some/draft"] {
        let question = format!("GET /api/models/{repository}");
        assert_eq!(asked.iter().filter(|&request| *request == question).count(), 1, "{asked:?}");
    }
    let third = run("third", "some/else", "1");
    assert_eq!(third.code, Some(1));
    assert!(third.stderr.contains("the draft some/else"), "{}", third.stderr);
    assert!(third.stderr.contains("not in the local cache"), "{}", third.stderr);
}

#[test]
fn validation_measures_held_out_rows_and_prompts_and_names_the_best() {
    let world = World::new();
    let prompts = world.prompts("prompts.jsonl");
    let validation =
        ["--eval-every", "2", "--validation-ratio", "0.25", "--eval-prompts", &prompts];
    let more = ["--eval-max-new-tokens", "8", "--max-steps", "5"];
    let flags: Vec<&str> = validation.iter().chain(&more).copied().collect();
    let run = world.train("one", &flags);
    assert!(run.success(), "{}", run.stderr);
    let lines = world.lines("one", "validation.jsonl");
    let steps: Vec<u64> = lines.iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [2, 4, 5]);
    let length = |line: &serde_json::Value| line["acceptance_length"].as_f64().unwrap();
    for line in &lines {
        assert!(line["loss"].as_f64().unwrap() > 0.0, "{line}");
        assert!((1.0..=4.0).contains(&length(line)), "{line}");
    }
    let best: serde_json::Value =
        serde_json::from_slice(&std::fs::read(world.path("one").join("best.json")).unwrap())
            .unwrap();
    let highest = lines.iter().map(length).fold(0.0, f64::max);
    assert_eq!(best["acceptance_length"].as_f64(), Some(highest));
    let step = best["step"].as_u64().unwrap();
    assert!(world.path("one").join(format!("step-{step:06}")).is_dir());
    // the same figures for any number of ranks
    let both: Vec<&str> = flags.iter().copied().chain(["--nproc", "2"]).collect();
    let accumulated: Vec<&str> =
        flags.iter().copied().chain(["--gradient-accumulation-steps", "2"]).collect();
    for (name, flags) in [("two", both), ("accumulated", accumulated)] {
        let run = world.train(name, &flags);
        assert!(run.success(), "{}", run.stderr);
    }
    let (two, one) =
        (world.lines("two", "validation.jsonl"), world.lines("accumulated", "validation.jsonl"));
    assert_eq!(two.len(), one.len());
    for (a, b) in two.iter().zip(&one) {
        let (a_loss, b_loss) = (a["loss"].as_f64().unwrap(), b["loss"].as_f64().unwrap());
        assert!((a_loss - b_loss).abs() <= ROUNDING * a_loss, "{a} and {b}");
        assert_eq!((&a["blocks"], &a["responses"]), (&b["blocks"], &b["responses"]));
    }
}

#[test]
fn mistakes_in_validation_are_named() {
    let world = World::new();
    let check = |flags: &[&str], expect: &str| {
        let run = world.train("out", flags);
        assert_ne!(run.code, Some(0));
        assert!(run.stderr.contains(expect), "no '{expect}' in {}", run.stderr);
        assert!(!world.path("out").exists());
    };
    check(&["--eval-every", "2"], "nothing to validate on");
    check(&["--eval-every", "2", "--validation-ratio", "1"], "--validation-ratio is 1");
    check(&["--eval-every", "2", "--validation-ratio", "0.999"], "some on both sides");
    check(&["--eval-every", "2", "--eval-prompts", "nowhere.jsonl"], "nowhere.jsonl");
}
