//! Runs whose target is in the trainer's process, compared with runs that use a server: the same
//! losses and weights, bit for bit.

use std::path::Path;

use serde_json::Value;

use crate::no_memory::starve;
use crate::resume::kill_after;
use crate::running::{Running, free_port};
use crate::servers::Server;
use crate::world::{Run, World, losses, sorted_checkpoints};

/// Micro-batches, several epochs, the target's distribution, validation: all users of the states.
const ALL: [&str; 14] = [
    "--epochs",
    "5",
    "--gradient-accumulation-steps",
    "2",
    "--loss",
    "ce=0.5,kl",
    "--validation-ratio",
    "0.25",
    "--eval-every",
    "4",
    "--save-every",
    "3",
    "--total-seq-len",
    "48",
];

fn joined<'a>(parts: &[&[&'a str]]) -> Vec<&'a str> {
    parts.concat()
}

fn trained(world: &World, save: &str, flags: &[&str]) -> Run {
    let run = world.train(save, flags);
    assert!(run.success(), "{flags:?}: {}", run.stderr);
    assert!(!run.stderr.contains("panicked"), "{}", run.stderr);
    run
}

/// Flags of a run with the server at `endpoint`.
fn served(endpoint: &str) -> [&str; 4] {
    ["--endpoint", endpoint, "--on-missing", "generate"]
}

/// An empty folder instead of the world's stored states, so that states are fetched.
fn nowhere(world: &World) -> String {
    world.path("nowhere").to_string_lossy().into_owned()
}

/// Asserts that two runs are identical: losses, held-out metrics, weights and optimizer state.
fn assert_same_runs(world: &World, one: &str, other: &str, what: &str) {
    let (a, b) = (losses(&world.path(one)), losses(&world.path(other)));
    assert!(a.len() > 3 && a.iter().any(|(_, loss)| *loss > 0.0), "{what}: {a:?}");
    assert_eq!(a, b, "{what}");
    let names = sorted_checkpoints(&world.path(one));
    assert_eq!(names, sorted_checkpoints(&world.path(other)), "{what}");
    let last = names.last().unwrap();
    assert!(world.state(one, last) == world.state(other, last), "{what}: weights differ");
    if world.path(one).join("validation.jsonl").exists() {
        let lines = |save: &str| -> Vec<Value> {
            let without_time = |mut line: Value| {
                line.as_object_mut().unwrap().remove("seconds");
                line
            };
            world.lines(save, "validation.jsonl").into_iter().map(without_time).collect()
        };
        assert_eq!(lines(one), lines(other), "{what}");
    }
}

/// A case: the checkpoint's type, and flags of the server, of the colocated run, and of both runs.
type Case<'a> = (&'a str, &'a str, &'a [&'a str], &'a [&'a str], &'a [&'a str]);

#[test]
fn losses_and_weights_are_those_of_a_server_bit_for_bit() {
    let world = World::new();
    let (f32, nowhere) = (world.path("target").to_string_lossy().into_owned(), nowhere(&world));
    // On a processor with bfloat16 instructions the target's matmuls are in bfloat16, and the
    // trainer's are not.
    let bf16 = world.write_bfloat16_target("bf16");
    let wide: &[&str] = &["--wire-dtype", "f32"];
    let cases: [Case<'_>; 4] = [
        ("defaults", &f32, &[], &[], &[]),
        ("bf16", &f32, &["--dtype", "bfloat16"], &["--target-dtype", "bfloat16"], &[]),
        ("mixed", &bf16, &[], &["--target-batch-tokens", "20"], &[]),
        ("rounded", &f32, wide, &["--states-dtype", "f32"], &["--matmul-precision", "bfloat16"]),
    ];
    for (name, target, serving, colocated, both) in cases {
        let port = free_port();
        let endpoint = format!("http://127.0.0.1:{port}");
        let _server = Server::start_with(&world, Path::new(target), (port, &["1", "2"]), serving);
        let common = joined(&[&ALL, both, &["--verifier-name-or-path", target]]);
        let with = joined(&[&common, &served(&endpoint), &["--hidden-states-path", &nowhere]]);
        let (one, other) = (format!("{name}-served"), format!("{name}-colocated"));
        trained(&world, &one, &with);
        trained(&world, &other, &joined(&[&common, &["--colocate"], colocated]));
        assert_same_runs(&world, &one, &other, name);
    }
}

#[test]
fn a_run_goes_on_with_the_other_source_and_two_ranks_have_a_target_each() {
    let world = World::new();
    let (port, nowhere) = (free_port(), nowhere(&world));
    let endpoint = format!("http://127.0.0.1:{port}");
    let _server = Server::start_with(&world, &world.path("target"), (port, &["1", "2"]), &[]);
    let with = joined(&[&ALL, &served(&endpoint), &["--hidden-states-path", &nowhere]]);
    let colocated = joined(&[&ALL, &["--colocate"]]);
    trained(&world, "whole", &with);
    for (name, first, second) in [("to", &with, &colocated), ("fro", &colocated, &with)] {
        trained(&world, name, first);
        kill_after(&world, name, "step-000003");
        let resumed = trained(&world, name, &joined(&[second, &["--resume"]]));
        assert!(resumed.stderr.contains("resuming step 3 of"), "{}", resumed.stderr);
        assert!(!resumed.stderr.contains("changed:"), "{}", resumed.stderr);
        assert_same_runs(&world, "whole", name, name);
    }
    trained(&world, "two-served", &joined(&[&with, &["--nproc", "2"]]));
    trained(&world, "two", &joined(&[&colocated, &["--nproc", "2"]]));
    assert_same_runs(&world, "two-served", "two", "two ranks");
    // Another type of the states is reported as a change.
    let other = joined(&[&colocated, &["--states-dtype", "f32", "--resume", "--resume-from", "3"]]);
    let other = trained(&world, "to", &other);
    assert!(other.stderr.contains("changed: states-dtype bf16 -> f32"), "{}", other.stderr);
}

#[test]
fn lines_and_records_say_whose_states_they_were() {
    let world = World::new();
    let run = trained(&world, "out", &["--colocate", "--epochs", "2"]);
    let said = "the target runs in this process, 2 layers of it on the CPU (1 threads) in float32";
    assert!(run.stderr.contains(said), "{}", run.stderr);
    assert!(run.stderr.contains("  target "), "{}", run.stderr);
    let lines = world.lines("out", "metrics.jsonl");
    for line in &lines {
        let number = |key: &str| line[key].as_f64().unwrap();
        assert!(number("target_s") > 0.0, "{line}");
        assert!((number("target_share") - number("target_s") / number("interval_s")).abs() < 1e-9);
        assert!(number("target_s") + number("data_wait_s") <= number("interval_s"), "{line}");
    }
    let last = lines.last().unwrap();
    assert_eq!(last["samples"], 48, "two epochs of 24");
    assert_eq!(last["stream"]["generated"], 48);
    assert_eq!(last["stream"]["requests"], 0);
    // Two auxiliary layers of 32 numbers in bfloat16 per token.
    let tokens = last["tokens"].as_u64().unwrap();
    assert_eq!(last["stream"]["bytes"], tokens * 2 * 32 * 2);
    let made = std::fs::read(world.path("out").join("run.json")).unwrap();
    let made: Value = serde_json::from_slice(&made).unwrap();
    assert_eq!(made["config"]["colocate"], true);
    assert!(made["target"].is_object(), "{made}");
    let stored = trained(&world, "stored", &[]);
    assert!(!stored.stderr.contains("  target "), "{}", stored.stderr);
    assert!(world.lines("stored", "metrics.jsonl")[0].get("target_s").is_none());
}

#[test]
fn documents_that_the_target_does_not_take_are_left_out_as_a_server_leaves_them_out() {
    let world = World::new();
    let config = world.path("target").join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let shorter = |limit: u32| {
        let text = text.replace(
            "\"max_position_embeddings\": 2048",
            &format!("\"max_position_embeddings\": {limit}"),
        );
        std::fs::write(&config, text).unwrap();
    };
    // Two of the lengths 12 to 20 are too long.
    shorter(18);
    let (port, nowhere) = (free_port(), nowhere(&world));
    let endpoint = format!("http://127.0.0.1:{port}");
    let _server = Server::start_with(&world, &world.path("target"), (port, &["1", "2"]), &[]);
    let with = joined(&[&served(&endpoint), &["--hidden-states-path", &nowhere]]);
    trained(&world, "served", &with);
    let run = trained(&world, "colocated", &["--colocate"]);
    assert_same_runs(&world, "served", "colocated", "too long");
    let said = "it has 19 tokens, the target takes 18; lower --total-seq-len";
    assert!(run.stderr.contains(said), "{}", run.stderr);
    let counts = |save: &str| {
        let line = world.lines(save, "metrics.jsonl").pop().unwrap();
        let count = |value: &Value| value.as_u64().unwrap();
        (count(&line["skipped_samples"]), count(&line["stream"]["rejected"]))
    };
    let skipped = counts("colocated");
    assert!(skipped.0 > 0 && skipped.0 == skipped.1, "{skipped:?}");
    assert_eq!(counts("served"), skipped);
    // A target that accepts none is a wrong setting.
    shorter(5);
    let run = world.train("none", &["--colocate"]);
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    let said = "8 consecutive samples could not be used; the last one, sample ";
    assert!(run.stderr.contains(said), "{}", run.stderr);
}

#[test]
fn what_is_at_odds_with_a_target_in_the_process_is_named() {
    let world = World::new();
    let refuse = |more: &[&str], code: i32, expected: &[&str]| {
        let run = world.train("out", more);
        assert_eq!(run.code, Some(code), "{more:?}: {}", run.stderr);
        for words in expected {
            assert!(run.stderr.contains(words), "{words} is not in {}", run.stderr);
        }
        assert!(!world.path("out").exists());
    };
    let both = |flag| ["--colocate", flag];
    refuse(&["--colocate", "--endpoint", "h:1"], 2, &both("--vllm-endpoint"));
    refuse(&["--colocate", "--hidden-states-path", "x"], 2, &both("--hidden-states-path"));
    refuse(&["--colocate", "--shared-storage-path", "x"], 2, &both("--shared-storage-path"));
    refuse(&["--target-dtype", "bfloat16"], 2, &["required", "--colocate"]);
    refuse(&["--states-dtype", "f32"], 2, &["required", "--colocate"]);
    // In one file both are refused. On top of a file, the flag wins over the conflicting setting.
    let file = world.run_file("out", &["--colocate"]);
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.contains("colocate = true") && !text.contains("vllm_endpoint ="), "{text}");
    std::fs::write(&file, text.clone() + "hidden_states_path = \"x\"\n").unwrap();
    let run = world.engine(&["train", &file]);
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    for flag in ["--colocate", "--hidden-states-path"] {
        assert!(run.stderr.contains(flag), "{}", run.stderr);
    }
    let stored = world.run_file("out", &[]);
    let run = world.engine(&["train", &stored, "--colocate", "--set", "train.on-missing=generate"]);
    assert!(run.success(), "{}", run.stderr);
    // A family that does not run here.
    let config = world.path("target").join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace("Qwen3ForCausalLM", "GraniteForCausalLM")).unwrap();
    let run = world.train("other", &["--colocate"]);
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    assert!(
        run.stderr.contains("architecture GraniteForCausalLM is not supported"),
        "{}",
        run.stderr
    );
}

#[test]
fn an_interrupted_run_is_saved_and_goes_on() {
    let world = World::new();
    let flags = ["--colocate", "--epochs", "400", "--no-epoch-checkpoints"];
    let took = world.interrupt("out", &flags);
    assert!(took.as_secs() < 4, "{took:?}");
    let saved = sorted_checkpoints(&world.path("out")).pop().unwrap();
    let more = ["--resume", "--max-steps", "1"];
    let run = world.train("out", &joined(&[&flags, &more, &["--allow-changed", "max-steps"]]));
    assert!(run.success() && run.stdout.trim().ends_with(&saved), "{}", run.stderr);
}

#[test]
fn a_target_without_memory_is_run_in_halves_and_then_says_so() {
    let world = World::of_wide_layers();
    // One row with all documents; the draft needs little, so the target runs out of memory.
    let more = ["--colocate", "--epochs", "100", "--max-anchors", "2"];
    let more = joined(&[&more, &["--total-seq-len", "400", "--no-epoch-checkpoints"]]);
    let mut run = Running::start(&mut world.command("out", &more));
    run.await_step(&world.path("out"), 2);
    starve(run.id());
    let run = run.end();
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    for words in [
        "no memory for the target on ",
        " documents again in halves",
        "error: rank 0 ran out of memory while the target ran a document of ",
        "lower --target-batch-tokens (now 2048), or run it elsewhere in `dflash hidden-server`",
    ] {
        assert!(run.stderr.contains(words), "{words:?} is not in {}", run.stderr);
    }
    assert!(!run.stderr.contains("internal error"), "{}", run.stderr);
    let saved = sorted_checkpoints(&world.path("out"));
    assert_eq!(saved.len(), 1, "what was trained is saved: {saved:?}, {}", run.stderr);
}
