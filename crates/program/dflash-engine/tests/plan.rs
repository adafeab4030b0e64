//! `dflash plan` as users run it, and its memory compared with that of a real step.

use std::path::Path;
use std::process::Command;

use dflash_target::{Target, TargetConfig};
use serde_json::Value;
use tch::{Device, Kind};

const TOKENS: usize = 1024;
const DOCUMENTS: usize = 4;

/// A directory with a target's config.json and weights, without a tokenizer.
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
        // Threads have their own buffers, and the number of cores varies.
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

/// Planned and measured: (activations, everything but what the benchmark lacks) and the peak, MiB.
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
             --anchors {anchors} --block 16 --layers 5 --aux-layers 5 --steps 1 --warmup 1"
        ),
        target,
    );
    // its accuracy shows on an idle machine (LOG.md)
    assert!(bench["predicted_ms"].as_f64().unwrap() > 0.0);
    let mib = |bytes: &Value| bytes.as_f64().unwrap() / f64::from(1 << 20);
    let streamed = mib(&plan["memory"]["window"]) + mib(&plan["memory"]["ahead"]);
    let total = mib(&plan["total_bytes"]) - streamed;
    ((mib(&plan["memory"]["activations"]), total), bench["peak_mib"].as_f64().unwrap())
}

#[test]
fn planned_memory_is_near_what_a_step_takes() {
    let dir = target();
    let ((few, few_total), few_peak) = both(16, dir.path());
    let ((many, many_total), many_peak) = both(256, dir.path());
    // Additional anchors add only activations.
    let ratio = (many - few) / (many_peak - few_peak);
    assert!((0.6..1.4).contains(&ratio), "planned {many} - {few}, peaks {many_peak}, {few_peak}");
    for (planned, peak) in [(few_total, few_peak), (many_total, many_peak)] {
        assert!((0.6..1.4).contains(&(planned / peak)), "planned {planned}, measured {peak} MiB");
    }
}

#[test]
fn a_plan_says_what_checkpoints_take_on_the_disk() {
    let target = target();
    let flags = "plan --device cpu --rows 40 --mean-length 100 --total-seq-len 256 --epochs 3";
    let plan = json(&format!("{flags} --json"), target.path());
    // Float32 master weights and two moments, and the bfloat16 model.
    let bytes = 14 * plan["parameters"].as_u64().unwrap();
    let found = plan["checkpoint_bytes"].as_u64().unwrap();
    assert!(found >= bytes && found < bytes + bytes / 50, "{found} and {bytes}");
    assert_eq!(plan["checkpoints"], 3);
    let (_, table, _) = engine(flags, target.path());
    let gb = found as f64 / 1e9;
    let line = format!("disk        {gb:.2} GB a checkpoint, {:.2} GB by the end", 3.0 * gb);
    assert!(table.contains(&line), "{table}");
    let muon = json(&format!("{flags} --json --optimizer muon"), target.path());
    assert!(muon["checkpoint_bytes"].as_u64() < plan["checkpoint_bytes"].as_u64());
}

#[test]
fn a_plan_counts_steps_arithmetic_and_hidden_states() {
    let dir = target();
    let line = "plan --device cpu --rows 10 --mean-length 100 --total-seq-len 256 --epochs 2 \
                --nproc 2 --num-layers 2 --max-anchors 8 --tflops 0.001";
    let plan = json(&format!("{line} --json"), dir.path());
    // Two documents per row, two rows per step.
    assert_eq!(plan["rows_per_epoch"], 5);
    assert_eq!(plan["steps_per_epoch"], 3);
    assert_eq!(plan["steps"], 6);
    assert_eq!(plan["tokens_per_epoch"], 1000);
    let number = |key: &str| plan[key].as_f64().unwrap();
    let seconds = number("flops_per_step") / 2.0 / 1e9;
    assert!((number("step_seconds") - seconds).abs() < 1e-9 * seconds);
    // 200 tokens, 2 ranks, 5 auxiliary layers of 128 numbers in bfloat16.
    assert_eq!(number("hidden_bytes_per_step"), 200.0 * 2.0 * 5.0 * 128.0 * 2.0);
    let held_out = json(&format!("{line} --json --validation-ratio 0.4"), dir.path());
    assert_eq!((&held_out["rows_per_epoch"], &held_out["steps"]), (&3.into(), &4.into()));
    let target_distribution = json(&format!("{line} --json --loss kl"), dir.path());
    assert_eq!(
        target_distribution["hidden_bytes_per_step"].as_f64(),
        Some(200.0 * 2.0 * 6.0 * 256.0)
    );
    let (_, table, _) = engine(line, dir.path());
    for part in ["memory of a rank", "activations", "TFLOP a step", "MB/s from the servers"] {
        assert!(table.contains(part), "{table}");
    }
}

#[test]
fn the_window_holds_three_rows_of_the_run_unless_it_is_set() {
    let dir = target();
    let mib = |more: &str, part: &str| {
        let line = format!(
            "plan --device cpu --rows 10 --mean-length 100 --num-layers 2 --max-anchors 8 --json {more}"
        );
        json(&line, dir.path())["memory"][part].as_f64().unwrap() / f64::from(1 << 20)
    };
    assert_eq!(mib("--total-seq-len 256", "window"), 256.0);
    // 5 auxiliary layers of 128 numbers in bfloat16; one more layer for the target's distribution.
    assert_eq!(mib("--total-seq-len 131072", "window"), 3.0 * 160.0);
    assert_eq!(mib("--total-seq-len 131072 --loss kl", "window"), 3.0 * 192.0);
    assert_eq!(mib("--total-seq-len 131072 --window-mib 9", "window"), 9.0);
    assert!(mib("--total-seq-len 256 --loss kl", "ahead") > mib("--total-seq-len 256", "ahead"));
}

#[test]
fn a_target_in_the_process_is_part_of_the_plan() {
    let dir = target();
    let line = "plan --device cpu --rows 10 --mean-length 100 --total-seq-len 256 --epochs 2 \
                --num-layers 2 --max-anchors 8 --tflops 0.001 --target-layer-ids 1,3,5";
    let plan = |more: &str| json(&format!("{line} --json {more}"), dir.path());
    let (served, colocated) = (plan(""), plan("--colocate"));
    let number = |plan: &Value, key: &str| plan[key].as_f64().unwrap();
    let bytes = |plan: &Value, part: &str| plan["memory"][part].as_f64().unwrap();
    // Five layers of q, k, v, o and an MLP three times as wide, in float32.
    let layer = 128.0 * (128.0 + 64.0 + 64.0) + 128.0 * 128.0 + 3.0 * 128.0 * 384.0;
    assert_eq!(bytes(&colocated, "target"), 5.0 * layer * 4.0);
    assert_eq!((bytes(&served, "target"), bytes(&served, "target_pass")), (0.0, 0.0));
    assert!(bytes(&colocated, "target_pass") > 0.0);
    assert_eq!(bytes(&colocated, "window"), 0.0);
    // Two documents of 100 tokens per row.
    let pairs = 2.0 * 5.0 * 100.0 * 101.0 / 2.0;
    let flops = 2.0 * 200.0 * 5.0 * layer + 4.0 * 128.0 * pairs;
    assert_eq!(number(&colocated, "target_flops_per_step"), flops);
    assert_eq!(number(&served, "target_flops_per_step"), 0.0);
    let seconds = (number(&colocated, "flops_per_step") + flops) / 1e9;
    assert!((number(&colocated, "step_seconds") - seconds).abs() < 1e-9 * seconds);
    assert_eq!(colocated["hidden_bytes_per_second"], Value::Null);
    let kept = ["frozen", "activations", "logits", "masters"];
    kept.iter().for_each(|part| assert_eq!(bytes(&colocated, part), bytes(&served, part)));
    // They alternate: the larger of the two counts.
    let turns = bytes(&served, "activations") + bytes(&served, "logits");
    let more = (bytes(&colocated, "target_pass") - turns).max(0.0);
    let expected =
        number(&served, "total_bytes") - bytes(&served, "window") - bytes(&served, "ahead")
            + bytes(&colocated, "target")
            + more;
    assert!((number(&colocated, "total_bytes") - expected).abs() < 1.0);
    // A type other than the draft's needs its own embedding; the last layer needs all layers.
    let other = plan("--colocate --target-dtype bfloat16");
    assert_eq!(bytes(&other, "target"), (5.0 * layer + 512.0 * 128.0) * 2.0);
    assert_eq!(bytes(&plan("--colocate --loss kl"), "target"), 8.0 * layer * 4.0);
    let (_, table, _) = engine(&format!("{line} --colocate"), dir.path());
    for part in ["target's layers", "or target's pass, if larger", "in turns with the draft"] {
        assert!(table.contains(part), "{table}");
    }
    let (_, table, _) = engine(line, dir.path());
    assert!(!table.contains("target's pass"), "{table}");
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
    refuse("plan --rows 5 --mean-length 1", 1, "two consecutive supervised tokens");
    refuse("plan --rows 5 --mean-length 9 --tflops 0", 1, "--tflops is 0");
    refuse("plan --rows 5 --mean-length 9 --target-layer-ids 99", 1, "layer id 99");
    refuse("plan --data-path /nonexistent", 1, "/nonexistent");
    refuse(
        "plan --rows 5 --mean-length 9 --device h900",
        1,
        "--device is h900, but the known ones are",
    );
    refuse("plan --rows 5 --mean-length 9 --device cuda:1", 2, "pass cuda, or a GPU's name");
}

#[test]
fn a_gpu_is_budgeted_part_by_part_without_one() {
    let dir = target();
    let line = "plan --rows 64 --mean-length 256 --total-seq-len 1024 --max-anchors 64";
    for gpu in ["h200", "h100", "b200", "a100", "4090"] {
        let plan = json(&format!("{line} --device {gpu} --json"), dir.path());
        let budget = &plan["budget"];
        let parts = budget["parts"].as_array().unwrap();
        let sum: f64 = parts.iter().map(|part| part["ms"].as_f64().unwrap()).sum();
        let gpu_ms = budget["gpu_ms"].as_f64().unwrap();
        assert!(sum > 0.0 && (sum / gpu_ms - 1.0).abs() < 1e-9, "{budget}");
        let step_ms = budget["step_ms"].as_f64().unwrap();
        assert!(step_ms >= gpu_ms);
        // the run's time follows from the step's
        let seconds = plan["step_seconds"].as_f64().unwrap();
        let tflop = plan["flops_per_step"].as_f64().unwrap() / 1e12;
        let rate = budget["useful_tflop"].as_f64().unwrap() / (step_ms / 1e3);
        assert!((seconds / (tflop / rate) - 1.0).abs() < 1e-9, "{seconds} {tflop} {rate}");
    }
    let (_, table, _) = engine(&format!("{line} --gpu H200"), dir.path());
    for part in ["a step on H200, computed, not measured", "launches", "optimizer", "loss", "MFU"] {
        assert!(table.contains(part), "{table}");
    }
    let given = json(&format!("{line} --gpu H100 --tflops 100 --json"), dir.path());
    assert_eq!(given["tflops"], 100.0);
    for without in ["--device cpu", "--device h100 --compute-dtype float32"] {
        let plan = json(&format!("{line} {without} --json"), dir.path());
        assert_eq!(plan["budget"], Value::Null, "{without}");
    }
}

/// Requirements beyond the trainers, by hand: the target's servers, the stream, the all-reduce.
#[test]
fn a_gpus_plan_tells_all_that_the_run_takes() {
    let dir = target();
    let line = "plan --rows 64 --mean-length 256 --total-seq-len 1024 --max-anchors 64 --device h200 \
                --target-layer-ids 1,3,5 --nproc 4 --gradient-accumulation-steps 2";
    let plan = json(&format!("{line} --json"), dir.path());
    let number = |path: &str| plan.pointer(path).and_then(Value::as_f64).expect(path);
    let close = |found: f64, expected: f64| {
        assert!((found / expected - 1.0).abs() < 1e-9, "{found} and {expected}");
    };
    // Five layers of q, k, v, o and an MLP three times as wide, and pairs of four documents of 256 tokens.
    let layer = 128.0 * (128.0 + 64.0 + 64.0) + 128.0 * 128.0 + 3.0 * 128.0 * 384.0;
    let products = 2.0 * 1024.0 * 5.0 * layer;
    let attention = 4.0 * 128.0 * 5.0 * 4.0 * 256.0 * 257.0 / 2.0;
    close(number("/servers/row_tflop"), (products + attention) / 1e12);
    let [best, slow] = [0.75, 0.65].map(|share| (products / share + attention / 0.35) / 989e12);
    close(number("/servers/row_seconds/0"), best);
    close(number("/servers/row_seconds/1"), slow);
    // A step has two rows per rank.
    let (step, slow_step) = (number("/step_seconds"), number("/slow_step_seconds"));
    close(number("/servers/per_trainer/0"), best / (step / 2.0));
    close(number("/servers/per_trainer/1"), slow / (slow_step / 2.0));
    assert_eq!(number("/servers/gpus/0"), (4.0 * best / (step / 2.0)).ceil());
    let budget = number("/budget/slow/step_ms") / number("/budget/step_ms");
    close(slow_step / step, budget);
    assert!(budget >= 1.0);
    let rate = number("/hidden_bytes_per_second") / 4.0;
    close(number("/stream/bytes_per_second"), rate);
    close(number("/stream/assembly_share"), rate / 6.5e9);
    close(number("/stream/gbit_per_second"), rate * 8.0 / 1e9);
    close(number("/all_reduce/bytes"), number("/parameters") * 4.0 * 1.5);
    let (_, table, _) = engine(line, dir.path());
    for part in [
        "stream      ",
        "of its assembling thread's copy rate",
        "Gbit/s of the network",
        "servers     ",
        "GPUs per trainer",
        "all-reduce  ",
        "over NVLink",
        "expandable segments, set by default",
        "differ from run to run",
        "if products reach 0.65 of the peak instead of 0.75",
    ] {
        assert!(table.contains(part), "{part} in {table}");
    }
    let colocated = json(&format!("{line} --colocate --json"), dir.path());
    assert_eq!((&colocated["servers"], &colocated["stream"]), (&Value::Null, &Value::Null));
    let both = colocated["step_seconds"].as_f64().unwrap();
    close(both - 2.0 * best, step);
    let alone = json(&format!("{line} --json").replace("--nproc 4", ""), dir.path());
    assert_eq!(alone["all_reduce"], Value::Null);
    let cpu = json(&format!("{line} --json").replace("h200", "cpu"), dir.path());
    assert_eq!((&cpu["servers"], &cpu["all_reduce"]), (&Value::Null, &Value::Null));
}

#[test]
fn a_plan_takes_what_a_gpu_was_measured_to_reach() {
    let dir = target();
    let line = "plan --rows 64 --mean-length 256 --total-seq-len 1024 --max-anchors 64 --json";
    let gpu = format!("{line} --device h200");
    let file = dir.path().join("measured.json");
    let measured = |share: f64| {
        let ms = 2.0 * 4096.0f64.powi(3) / (share * 989e12) * 1e3;
        let product = |part: &str| {
            serde_json::json!({
                "part": part, "name": "x", "rows": 4096, "inputs": 4096, "outputs": 4096, "count": 1,
                "ms": ms, "tflops": share * 989.0, "share": share,
            })
        };
        let products: Vec<Value> =
            ["features", "projections", "mlp", "loss"].map(product).into_iter().collect();
        let measured = serde_json::json!({
            "device": "NVIDIA H200", "products": products, "copy_gb_s": 0.85 * 4800.0,
            "flash": {"forward_tflops": 0.35 * 989.0, "backward_tflops": 0.30 * 989.0},
            "operator_us": 4.0,
        });
        std::fs::write(&file, measured.to_string()).unwrap();
        json(&format!("{gpu} --measured {}", file.display()), dir.path())
    };
    let assumed = json(&gpu, dir.path());
    let parts = |plan: &Value| plan["budget"]["gpu_ms"].as_f64().unwrap();
    // Measurements equal to the assumed shares give the same plan, without a range.
    let same = measured(0.75);
    assert!((parts(&same) / parts(&assumed) - 1.0).abs() < 1e-6);
    assert_eq!((&same["slow_step_seconds"], &same["budget"]["slow"]), (&Value::Null, &Value::Null));
    assert!(parts(&measured(0.01)) > 1.01 * parts(&assumed));
    let flags = format!("{gpu} --measured {}", file.display()).replace(" --json", "");
    let (_, table, _) = engine(&flags, dir.path());
    assert!(table.contains("computed by the shares measured in"), "{table}");
    let refuse = |arguments: &str, expected: &str| {
        let (code, _, stderr) = engine(arguments, dir.path());
        assert_eq!(code, Some(1), "{stderr}");
        assert!(stderr.contains(expected), "{expected} in {stderr}");
    };
    refuse(&flags.replace("h200", "h100"), "is of NVIDIA H200, and the plan of H100");
    refuse(&flags.replace("h200", "cpu"), "the plan is for no GPU that is known");
    // The bench's output for this CPU: not a GPU's, but every product has a time.
    let bench = "bench train-step --json --products --device cpu --tokens 64 --docs 2 --anchors 4 \
                 --block 4 --layers 2 --aux-layers 2 --steps 1 --warmup 0";
    let report = json(bench, dir.path());
    let products = report["measured"]["products"].as_array().unwrap();
    assert_eq!(products.len(), 19);
    for product in products {
        assert!(product["ms"].as_f64().unwrap() > 0.0, "{product}");
        assert!(product["tflops"].as_f64().unwrap() > 0.0 && product["share"].is_null());
    }
    assert!(report["measured"]["copy_gb_s"].as_f64().unwrap() > 0.0);
    std::fs::write(&file, report.to_string()).unwrap();
    refuse(&flags, "that file is of cpu, and the plan of H200");
    let (_, table, _) = engine(&bench.replace("--json ", ""), dir.path());
    assert!(
        table.contains("mlp         gate_up, forward: ") && table.contains("a copy"),
        "{table}"
    );
    let without = json(&bench.replace("--products ", ""), dir.path());
    assert_eq!(without["measured"], Value::Null);
}

#[test]
fn a_plan_for_a_gpu_takes_the_device_of_training_too() {
    let dir = target();
    let file = dir.path().join("run.toml");
    std::fs::write(&file, "[train]\nsave_path = 'out'\ndevice = 'cuda'\n").unwrap();
    let rows = "--rows 9 --mean-length 64 --json";
    let device = |more: &str| {
        json(&format!("plan {} {rows} {more}", file.display()), dir.path())["device"].clone()
    };
    assert_eq!(device("--gpu h200"), "H200");
    assert_ne!(device(""), "H200");
}

#[test]
fn state_that_is_divided_is_not_counted_on_each_gpu() {
    let dir = target();
    let line = "plan --rows 64 --mean-length 256 --max-anchors 64 --device h100 --nproc 4 --json";
    let bytes = |zero: &str| {
        let plan = json(&format!("{line} --zero {zero}"), dir.path());
        (plan["total_bytes"].as_f64().unwrap(), plan["memory"].clone())
    };
    let ((whole, parts), (divided, _)) = (bytes("0"), bytes("1"));
    let state = parts["masters"].as_f64().unwrap() + parts["moments"].as_f64().unwrap();
    let saved = (whole - divided) / (0.75 * state);
    assert!((saved - 1.0).abs() < 1e-6, "{saved} of what the other ranks hold");
}

/// The run files whose hidden states come from a stock vLLM, with the dimensions of their released
/// targets (tests/configs): each can be planned from the run file and a config.json.
#[test]
fn every_recipe_with_a_stock_vllm_can_be_planned() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    // target, layers, hidden size, rows of the embedding
    let recipes = [
        ("qwen3.5-27b-vllm", "Qwen3.5-27B", 64, 5120.0, 248_320.0),
        ("qwen3-coder-30b-a3b-vllm", "Qwen3-Coder-30B-A3B-Instruct", 48, 2048.0, 151_936.0),
        ("gemma-4-31b-vllm", "gemma-4-31B-it", 60, 5376.0, 262_144.0),
        ("gpt-oss-120b-vllm", "gpt-oss-120b", 36, 2880.0, 201_088.0),
        ("kimi-k2.5-vllm", "Kimi-K2.5", 61, 7168.0, 163_840.0),
    ];
    for (recipe, target, layers, hidden, rows) in recipes {
        let file = root.join(format!("recipes/{recipe}.toml"));
        let text = std::fs::read_to_string(&file).unwrap();
        let target = root.join("tests/configs").join(target);
        let line = format!("plan {} --device h100 --rows 1000 --mean-length 900", file.display());
        let plan = json(&format!("{line} --json"), &target);
        let number = |key: &str| plan[key].as_f64().unwrap();
        // The draft uses five auxiliary layers per token in bfloat16.
        let aux_tokens = number("hidden_bytes_per_step") / (5.0 * hidden * 2.0);
        let tokens = number("tokens_per_epoch") / number("steps_per_epoch");
        assert!(
            (aux_tokens / tokens - 1.0).abs() < 0.01,
            "{recipe}: {aux_tokens} and {tokens} tokens"
        );
        // Embedding and lm_head are on the GPU, and everything fits into 80 GB.
        let least = rows * hidden * 2.0;
        assert!(
            (least..80e9).contains(&number("total_bytes")),
            "{recipe}: {}",
            plan["total_bytes"]
        );
        assert!(number("steps") > 10.0 && number("parameters") > 1e8, "{recipe}: {plan}");
        let (code, _, stderr) =
            engine(&format!("{line} --target-layer-ids {}", layers + 1), &target);
        assert_eq!(code, Some(1), "{recipe}");
        assert!(stderr.contains(&format!("{}", layers + 1)), "{recipe}: {stderr}");
        // vLLM is told to capture the last layer too, which verifies the source.
        let command = format!(", {layers}]");
        assert!(text.contains(&command), "{recipe}: no {command:?}");
        assert!(text.contains("trust_layer_ids = true") && text.contains("shared_storage_path"));
    }
}
