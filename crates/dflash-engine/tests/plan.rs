//! `dflash plan` as users run it, and its memory against what a step really takes.

use std::path::Path;
use std::process::Command;

use dflash_model::target::{Target, TargetConfig};
use serde_json::Value;
use tch::{Device, Kind};

const TOKENS: usize = 1024;
const DOCUMENTS: usize = 4;

/// A target whose config.json and weights are in the directory, without a tokenizer.
fn target() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let target = Target::random(TargetConfig::qwen3(128, 8, 512), 1, Device::Cpu);
    target.save(dir.path(), Kind::Float).unwrap();
    dir
}

fn engine(arguments: &str, target: &Path) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_dflash-engine"))
        .args(arguments.split_whitespace())
        .arg("--target")
        .arg(target)
        // Threads keep buffers of their own, as many as there are cores.
        .env("OMP_NUM_THREADS", "2")
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn json(arguments: &str, target: &Path) -> Value {
    let (code, stdout, stderr) = engine(arguments, target);
    assert_eq!(code, Some(0), "{stderr}");
    serde_json::from_str(&stdout).unwrap()
}

/// Planned and measured: (activations, all but the window) and the peak, MiB.
fn both(anchors: usize, target: &Path) -> ((f64, f64), f64) {
    let plan = json(
        &format!(
            "plan --device cpu --json --rows {DOCUMENTS} --mean-length {} --total-seq-len {TOKENS} \
             --max-anchors {anchors} --block-size 16 --num-layers 5",
            TOKENS / DOCUMENTS
        ),
        target,
    );
    let bench = json(
        &format!(
            "bench train-step --json --device cpu --tokens {TOKENS} --docs {DOCUMENTS} \
             --anchors {anchors} --block 16 --layers 5 --captures 5 --steps 1 --warmup 1"
        ),
        target,
    );
    let mib = |bytes: &Value| bytes.as_f64().unwrap() / f64::from(1 << 20);
    let total = mib(&plan["total_bytes"]) - mib(&plan["memory"]["window"]);
    ((mib(&plan["memory"]["activations"]), total), bench["peak_mib"].as_f64().unwrap())
}

#[test]
fn planned_memory_is_near_what_a_step_takes() {
    let dir = target();
    let ((few, few_total), few_peak) = both(16, dir.path());
    let ((many, many_total), many_peak) = both(256, dir.path());
    // What more anchors add is activations alone.
    let ratio = (many - few) / (many_peak - few_peak);
    assert!((0.6..1.4).contains(&ratio), "planned {many} - {few}, peaks {many_peak}, {few_peak}");
    for (planned, peak) in [(few_total, few_peak), (many_total, many_peak)] {
        assert!((0.6..1.4).contains(&(planned / peak)), "planned {planned}, measured {peak} MiB");
    }
}

#[test]
fn a_plan_counts_steps_arithmetic_and_hidden_states() {
    let dir = target();
    let line = "plan --device cpu --rows 10 --mean-length 100 --total-seq-len 256 --epochs 2 \
                --nproc 2 --num-layers 2 --max-anchors 8 --tflops 0.001";
    let plan = json(&format!("{line} --json"), dir.path());
    // Two documents a row, two rows a step.
    assert_eq!(plan["rows_per_epoch"], 5);
    assert_eq!(plan["steps_per_epoch"], 3);
    assert_eq!(plan["steps"], 6);
    assert_eq!(plan["tokens_per_epoch"], 1000);
    let number = |key: &str| plan[key].as_f64().unwrap();
    let seconds = number("flops_per_step") / 2.0 / 1e9;
    assert!((number("step_seconds") - seconds).abs() < 1e-9 * seconds);
    // 200 tokens, 2 ranks, 5 captures of 128 numbers in bfloat16.
    assert_eq!(number("hidden_bytes_per_step"), 200.0 * 2.0 * 5.0 * 128.0 * 2.0);
    let held_out = json(&format!("{line} --json --validation-ratio 0.4"), dir.path());
    assert_eq!((&held_out["rows_per_epoch"], &held_out["steps"]), (&3.into(), &4.into()));
    let teacher = json(&format!("{line} --json --loss kl"), dir.path());
    assert_eq!(teacher["hidden_bytes_per_step"].as_f64(), Some(200.0 * 2.0 * 6.0 * 256.0));
    let (_, table, _) = engine(line, dir.path());
    for part in ["memory of a rank", "activations", "TFLOP a step", "MB/s from the servers"] {
        assert!(table.contains(part), "{table}");
    }
}

#[test]
fn a_plan_takes_a_run_file_and_ignores_what_only_training_needs() {
    let dir = target();
    let file = dir.path().join("run.toml");
    std::fs::write(&file, "[train]\nsave_path = 'out'\nlr = 1e-3\nmax_steps = 7\nblock_size = 4\n")
        .unwrap();
    let line = format!("plan {} --device cpu --rows 9 --mean-length 64 --json", file.display());
    let plan = json(&line, dir.path());
    assert_eq!((&plan["steps"], &plan["shape"][1]), (&7.into(), &4.into()));
    std::fs::write(&file, "[train]\nlearning = 1").unwrap();
    let (code, _, stderr) = engine(&line, dir.path());
    assert_eq!(code, Some(1));
    assert!(stderr.contains("run.toml:2: learning is not a setting"), "{stderr}");
}

#[test]
fn what_cannot_be_planned_is_named() {
    let dir = target();
    let refuse = |arguments: &str, code: i32, expect: &str| {
        let (found, _, stderr) = engine(arguments, dir.path());
        assert_eq!(found, Some(code), "{stderr}");
        assert!(stderr.contains(expect), "{expect} in {stderr}");
    };
    refuse("plan", 2, "--data-path <DIR>");
    refuse("plan --rows 5", 2, "--mean-length <TOKENS>");
    refuse("plan --rows 5 --mean-length 1", 1, "two supervised tokens in a row");
    refuse("plan --rows 5 --mean-length 9 --tflops 0", 1, "--tflops is 0");
    refuse("plan --rows 5 --mean-length 9 --target-layer-ids 99", 1, "layer id 99");
    refuse("plan --data-path /nonexistent", 1, "/nonexistent");
    let unknown = "plan --rows 5 --mean-length 9 --gpu H100 --json";
    assert_eq!(json(unknown, dir.path())["step_seconds"], Value::Null);
}
