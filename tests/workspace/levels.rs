//! `--cpu-level`: every command runs at each supported level, reports it, and refuses others.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::pipeline::{demo, prepared, scratch, target};
use crate::program::{Finished, dflash, path, run};

/// Environment variables that select a level.
const VARIABLES: [&str; 4] =
    ["DFLASH_CPU_LEVEL", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"];
/// All levels; no processor supports all of them.
const ALL: [&str; 5] = ["baseline", "avx2", "avx512", "avx512bf16", "neon"];

/// `program` with the arguments of `line`, with no level selected.
fn at_no_level(program: &Path, line: &str) -> Command {
    let mut command = Command::new(program);
    command.args(line.split_whitespace());
    for name in VARIABLES {
        command.env_remove(name);
    }
    command
}

fn free(line: &str) -> Finished {
    run(&mut at_no_level(&path(), line))
}

/// The levels of this machine, each with its variables as `NAME=value`.
fn levels() -> Vec<(String, Vec<String>)> {
    let text = free("cpu-levels").ok().stdout;
    let level = |line: &str| {
        let mut words = line.split_whitespace().map(str::to_owned);
        (words.next().expect("a name"), words.collect())
    };
    text.lines().map(level).collect()
}

fn json(file: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(file).expect(file)).expect("JSON")
}

#[test]
fn answers_are_made_at_every_level_and_the_report_names_it() {
    let (_dir, dir) = scratch();
    let (target, prompts) = (target(), demo().join("prompts.jsonl"));
    let levels = levels();
    assert_eq!(levels[0].0, "baseline");
    for (level, _) in &levels {
        let report = format!("{dir}/{level}.json");
        for dtype in ["float32", "bfloat16"] {
            let line = format!(
                "eval --target {target} --draft ngram --prompts {} --limit 2 --max-new-tokens 12 \
                 --device cpu --dtype {dtype} --cpu-level {level} --json {report}",
                prompts.display()
            );
            let shown = free(&line).ok().stdout;
            let report = json(&report);
            assert_eq!(report["cpu_level"], level.as_str(), "{report}");
            assert_eq!(report["lossless"]["holds"], true, "{level}, {dtype}: {report}");
            assert!(shown.contains(&format!("cpu ({level}), {dtype}, ")), "{shown}");
        }
    }
}

#[test]
fn a_run_records_the_level_that_its_ranks_computed_at() {
    let (_dir, dir) = scratch();
    let (data, save) = (prepared(&dir), format!("{dir}/drafts"));
    let run_file = format!("{dir}/run.toml");
    fs::write(&run_file, "[train]\ncpu_level = \"baseline\"\n").unwrap();
    let line = format!(
        "train {run_file} --target {} --data-path {data} --save-path {save} --colocate --num-layers 1 \
         --target-layer-ids 2 5 --block-size 4 --total-seq-len 256 --max-steps 1 --nproc 2 \
         --no-epoch-checkpoints --device cpu",
        target()
    );
    free(&line).ok();
    assert_eq!(json(&format!("{save}/run.json"))["settings"]["cpu_level"], "baseline");
    let best = &levels().pop().unwrap().0;
    let resumed = free(&format!(
        "{line} --resume --allow-changed max-steps --max-steps 2 --cpu-level {best}"
    ))
    .ok();
    let said = format!("changed: cpu-level baseline -> {best}");
    assert!(best == "baseline" || resumed.stderr.contains(&said), "{}", resumed.stderr);
    assert_eq!(json(&format!("{save}/run.json"))["settings"]["cpu_level"], best.as_str());
}

#[test]
fn a_bench_and_the_doctor_name_the_level() {
    let small =
        "--tokens 64 --docs 2 --anchors 4 --block 4 --layers 1 --aux-layers 2 --steps 1 --warmup 0";
    for (level, variables) in levels() {
        let bench = format!("bench train-step --json --device cpu --target {} {small}", target());
        let report = free(&format!("{bench} --cpu-level {level}")).ok().stdout;
        let report: Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["cpu_level"], level.as_str(), "{report}");
        let mut doctor = at_no_level(&path(), "doctor --offline --json");
        let findings = run(doctor.env("DFLASH_CPU_LEVEL", &level)).ok().stdout;
        let findings: Vec<Value> = serde_json::from_str(&findings).unwrap();
        let found = findings.iter().find(|one| one["what"] == "level").expect("a line for it");
        let found = found["found"].as_str().unwrap();
        assert!(found.starts_with(&format!("{level} computes, of baseline")), "{found}");
        // libtorch reports the level that its variable selects.
        let asked = variables.iter().find_map(|text| text.strip_prefix("ATEN_CPU_CAPABILITY="));
        assert!(found.contains(&format!("libtorch {}", asked.unwrap())), "{found}");
    }
}

#[test]
fn a_level_that_the_processor_lacks_is_refused_by_name() {
    let levels: Vec<String> = levels().into_iter().map(|(level, _)| level).collect();
    let missing = ALL.into_iter().find(|level| !levels.iter().any(|here| here == level)).unwrap();
    let expected = format!(
        "--cpu-level or DFLASH_CPU_LEVEL is {missing}, but this machine's processor has {}",
        levels.join(", ")
    );
    let eval = "eval --target t --draft ngram --prompts gsm8k";
    let typed = free(&format!("{eval} --cpu-level {missing}"));
    assert!(typed.fault().contains(&expected), "{typed:?}");
    let from_variable = run(at_no_level(&path(), eval).env("DFLASH_CPU_LEVEL", missing));
    assert!(from_variable.fault().contains(&expected), "{from_variable:?}");
    let (_dir, dir) = scratch();
    let run_file = format!("{dir}/run.toml");
    fs::write(&run_file, format!("[eval]\n\ncpu_level = \"{missing}\"\n")).unwrap();
    let filed = free(&format!("eval {run_file} --target t --draft ngram --prompts gsm8k"));
    assert!(filed.fault().contains(&format!("{run_file}:3: {expected}")), "{filed:?}");
    let unknown = free(&format!("{eval} --cpu-level avx9"));
    assert_eq!(unknown.code, Some(2), "{unknown:?}");
    assert!(unknown.stderr.contains("baseline, avx2, avx512, avx512bf16, neon"), "{unknown:?}");
}

/// On an emulated processor of 2013 (qemu).
#[test]
fn a_processor_without_avx512_refuses_it() {
    let mut levels = Command::new("qemu-x86_64");
    if !cfg!(target_arch = "x86_64") || levels.arg("--version").output().is_err() {
        println!("skipped: no qemu-x86_64 (Debian: qemu-user)");
        return;
    }
    let on_haswell = |line: &str| {
        let mut command = at_no_level(Path::new("qemu-x86_64"), "-cpu Haswell");
        run(command.arg(path()).args(line.split_whitespace()))
    };
    let names = on_haswell("cpu-levels").ok().stdout;
    let names: Vec<&str> =
        names.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["baseline", "avx2"]);
    let refused = on_haswell("eval --target t --draft ngram --prompts p --cpu-level avx512");
    let expected = "is avx512, but this machine's processor has baseline, avx2\n";
    assert!(refused.fault().contains(expected), "{refused:?}");
}

#[test]
fn every_command_that_computes_hands_the_level_to_the_engine() {
    let dir = tempfile::tempdir().unwrap();
    let front = dir.path().join("dflash");
    fs::copy(path(), &front).unwrap();
    let engine = dir.path().join("dflash-engine");
    fs::write(&engine, "#!/bin/sh\nenv\n").unwrap();
    fs::set_permissions(&engine, PermissionsExt::from_mode(0o755)).unwrap();
    let libtorch = dflash("doctor --offline --json").stdout;
    let libtorch = libtorch.split(" at ").nth(1).unwrap().split(" (").next().unwrap();
    let shown = |line: &str, set: &[(&str, &str)]| {
        let mut command = at_no_level(&front, line);
        run(command.env("DFLASH_LIBTORCH", libtorch).envs(set.iter().copied()))
    };
    let level_of = |finished: Finished| -> Vec<String> {
        let lines = finished.ok().stdout.lines().map(str::to_owned).collect::<Vec<_>>();
        let is_ours = |line: &&String| VARIABLES.iter().any(|name| line.starts_with(name));
        let mut found: Vec<String> = lines.iter().filter(is_ours).cloned().collect();
        found.sort();
        found
    };
    let commands = [
        "hidden-server t --target-layer-ids 1",
        "train --target t --data-path d --save-path s",
        "eval --target t --draft ngram --prompts p",
        "regenerate --target t --data d --output o",
        "generate --target t hello",
        "serve --target t",
        "bench train-step --target t",
        "bench decode --target t --draft d --prompts p",
        "bench target --target t",
    ];
    for (level, mut variables) in levels() {
        variables.sort();
        for command in commands {
            assert_eq!(level_of(shown(&format!("{command} --cpu-level {level}"), &[])), variables);
        }
        // Commands without the flag, such as those that the demo starts, use the variable.
        let set = [("DFLASH_CPU_LEVEL", level.as_str())];
        assert_eq!(level_of(shown("demo-target --output o", &set)), variables);
    }
    assert_eq!(level_of(shown(commands[2], &[])), [""; 0]);
    let other = [("ATEN_CPU_CAPABILITY", "avx2")];
    assert_eq!(level_of(shown(commands[2], &other)), ["ATEN_CPU_CAPABILITY=avx2"]);
    let refused = shown(&format!("{} --cpu-level baseline", commands[2]), &other);
    let expected = "the CPU instruction level baseline sets ATEN_CPU_CAPABILITY to default";
    assert!(refused.fault().contains(expected), "{refused:?}");
}
