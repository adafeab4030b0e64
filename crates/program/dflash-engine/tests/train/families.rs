//! Training for targets whose head alone is supported here: stored hidden states of tiny models of
//! other families, from the first step to an export.

use std::path::Path;

use dflash_data::{DatasetWriter, Sample, WriterOptions};
use dflash_golden::entries;
use dflash_hidden_states::{Dtype, HiddenStates, OfflineFiles};
use dflash_tensor::checkpoint::{TensorFile, write_safetensors};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::world::{Run, losses};

/// Number of layers of the vectors' models, and the id of the last one.
const LAST: u32 = 2;
const DOCUMENTS: u64 = 8;
const TOKENS: usize = 24;

/// A directory with a target's head, data and stored states.
struct Family {
    dir: tempfile::TempDir,
}

impl Family {
    /// The vectors' model `name`, as a sharded checkpoint that lacks the layers' shards.
    fn new(name: &str) -> Self {
        let found = entries("target_heads", None);
        let golden = &found.iter().find(|entry| entry.name == name).expect("its vectors").path;
        let family = Self { dir: tempfile::tempdir().unwrap() };
        family.write_target(golden);
        family.write_data();
        family
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_string_lossy().into_owned()
    }

    fn write_target(&self, golden: &Path) {
        let target = self.path("target");
        std::fs::create_dir(&target).unwrap();
        std::fs::copy(golden.join("config.json"), target.join("config.json")).unwrap();
        let file = TensorFile::open(&golden.join("model.safetensors")).unwrap();
        let mut shards = json!({ "model.layers.0.mlp.up_proj.weight": "layers.safetensors" });
        for (number, name) in file.names().into_iter().enumerate() {
            let shard = format!("{number}.safetensors");
            let tensor = file.any_tensor(&name).unwrap();
            write_safetensors(&target.join(&shard), &[(name.clone(), tensor)]).unwrap();
            shards[&name] = json!(shard);
        }
        let write = |file: &str, value: &Value| {
            std::fs::write(target.join(file), value.to_string()).unwrap();
        };
        write("model.safetensors.index.json", &json!({ "weight_map": shards }));
        let vocabulary: serde_json::Map<String, Value> =
            (0..70).map(|id| (format!("w{id}"), json!(id))).collect();
        let model = json!({ "type": "WordLevel", "vocab": vocabulary, "unk_token": "w69" });
        write("tokenizer.json", &json!({ "version": "1.0", "added_tokens": [], "model": model }));
        write("tokenizer_config.json", &json!({ "eos_token": "w2", "pad_token": "w0" }));
    }

    fn ids(document: u64) -> Vec<i64> {
        (0..TOKENS as i64).map(|t| 3 + (document as i64 * 7 + t * t) % 60).collect()
    }

    /// Stored states in speculators' format: the auxiliary layers, and the last.
    fn write_data(&self) {
        let mut writer =
            DatasetWriter::create(&self.path("data"), WriterOptions::default()).unwrap();
        let files = OfflineFiles::new(self.path("states"));
        let _alone = dflash_test_support::alone();
        tch::manual_seed(3);
        for document in 0..DOCUMENTS {
            let input_ids = Self::ids(document);
            let layer = || {
                let states = Tensor::randn([TOKENS as i64, 32], (Kind::Float, Device::Cpu));
                let states = Vec::<f32>::try_from(states.view([-1])).unwrap();
                states.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>().into()
            };
            let layers = (1..=LAST).map(|_| layer()).collect();
            let ids = (1..=LAST).collect();
            let states = HiddenStates::new(ids, TOKENS, 32, Dtype::F32, layers).unwrap();
            files.write(document, &input_ids, &states).unwrap();
            writer.push(&Sample { input_ids, loss_mask: vec![true; TOKENS] }).unwrap();
        }
        writer.finish().unwrap();
    }

    fn engine(&self, arguments: &[&str], more: &[&str]) -> Run {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_dflash-engine"));
        command.args(arguments).args(["--target", &self.text("target")]).args(more);
        Run::of(command.env("OMP_NUM_THREADS", "1"))
    }

    fn train(&self, more: &[&str]) -> Run {
        let [data, states, save] = ["data", "states", "save"].map(|name| self.text(name));
        let arguments = [
            "train",
            "--no-progress",
            "--data-path",
            &data,
            "--hidden-states-path",
            &states,
            "--on-missing",
            "raise",
            "--save-path",
            &save,
            "--num-layers",
            "1",
            "--block-size",
            "4",
            "--target-layer-ids",
            "1,2",
            "--total-seq-len",
            "64",
            "--lr",
            "0.01",
            "--log-every",
            "1",
        ];
        self.engine(&arguments, more)
    }
}

fn config(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path.join("config.json")).unwrap()).unwrap()
}

/// Runs everything from plan to export, with the target's distribution in the objective.
fn goes_the_whole_way(name: &str, more: &[&str]) -> Family {
    let family = Family::new(name);
    let plan = ["plan", "--json", "--device", "cpu", "--rows", "4", "--mean-length", "24"];
    let planned = family.engine(&plan, more);
    assert!(planned.success(), "{name}: {}", planned.stderr);
    let plan: Value = serde_json::from_str(&planned.stdout).unwrap();
    assert!(plan["parameters"].as_i64().unwrap() > 0, "{name}: {plan}");
    let run = family.train(&[more, &["--loss", "kl", "--epochs", "12"]].concat());
    assert!(run.success(), "{name}: {}", run.stderr);
    let losses = losses(&family.path("save"));
    let (first, last) = (losses[0].1, losses.last().unwrap().1);
    assert!(last < 0.95 * first, "{name}: the loss went from {first} to {last}");
    let bench = [
        "bench",
        "train-step",
        "--device",
        "cpu",
        "--tokens",
        "64",
        "--docs",
        "2",
        "--anchors",
        "4",
        "--block",
        "4",
        "--layers",
        "1",
        "--aux-layers",
        "2",
        "--json",
    ];
    let timed = family.engine(&bench, more);
    assert!(timed.success(), "{name}: {}", timed.stderr);
    for format in ["zlab", "speculators"] {
        let output = family.text(format);
        let export = [
            "export",
            "--draft",
            &family.text("save"),
            "--format",
            format,
            "--output",
            &output,
            "--without-sglang",
        ];
        let exported = family.engine(&export, &[]);
        assert!(exported.success(), "{name}: {}", exported.stderr);
    }
    let target = config(&family.path("target"));
    let draft = config(&family.path("zlab"));
    assert_eq!(draft["vocab_size"], json!(80), "{name}");
    assert_eq!(draft["dflash_config"]["mask_token_id"], json!(70), "{name}: the first free row");
    let verifier = &config(&family.path("speculators"))["speculators_config"]["verifier"];
    assert_eq!(verifier["architectures"], target["architectures"], "{name}");
    family
}

#[test]
fn families_without_layers_here_are_trained_for_planned_and_exported() {
    for name in ["nemotron", "granite", "gemma2"] {
        goes_the_whole_way(name, &[]);
    }
}

#[test]
fn what_needs_the_layers_says_what_to_do_instead() {
    let family = Family::new("nemotron");
    let refused = |more: &[&str], expected: &[&str]| {
        let run = family.train(more);
        assert_eq!(run.code, Some(1), "{}", run.stderr);
        assert!(expected.iter().all(|part| run.stderr.contains(part)), "{}", run.stderr);
    };
    let prompts = family.text("data");
    refused(
        &["--eval-every", "1", "--eval-prompts", &prompts],
        &["NemotronForCausalLM", "dflash eval --endpoint"],
    );
}

#[test]
fn an_unknown_architecture_is_described_once() {
    let family = Family::new("nemotron");
    let path = family.path("target/config.json");
    let mut unknown = config(&family.path("target"));
    unknown["architectures"] = json!(["MysteryForCausalLM"]);
    unknown["model_type"] = json!("mystery");
    std::fs::write(&path, unknown.to_string()).unwrap();
    let refused = family.train(&["--epochs", "1"]);
    assert!(!refused.success());
    for part in [
        "MysteryForCausalLM is not known",
        "--target-spec FILE",
        "embedding = \"model.embed_tokens.weight\"",
        "norm = \"model.norm.weight\"",
        "norm_bias = \"model.norm.bias\"",
        "head = \"lm_head.weight\"",
        "norm_kind = \"layer\"",
    ] {
        assert!(refused.stderr.contains(part), "{part}: {}", refused.stderr);
    }
    let spec = family.text("spec.toml");
    std::fs::write(&spec, "norm_kind = \"layer_plus_one\"\nnorm_epsilon = 1e-5\n").unwrap();
    let slip = family.train(&["--target-spec", &spec]);
    assert!(slip.stderr.contains("spec.toml, line 2"), "{}", slip.stderr);
    assert!(slip.stderr.contains("did you mean norm_eps?"), "{}", slip.stderr);
    std::fs::write(&spec, "norm_kind = \"layer_plus_one\"\nnorm_eps = 1e-5\n").unwrap();
    let run = family.train(&["--target-spec", &spec, "--epochs", "1"]);
    assert!(run.success(), "{}", run.stderr);
    // later commands need only what the run recorded
    std::fs::remove_file(&spec).unwrap();
    let resumed = family.train(&["--resume", "--epochs", "2", "--allow-changed", "epochs"]);
    assert!(resumed.success(), "{}", resumed.stderr);
    let output = family.text("exported");
    // The draft uses the last of two layers.
    let export =
        ["export", "--draft", &family.text("save"), "--output", &output, "--without-sglang"];
    let exported = family.engine(&export, &[]);
    assert!(exported.success(), "{}", exported.stderr);
}

#[test]
fn quantized_heads_are_refused_and_quantized_layers_are_not() {
    let family = Family::new("granite");
    let path = family.path("target/config.json");
    let mut quantized = config(&family.path("target"));
    quantized["quantization_config"] = json!({ "quant_method": "gptq", "bits": 4 });
    std::fs::write(&path, quantized.to_string()).unwrap();
    let run = family.train(&["--epochs", "1"]);
    assert!(run.success(), "{}", run.stderr);
    let index = family.path("target/model.safetensors.index.json");
    let shards: Value = serde_json::from_slice(&std::fs::read(&index).unwrap()).unwrap();
    let shard = shards["weight_map"]["lm_head.weight"].as_str().unwrap();
    let packed = Tensor::zeros([4, 80], (Kind::Int64, Device::Cpu));
    let named = [("lm_head.qweight".to_owned(), packed)];
    write_safetensors(&family.path("target").join(shard), &named).unwrap();
    let text = shards.to_string().replace("lm_head.weight", "lm_head.qweight");
    std::fs::write(&index, text).unwrap();
    let refused = family.train(&["--epochs", "1", "--save-path", &family.text("other")]);
    assert!(!refused.success());
    for part in ["lm_head.qweight is stored as Int64", "quant_method is gptq", "unquantized"] {
        assert!(refused.stderr.contains(part), "{part}: {}", refused.stderr);
    }
}
