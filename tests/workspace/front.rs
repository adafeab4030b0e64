//! The front program: help, exit codes, and messages when libtorch is missing.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::program::{Finished, dflash, path, run};

#[test]
fn the_main_help_names_every_command() {
    insta::assert_snapshot!(dflash("--help").ok().stdout);
}

#[test]
fn every_command_has_its_help_without_libtorch() {
    let commands = [
        "prepare",
        "hidden-server",
        "train",
        "plan",
        "eval",
        "export",
        "report",
        "push",
        "regenerate",
        "generate",
        "serve",
        "demo",
        "doctor",
        "recipes",
        "completions",
        "man",
        "demo-target",
    ];
    for command in commands {
        let help = bare(&[command, "--help"]).ok().stdout;
        assert!(help.contains(&format!("Usage: dflash {command}")), "{help}");
    }
}

/// Runs the program as the wheel's second name starts it.
fn second_name(args: &str) -> Finished {
    run(Command::new(path()).arg0("/env/bin/dflash-train").args(args.split_whitespace()))
}

#[test]
fn help_and_usage_show_the_name_that_was_typed() {
    let check = |args: &str, expect: &str| {
        let finished = second_name(args);
        let said = format!("{}{}", finished.stdout, finished.stderr);
        assert!(said.contains(expect), "{expect:?} is not in {said}");
    };
    check("--help", "Usage: dflash-train [OPTIONS] <COMMAND>");
    check("--help", "`dflash-train COMMAND --help` explains each flag");
    check("generate --help", "Example: dflash-train generate --target");
    check("train --no-such-flag", "Usage: dflash-train train");
    check("eval --target x", "Usage: dflash-train eval");
    check("completions bash", "-o default dflash-train\n");
    assert!(dflash("--help").stdout.contains("Usage: dflash [OPTIONS] <COMMAND>"));
}

/// Files of `dir` in the source tree, by name.
fn files_of(dir: &str) -> Vec<String> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(dir);
    let entries = fs::read_dir(dir).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn the_program_carries_every_recipe_and_the_sample() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("new");
    let write = || run(Command::new(path()).arg("recipes").arg(&target)).ok();
    let written = write();
    let mut paths = vec!["data/sharegpt_sample.json".to_owned()];
    paths.extend(files_of("recipes").into_iter().map(|name| format!("recipes/{name}")));
    assert_eq!(written.stdout.lines().count(), paths.len(), "{}", written.stdout);
    for name in &paths {
        let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name);
        assert!(fs::read(target.join(name)).unwrap() == fs::read(tree).unwrap(), "{name}");
        assert!(written.stdout.contains(&format!("{name}\n")), "{name} in {}", written.stdout);
    }
    let mode = fs::metadata(target.join("recipes/run.sh")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o755);
    assert!(written.stderr.is_empty(), "{}", written.stderr);

    fs::write(target.join("recipes/tiny-cpu.toml"), "mine").unwrap();
    let again = write();
    assert!(again.stderr.contains("tiny-cpu.toml is there with other content"), "{}", again.stderr);
    assert_eq!(fs::read_to_string(target.join("recipes/tiny-cpu.toml")).unwrap(), "mine");
}

#[test]
fn recipes_that_cannot_be_written_name_the_directory() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("data"), "a file").unwrap();
    let finished = run(Command::new(path()).arg("recipes").arg(dir.path()));
    assert!(finished.fault().contains("/data"), "{finished:?}");
}

#[test]
fn the_flags_of_the_published_guide_are_there() {
    let help = dflash("train --help").ok().stdout;
    let flags = "--verifier-name-or-path --speculator-type --num-layers --data-path \
        --vllm-endpoint --save-path --epochs --lr --total-seq-len --on-missing --on-generate \
        --seed --draft-vocab-size --target-layer-ids --scheduler-type --max-anchors --nproc \
        --block-size --anchors-per-sequence --gamma --max-steps";
    for flag in flags.split_whitespace() {
        assert!(help.contains(flag), "{flag} is missing in\n{help}");
    }
}

#[test]
fn every_run_file_of_the_recipes_parses() {
    let recipes = concat!(env!("CARGO_MANIFEST_DIR"), "/../recipes");
    let dump = |name: &str| dflash(&format!("train {recipes}/{name} --dump-config")).ok().stdout;
    let mut files = 0;
    for entry in fs::read_dir(recipes).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.ends_with(".toml") {
            files += 1;
            assert!(dump(&name).contains("target = \""), "{name}");
        }
    }
    assert_eq!(files, 9);
    assert!(dump("qwen3-4b-1gpu.toml").contains("target_layer_ids = [2, 10, 18, 26, 34]"));
    let llama = dump("llama-3.1-8b-4gpu.toml");
    assert!(llama.contains("target_layer_ids = [2, 9, 16, 23, 30]"), "{llama}");
    assert!(llama.contains("mask_token_id = 128255"), "{llama}");
}

#[test]
fn usage_errors_have_code_two_and_name_the_flag() {
    let finished = dflash("eval --target x");
    assert_eq!(finished.code, Some(2));
    assert!(finished.stderr.contains("--prompts"), "{}", finished.stderr);
    let finished = dflash("eval --target x --prompts y");
    assert_eq!(finished.code, Some(2));
    assert!(finished.stderr.contains("--draft <DIR|REPO>"), "{}", finished.stderr);
    assert_eq!(dflash("no-such-command").code, Some(2));
    assert_eq!(dflash("").code, Some(2));
}

#[test]
fn help_starts_at_once() {
    let at_once = |_| {
        let began = Instant::now();
        dflash("--help").ok();
        began.elapsed() < Duration::from_millis(30)
    };
    // Once is proof; the repetitions allow for a machine busy with other tests.
    assert!((0..200).any(at_once));
}

#[test]
fn without_libtorch_one_message_lists_the_places_and_the_remedy() {
    let message = bare(&["eval", "--target", "t", "--draft", "d", "--prompts", "p"]);
    let message = message.fault();
    assert!(message.starts_with("error: this command needs libtorch 2.11.0"), "{message}");
    for part in ["DFLASH_LIBTORCH", ".deps/libtorch", ".cache/dflash", "make setup", "pip install"]
    {
        assert!(message.contains(part), "{part} in {message}");
    }
}

#[test]
fn a_wrong_libtorch_is_named_with_what_was_found() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("version.py"), "__version__ = '2.4.1+cpu'\n").unwrap();
    let mut command = Command::new(path());
    command.args(["hidden-server", "m", "--target-layer-ids", "1"]);
    let finished = run(command.env("DFLASH_LIBTORCH", dir.path()));
    assert!(finished.fault().contains("version 2.4.1+cpu, expected 2.11.0"), "{finished:?}");
}

#[test]
fn a_missing_engine_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("dflash");
    fs::copy(path(), &copy).unwrap();
    let finished = run(Command::new(&copy).args(["regenerate", "--help"])).ok();
    assert!(finished.stdout.contains("Usage"), "{finished:?}");
    let finished = run(Command::new(&copy).args(["hidden-server", "m", "--target-layer-ids", "1"]));
    assert!(finished.fault().contains("dflash-engine is missing"), "{finished:?}");
}

/// Runs a copy of the front program (next to an empty engine) where libtorch is missing.
fn bare(args: &[&str]) -> Finished {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(path(), dir.path().join("dflash")).unwrap();
    fs::write(dir.path().join("dflash-engine"), "").unwrap();
    let mut command = Command::new(dir.path().join("dflash"));
    run(command.args(args).env_clear().env("HOME", dir.path()).env("PATH", ""))
}
