//! The run files of recipes/, stage by stage: settings parse, every file that a stage reads exists or was made
//! by an earlier one, layers fit the target, engines can read what is trained, and the plan fits the machine.
//! One of them runs to its end.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::pipeline::{demo, prepared, scratch, target};
use crate::program::{dflash, path, run};

/// A recipe, its target as published (tests/configs, or `numbers` below), and its GPUs.
struct Recipe {
    name: &'static str,
    target: &'static str,
    layers: u32,
    gpu: &'static str,
}

const fn recipe(
    name: &'static str,
    (target, layers): (&'static str, u32),
    gpu: &'static str,
) -> Recipe {
    Recipe { name, target, layers, gpu }
}

const RECIPES: [Recipe; 8] = [
    recipe("qwen3-8b-4gpu", ("Qwen3-8B", 36), "h100"),
    recipe("qwen3-4b-1gpu", ("Qwen3-4B", 36), "l40s"),
    recipe("llama-3.1-8b-4gpu", ("Llama-3.1-8B-Instruct", 32), "h100"),
    recipe("qwen3.5-27b-vllm", ("Qwen3.5-27B", 64), "h100"),
    recipe("qwen3-coder-30b-a3b-vllm", ("Qwen3-Coder-30B-A3B-Instruct", 48), "h100"),
    recipe("gemma-4-31b-vllm", ("gemma-4-31B-it", 60), "h100"),
    recipe("gpt-oss-120b-vllm", ("gpt-oss-120b", 36), "h100"),
    recipe("kimi-k2.5-vllm", ("Kimi-K2.5", 61), "h100"),
];
/// Sets of `dflash eval` and of `dflash prepare` that the recipes name.
const EVAL_SETS: [&str; 10] = [
    "gsm8k",
    "math500",
    "aime24",
    "aime25",
    "humaneval",
    "mbpp",
    "livecodebench",
    "swe-bench",
    "mt_bench",
    "alpaca",
];
const PREPARE_SETS: [&str; 7] =
    ["sharegpt", "ultrachat", "gsm8k", "magpie", "open-perfectblend", "nemotron", "codealpaca"];
/// What `make demo` leaves.
const OF_THE_DEMO: [&str; 3] =
    ["demo-run/target", "demo-run/conversations.jsonl", "demo-run/prompts.jsonl"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the tree").to_owned()
}

fn file(name: &str) -> String {
    root().join(format!("recipes/{name}.toml")).display().to_string()
}

/// A stage's resolved settings.
struct Stage(String);

impl Stage {
    fn read(command: &str, file: &str) -> Self {
        Self(dflash(&format!("{command} {file} --dump-config")).ok().stdout)
    }

    /// A setting's values, without quotes and brackets; none if it has none.
    fn values(&self, key: &str) -> Vec<String> {
        let start = format!("{key} = ");
        let line = self.0.lines().find_map(|line| line.strip_prefix(&start)).unwrap_or_default();
        let parts = line.split(',').map(|part| part.trim_matches([' ', '"', '[', ']']));
        parts.filter(|part| !part.is_empty()).map(str::to_owned).collect()
    }

    fn value(&self, key: &str) -> String {
        self.values(key).first().cloned().unwrap_or_else(|| panic!("no {key} in\n{}", self.0))
    }
}

/// Walks through the stages of a run file in the order of run.sh.
fn check_stages(name: &str) {
    let file = file(name);
    let text = fs::read_to_string(&file).unwrap();
    let has = |table: &str| text.lines().any(|line| line.starts_with(&format!("[{table}]")));
    let mut made: Vec<String> = OF_THE_DEMO.map(str::to_owned).to_vec();
    let is_there = |made: &[String], what: &str| {
        made.iter().any(|it| it == what) || root().join(what).exists()
    };
    if has("regenerate") {
        let stage = Stage::read("regenerate", &file);
        assert!(is_there(&made, &stage.value("data")), "{name}: {}", stage.0);
        made.push(stage.value("output"));
    }
    let prepare = Stage::read("prepare", &file);
    for data in prepare.values("data") {
        let is_known = PREPARE_SETS.contains(&data.as_str()) || is_there(&made, &data);
        assert!(is_known, "{name}: [prepare] reads {data}, which nothing makes");
    }
    made.push(prepare.value("output"));
    let train = Stage::read("train", &file);
    assert!(made.contains(&train.value("data_path")), "{name}: {}", train.0);
    assert_eq!(train.value("target"), prepare.value("target"), "{name}");
    // Longer documents than a row would be cut again.
    let number = |stage: &Stage, key: &str| stage.value(key).parse::<u64>().unwrap();
    assert!(number(&train, "total_seq_len") >= number(&prepare, "seq_length"), "{name}");
    // Checkpoints have z-lab's layout, which has no place for a pruned vocabulary.
    assert!(
        train.values("draft_vocab_size").is_empty(),
        "{name}: engines would draft from all tokens"
    );
    let colocates = train.value("colocate") == "true";
    if has("hidden_server") {
        assert!(!colocates, "{name}: who runs the target?");
        let server = Stage::read("hidden-server", &file);
        for key in ["target", "target_layer_ids"] {
            assert_eq!(server.values(key), train.values(key), "{name}: {key}");
        }
    } else {
        // The first lines say how to start the vLLM.
        assert!(colocates || text.contains("#   vllm serve "), "{name}: nobody runs the target");
    }
    if has("eval") {
        let eval = Stage::read("eval --draft ngram", &file);
        assert_eq!(eval.value("target"), train.value("target"), "{name}");
        for set in eval.values("prompts") {
            let is_known = EVAL_SETS.contains(&set.as_str()) || is_there(&made, &set);
            assert!(is_known, "{name}: [eval] reads {set}, which nothing makes");
        }
    }
}

#[test]
fn every_stage_of_every_recipe_has_what_it_reads() {
    let names = RECIPES.iter().map(|recipe| recipe.name).chain(["tiny-cpu"]);
    let names: Vec<&str> = names.collect();
    let files = fs::read_dir(root().join("recipes")).unwrap();
    let files =
        files.filter(|it| it.as_ref().unwrap().path().extension().is_some_and(|e| e == "toml"));
    assert_eq!(files.count(), names.len(), "a recipe is not in this test's table");
    names.into_iter().for_each(check_stages);
}

/// A target's config.json: from tests/configs, or with the published numbers of a dense one.
fn config(target: &str, dir: &str) -> String {
    let known = root().join("tests/configs").join(target);
    if known.is_dir() {
        return known.display().to_string();
    }
    let [hidden, inner, layers, heads, vocabulary, tied] = match target {
        "Qwen3-8B" => [4096, 12288, 36, 32, 151_936, 0],
        "Qwen3-4B" => [2560, 9728, 36, 32, 151_936, 1],
        "Llama-3.1-8B-Instruct" => [4096, 14336, 32, 32, 128_256, 0],
        other => panic!("no numbers of {other}"),
    };
    let family = if target.starts_with("Qwen3") { ("Qwen3", "qwen3") } else { ("Llama", "llama") };
    let numbers = serde_json::json!({
        "architectures": [format!("{}ForCausalLM", family.0)], "model_type": family.1,
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": vocabulary, "tie_word_embeddings": tied == 1, "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0, "max_position_embeddings": 40_960, "hidden_act": "silu",
    });
    fs::write(format!("{dir}/config.json"), numbers.to_string()).unwrap();
    dir.to_owned()
}

#[test]
fn every_recipe_for_gpus_fits_its_machine_with_the_layers_it_names() {
    for recipe in &RECIPES {
        let (_dir, dir) = scratch();
        let (name, target) = (recipe.name, config(recipe.target, &dir));
        let text = fs::read_to_string(file(name)).unwrap();
        let ids = Stage::read("train", &file(name)).values("target_layer_ids");
        let last: u32 = ids.last().unwrap().parse().unwrap();
        assert!(last < recipe.layers, "{name}: {ids:?} of {}", recipe.layers);
        if text.contains("#   vllm serve ") {
            // vLLM captures the trained layers, and the last one that proves the source.
            let captured = format!("[{}, {}]", ids.join(", "), recipe.layers);
            assert!(text.contains(&captured), "{name}: no {captured}");
        }
        let line = format!(
            "plan {} --target {target} --device {} --rows 2000 --mean-length 1200 --json",
            file(name),
            recipe.gpu
        );
        let plan: serde_json::Value = serde_json::from_str(&dflash(&line).ok().stdout).unwrap();
        let gb = plan["total_bytes"].as_f64().unwrap() / 1e9;
        let most = if recipe.gpu == "h100" { 80.0 } else { 48.0 };
        assert!(gb > 5.0 && gb < 0.95 * most, "{name}: {gb} GB");
        assert!(plan["steps"].as_u64().unwrap() > 10, "{name}");
    }
}

/// The planner's best way for the numbers of the flagship recipe is the recipe's own.
#[test]
fn the_flagship_recipe_is_the_planner_s_best_way() {
    let (_dir, dir) = scratch();
    let target = config("Qwen3-8B", &dir);
    let line = format!(
        "plan {} --target {target} --device h100 --gpus 4 --rows 300000 --mean-length 1200 --suggest",
        file("qwen3-8b-4gpu")
    );
    let found: serde_json::Value =
        serde_json::from_str(&dflash(&format!("{line} --json")).ok().stdout).unwrap();
    let ways = found["ways"].as_array().unwrap();
    let hours = |way: &serde_json::Value| way["hours"][1].as_f64().unwrap();
    assert!(ways[0]["reason"].is_null(), "{}", ways[0]);
    assert_eq!((&ways[0]["trainers"], &ways[0]["servers"]), (&4.into(), &0.into()), "{}", ways[0]);
    let train = Stage::read("train", &file("qwen3-8b-4gpu"));
    assert_eq!((train.value("colocate").as_str(), train.value("nproc").as_str()), ("true", "4"));
    let splits: Vec<_> = ways.iter().filter(|way| way["servers"] != 0).collect();
    assert_eq!(splits.len(), 3, "{found:#}");
    for split in splits {
        assert!(hours(split) > hours(&ways[0]), "{split}");
        assert_eq!(
            split["commands"].as_array().unwrap().len() as u64,
            1 + split["servers"].as_u64().unwrap()
        );
    }
    // Fewer anchors are said to be other training, and take less time.
    let fewer = ways.iter().find(|way| way["changes_training"] == true).unwrap();
    assert!(hours(fewer) < 0.7 * hours(&ways[0]), "{fewer}");
    let table = dflash(&line).ok().stdout;
    let command = ways[0]["commands"].as_array().unwrap().last().unwrap().as_str().unwrap();
    assert!(table.contains(&format!("\n  {command}\n")), "{table}");
}

/// run.sh with words that shells print instead of running.
fn dry_run(name: &str, variables: &[(&str, &str)]) -> Vec<String> {
    let (_dir, dir) = scratch();
    let mut command = Command::new("bash");
    command.arg(root().join("recipes/run.sh")).args(["--dry-run", &file(name)]);
    command.current_dir(&dir).env("DFLASH", path()).envs(variables.iter().copied());
    for other in ["SERVE_GPUS", "TRAIN_GPUS"] {
        if !variables.iter().any(|(name, _)| *name == other) {
            command.env_remove(other);
        }
    }
    run(&mut command).ok().stdout.lines().map(str::to_owned).collect()
}

#[test]
fn run_sh_goes_through_every_recipe() {
    for recipe in &RECIPES {
        let lines = dry_run(recipe.name, &[("GPU_COUNT", "4")]);
        let stages: Vec<&str> =
            lines.iter().map(|line| line.split_whitespace().nth(1).unwrap()).collect();
        let expect = match recipe.name.ends_with("-vllm") {
            true => vec!["prepare", "train", "report"],
            false => vec!["prepare", "train", "report", "eval"],
        };
        assert_eq!(stages, expect, "{}: {lines:?}", recipe.name);
    }
}

#[test]
fn servers_and_ranks_get_gpus_of_their_own() {
    let places = |variables: &[(&str, &str)]| {
        let lines = dry_run("tiny-cpu", variables);
        let of = |command: &str| {
            let line = lines.iter().find(|line| line.contains(command)).unwrap();
            line.strip_prefix("CUDA_VISIBLE_DEVICES=")
                .map(|rest| rest.split(' ').next().unwrap().to_owned())
        };
        [of("hidden-server "), of(" train "), of(" eval ")].map(Option::unwrap_or_default)
    };
    assert_eq!(places(&[("GPU_COUNT", "4")]), ["0", "1,2,3", "0"]);
    assert_eq!(places(&[("GPU_COUNT", "1")]), ["0", "", "0"]);
    assert_eq!(places(&[("GPU_COUNT", "0")]), ["", "", ""]);
    assert_eq!(places(&[("SERVE_GPUS", "3"), ("TRAIN_GPUS", "0,1")]), ["3", "0,1", "3"]);
}

#[test]
fn the_recipe_for_cpus_runs_to_its_end() {
    let (_dir, dir) = scratch();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let text = fs::read_to_string(file("tiny-cpu")).unwrap();
    let mut small = text.replace("demo-run", &demo().display().to_string());
    for (was, is) in [
        ("limit = 2560", "limit = 16"),
        ("max_steps = 1000", "max_steps = 3"),
        ("limit = 100", "limit = 2"),
        ("max_new_tokens = 220", "max_new_tokens = 16"),
        ("save_path =", &format!("endpoint = \"http://127.0.0.1:{port}/v1\"\nsave_path =")),
    ] {
        assert!(small.contains(was), "{was}");
        small = small.replace(was, is);
    }
    fs::write(format!("{dir}/tiny.toml"), small).unwrap();
    let mut command = Command::new("bash");
    // No alias, and no program on the path: run.sh finds that of its tree, or the one named.
    command.arg(root().join("recipes/run.sh")).arg("tiny.toml").current_dir(&dir);
    command.env("DFLASH", path());
    let finished = run(&mut command).ok();
    assert!(finished.stdout.contains("acceptance length (tau)"), "{finished:?}");
    let eval = fs::read_to_string(format!("{dir}/output/tiny/eval.json")).unwrap();
    let eval: serde_json::Value = serde_json::from_str(&eval).unwrap();
    assert_eq!(eval["lossless"]["holds"], true, "{eval}");
    assert!(Path::new(&dir).join("output/tiny/drafts/report.html").is_file(), "{finished:?}");
}

/// `dflash train` on one core, whatever the machine has, against a server that is not there.
fn start_on_a_core(data: &str, flags: &str) -> String {
    let (_dir, dir) = scratch();
    let mut command = Command::new("taskset");
    command.args(["-c", "0"]).arg(path()).args([
        "train",
        "--target",
        &target(),
        "--data-path",
        data,
    ]);
    command.args([
        "--save-path",
        &format!("{dir}/drafts"),
        "--vllm-endpoint",
        "http://127.0.0.1:9/v1",
    ]);
    command.args(["--wait-for-server", "1", "--device", "cpu"]).args(flags.split_whitespace());
    run(&mut command).fault().to_owned()
}

#[test]
fn a_run_of_days_on_a_cpu_is_told_values_that_finish_in_hours() {
    let (_dir, dir) = scratch();
    let data = prepared(&dir);
    let said = start_on_a_core(&data, "--epochs 100000");
    let (before, after) =
        said.split_once(" on this CPU; with ").unwrap_or_else(|| panic!("{said}"));
    assert!(before.contains("this run takes about "), "{said}");
    assert!(
        after.starts_with("--num-layers ") && after.contains("--epochs 1 it takes about "),
        "{said}"
    );
    assert!(after.contains("dflash plan --suggest"), "{said}");
    let said = start_on_a_core(&data, "--epochs 1");
    assert!(!said.contains("on this CPU"), "{said}");
}

#[test]
fn train_says_that_engines_do_not_read_a_pruned_vocabulary_from_its_checkpoints() {
    let (_dir, dir) = scratch();
    let data = prepared(&dir);
    let said = start_on_a_core(&data, "--epochs 1 --draft-vocab-size 300");
    for part in ["--draft-vocab-size 300", "--format speculators", "vLLM and SGLang"] {
        assert!(said.contains(part), "{part} is not in {said}");
    }
    assert!(!start_on_a_core(&data, "--epochs 1").contains("vocab"));
}
