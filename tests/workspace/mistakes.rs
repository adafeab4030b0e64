//! What somebody reads who made a mistake: each line is one that people have typed, with the words that it
//! must get, and those that would lead them on.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::pipeline::{demo, prepared, scratch, target};
use crate::program::{Finished, dflash, path, run};

/// Without the Hub, so that a name is not looked up.
fn offline(line: &str) -> Finished {
    run(Command::new(path()).args(line.split_whitespace()).env("HF_HUB_OFFLINE", "1"))
}

/// The command fails with `code` and says all of `expected`.
fn check(line: &str, code: i32, expected: &[&str]) -> String {
    let finished = offline(line);
    assert_eq!(finished.code, Some(code), "{line}: {finished:?}");
    for part in expected {
        assert!(finished.stderr.contains(part), "{line}: {part} in {}", finished.stderr);
    }
    finished.stderr
}

#[test]
fn a_mistyped_name_gets_the_nearest_one() {
    check("prepare --data sharegtp", 1, &["did you mean sharegpt?", "codealpaca"]);
    check("prepare sharegtp", 1, &["did you mean sharegpt?"]);
    check("regenerate --target t --data ultrachta --output o.jsonl", 1, &["the target t"]);
    let target = target();
    let line = format!("eval --target {target} --draft none --prompts gsm9k");
    check(&line, 1, &["did you mean gsm8k?"]);
    let hub = "did you mean Qwen/Qwen3-8B?";
    check("eval --target Qwen3-8B --draft none --prompts gsm8k", 1, &[hub]);
    check("train --target Qwen3-8B --data-path d --save-path s", 1, &[hub]);
    for (gpu, meant) in [("h1000", "H100"), ("b2000", "B200")] {
        let line = format!("plan --target {target} --rows 9 --mean-length 64 --device {gpu}");
        let said = check(&line, 1, &[&format!("--device is {gpu}, but the known ones are")]);
        assert!(said.contains(&format!("did you mean {meant}?")), "{said}");
    }
}

#[test]
fn raw_conversations_are_to_be_prepared_and_never_written_over() {
    let (_dir, dir) = scratch();
    let raw = format!("{dir}/raw.jsonl");
    fs::copy(demo().join("conversations.jsonl"), &raw).unwrap();
    for (given, data) in [(&raw, &raw), (&dir, &dir)] {
        let line = format!("train --target {} --data-path {given} --save-path {dir}/run", target());
        let said = check(&line, 1, &[&format!("`dflash prepare --data {data} --output DIR`")]);
        assert!(!said.contains(&format!("--output {data}")), "{said}");
    }
}

/// A model directory with this config.json.
fn model(dir: &str, name: &str, config: &str) -> String {
    let path = format!("{dir}/{name}");
    fs::create_dir(&path).unwrap();
    fs::write(format!("{path}/config.json"), config).unwrap();
    path
}

#[test]
fn a_model_that_is_another_kind_of_model_is_named() {
    let (_dir, dir) = scratch();
    let target = target();
    let gguf = format!("{dir}/Qwen3-8B-Q4_K_M.gguf");
    fs::write(&gguf, b"GGUF\x03\0\0\0").unwrap();
    let eval = |target: &str, draft: &str| {
        let prompts = demo().join("prompts.jsonl");
        format!("eval --target {target} --draft {draft} --prompts {}", prompts.display())
    };
    check(&eval(&gguf, "none"), 1, &["is llama.cpp's form of a model (GGUF)", "OWNER/NAME"]);
    check(&eval(&target, &gguf), 1, &["is llama.cpp's form of a drafter (GGUF)"]);
    let eagle = model(&dir, "eagle3", r#"{"architectures": ["LlamaForCausalLMEagle3"]}"#);
    let named = "is an EAGLE-3 drafter (LlamaForCausalLMEagle3)";
    check(&eval(&target, &eagle), 1, &[named, "DFlash drafters only"]);
    check(&eval(&eagle, "none"), 1, &[named, "pass the model that it proposes for"]);
    let speculators = model(&dir, "speculators", r#"{"speculators_model_type": "eagle3"}"#);
    check(&eval(&target, &speculators), 1, &["an EAGLE-3 drafter in speculators' layout"]);
    let early = model(&dir, "early", r#"{"architectures": ["DFlashDraftModel"]}"#);
    check(&eval(&target, &early), 1, &["of an early release", "fetch the drafter's present"]);
    let draft = model(&dir, "draft", r#"{"dflash_config": {}}"#);
    let swapped = "--target and --draft look swapped";
    check(&eval(&draft, &target), 1, &["is a DFlash drafter", swapped]);
    check(&eval(&target, &target), 1, &["(Qwen3ForCausalLM), not a drafter", swapped]);
}

#[test]
fn prepare_takes_data_without_its_flag() {
    let (_dir, dir) = scratch();
    let target = target();
    let rows = demo().join("conversations.jsonl").display().to_string();
    let options = format!("--target {target} --limit 5");
    dflash(&format!("prepare {rows} {options} --output {dir}/one")).ok();
    fs::create_dir(format!("{dir}/folder")).unwrap();
    fs::copy(&rows, format!("{dir}/folder/rows.jsonl")).unwrap();
    dflash(&format!("prepare {dir}/folder {options} --output {dir}/two")).ok();
    let file = format!("{dir}/run.toml");
    let text = format!("[prepare]\ntarget = '{target}'\ndata = '{rows}'\nlimit = 5\n");
    fs::write(&file, text).unwrap();
    let run_file = dflash(&format!("prepare {file} --output {dir}/three")).ok();
    assert!(run_file.stdout.contains("rows read          5"), "{}", run_file.stdout);
    let csv = format!("{dir}/chats.csv");
    fs::write(&csv, "question,answer\na,b\n").unwrap();
    let expected = ["pandas.read_csv(", "chats.jsonl"];
    check(&format!("prepare {csv} {options}"), 1, &expected);
    check("eval gsm8k", 1, &["a word without a flag is a run file", "--prompts gsm8k"]);
}

#[test]
fn all_that_a_resumed_run_changes_is_said_at_once() {
    let (_dir, dir) = scratch();
    let data = prepared(&dir);
    let train = |more: &str| {
        let target = target();
        let line = "--colocate --max-anchors 8 --total-seq-len 256 --max-steps 1";
        format!("train --target {target} --data-path {data} --save-path {dir}/run {line} {more}")
    };
    dflash(&train("--num-layers 1 --block-size 4 --seed 1")).ok();
    let changed = train("--resume --num-layers 2 --block-size 8 --seed 2 --lr 1e-3");
    let each = ["--num-layers 1, this run asks for 2", "--block-size 4, this", "--seed 1, this"];
    check(&changed, 1, &each);
    check(&changed, 1, &["--allow-changed permits: lr 0.0006 -> 0.001"]);
}

#[test]
fn what_cannot_train_is_refused_before_the_first_step() {
    let (_dir, dir) = scratch();
    let data = prepared(&dir);
    let target = target();
    let train = |more: &str| {
        format!(
            "train --target {target} --data-path {data} --save-path {dir}/run --colocate {more}"
        )
    };
    for rate in ["6e4", "6"] {
        let said = check(&train(&format!("--lr {rate}")), 1, &["--lr is 6", "minus sign missing?"]);
        assert!(!said.contains("step "), "{said}");
    }
    let muon = train("--optimizer muon --muon-lr 20");
    check(&muon, 1, &["--muon-lr is 20", "--allow-any-lr"]);
    let said =
        check(&train("--total-seq-len 10"), 1, &["--total-seq-len is 10", "the first needs"]);
    assert!(!said.contains("step "), "{said}");
    assert!(!Path::new(&format!("{dir}/run/metrics.jsonl")).exists());
}

#[test]
fn answers_that_were_cut_are_counted() {
    let (_dir, dir) = scratch();
    let (target, rows) = (target(), demo().join("conversations.jsonl").display().to_string());
    let line = format!("regenerate --target {target} --data {rows} --limit 3 --max-new-tokens 2");
    let made = dflash(&format!("{line} --output {dir}/own.jsonl")).ok();
    let file = fs::read_to_string(format!("{dir}/own.jsonl")).unwrap();
    let cut = file.lines().filter(|line| line.contains("\"finished\":false")).count();
    assert!(cut > 0, "{file}");
    assert!(made.stderr.contains(" answers were cut at --max-new-tokens 2"), "{}", made.stderr);
    let ready = dflash(&format!("prepare {dir}/own.jsonl --target {target} --output {dir}/d")).ok();
    let counted = format!("answers cut        in {cut} of {} rows", file.lines().count());
    assert!(ready.stdout.contains(&counted), "{counted} in {}", ready.stdout);
    let eval = dflash(&format!(
        "eval --target {target} --draft none --prompts {rows} --limit 2 --max-new-tokens 2"
    ));
    let told = "2 of 2 answers were cut at --max-new-tokens 2";
    assert!(eval.ok().stdout.contains(told));
    let said = dflash(&format!("generate --target {target} --max-new-tokens 1 Hello")).ok().stderr;
    assert!(said.contains("the answer was cut at --max-new-tokens 1"), "{said}");
}

#[test]
fn regenerate_reads_what_prepare_reads() {
    let (_dir, dir) = scratch();
    let target = target();
    fs::create_dir(format!("{dir}/folder")).unwrap();
    for name in ["a.jsonl", "b.jsonl"] {
        let row = format!("{{\"question\": \"Who is {name}?\", \"answer\": \"x\"}}\n");
        fs::write(format!("{dir}/folder/{name}"), row).unwrap();
    }
    let line = format!("regenerate --target {target} --max-new-tokens 2");
    dflash(&format!("{line} --data {dir}/folder --output {dir}/own.jsonl")).ok();
    let made = fs::read_to_string(format!("{dir}/own.jsonl")).unwrap();
    let questions: Vec<bool> = made
        .lines()
        .zip(["a", "b"])
        .map(|(row, name)| row.contains(&format!("{name}.jsonl")))
        .collect();
    assert_eq!(questions, [true, true], "{made}");
    let output = format!("--output {dir}/other.jsonl");
    check(&format!("{line} --data sharegtp {output}"), 1, &["did you mean sharegpt?"]);
    let preset = format!("{line} --data gsm8k {output}");
    check(&preset, 1, &["the dataset openai/gsm8k", "local files work too: --data"]);
}

#[test]
fn tips_lead_somewhere() {
    assert!(dflash("help train").ok().stdout.contains("--total-seq-len"));
    let shell = check("completions tcsh", 2, &["bash, zsh, fish"]);
    assert!(!shell.contains("similar"), "{shell}");
    let unknown = check("train --thinking", 2, &["--thinking"]);
    assert!(!unknown.contains("-- --thinking"), "{unknown}");
    check("plan --target t", 2, &["--data-path <DIR>", "--rows N", "--mean-length"]);
    check("export --draft d --target t --output o --dtype int8", 2, &["q8_0", "--format gguf"]);
    let set = format!("eval --target {} --draft none --prompts gsm8k", target());
    let said = check(&set, 1, &["--prompts FILE"]);
    assert!(!said.contains("--data"), "{said}");
    assert!(dflash("--help").ok().stdout.contains("demo-target"));
}

/// z-lab's package as pip installs it.
fn other_dflash(dir: &str) {
    let info = format!("{dir}/lib/python3.12/site-packages/dflash-0.1.0.dist-info");
    fs::create_dir_all(&info).unwrap();
    fs::write(format!("{info}/entry_points.txt"), "[console_scripts]\ndflash = dflash.cli:main\n")
        .unwrap();
    fs::create_dir_all(format!("{dir}/bin")).unwrap();
    let script = "#!/usr/bin/python3\nfrom dflash.cli import main\nmain()\n";
    fs::write(format!("{dir}/bin/dflash"), script).unwrap();
    let executable = fs::Permissions::from_mode(0o755);
    fs::set_permissions(format!("{dir}/bin/dflash"), executable).unwrap();
}

#[test]
fn the_other_program_of_the_name_is_told_apart() {
    let (_dir, dir) = scratch();
    other_dflash(&dir);
    let search = format!("{dir}/bin:{}", std::env::var("PATH").unwrap());
    let with_path =
        |line: &str| run(Command::new(path()).args(line.split_whitespace()).env("PATH", &search));
    let which = format!("dflash on PATH: {dir}/bin/dflash is z-lab's dflash 0.1.0");
    let doctor = with_path("doctor --offline").ok().stdout;
    assert!(doctor.contains(&which) && doctor.contains("also `dflash-train`"), "{doctor}");
    let said = with_path(&format!("generate --target {} --max-new-tokens 1 Hi", target()));
    assert!(said.ok().stderr.contains(&which));
    // By its second name it is the same program, and says so.
    let second = format!("{dir}/dflash-train");
    fs::copy(path(), &second).unwrap();
    let help = run(Command::new(&second).args(["train", "--help"])).ok().stdout;
    assert!(help.contains("Usage: dflash-train train [OPTIONS]"), "{help}");
    let usage = run(Command::new(&second).arg("train")).stderr;
    assert!(usage.contains("Usage: dflash-train train"), "{usage}");
}

#[test]
fn doctor_tries_every_place_that_is_written_to() {
    let doctor = |name: &str, value: &str| {
        let mut doctor = Command::new(path());
        doctor.args(["doctor", "--offline"]).env(name, value);
        for other in ["HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"] {
            if other != name {
                doctor.env_remove(other);
            }
        }
        run(&mut doctor)
    };
    let finished = doctor("HOME", "/proc");
    for part in ["MISSING  Hub cache", "HF_HOME", "MISSING  cache", "XDG_CACHE_HOME"] {
        assert!(finished.stdout.contains(part), "{part} in {}", finished.stdout);
    }
    assert!(finished.fault().contains("essential"), "{finished:?}");
    let finished = doctor("HF_HOME", "/proc/none");
    assert!(finished.stdout.contains("MISSING  Hub cache      /proc/none/hub"), "{finished:?}");
    assert_eq!(finished.code, Some(1));
    let (_dir, dir) = scratch();
    assert_eq!(doctor("XDG_CACHE_HOME", &dir).code, Some(0));
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "nothing is left behind");
    let finished = doctor("DFLASH_LIBTORCH", "/nowhere");
    assert!(finished.stdout.contains("-> `unset DFLASH_LIBTORCH`"), "{}", finished.stdout);
}
