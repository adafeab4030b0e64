//! Targets and drafts by their Hub names, as users run the commands, against a Hub on this machine.

use std::path::{Path, PathBuf};
use std::process::Command;

use dflash_draft::{Draft, DraftConfig, HeadFields, LayerKind};
use dflash_target::{Target, TargetConfig};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

#[path = "../../../base/dflash-hub/tests/it/fake_hub.rs"]
mod fake_hub;

use fake_hub::{Branch, FakeHub};

const WORDS: [&str; 8] = ["<unk>", "<eos>", "user", "assistant", "a", "b", "c", "<mask>"];

/// A Hub with a target and a matching draft, and an empty cache.
struct World {
    hub: FakeHub,
    dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (target_dir, draft_dir) = (dir.path().join("target"), dir.path().join("draft"));
        let mut config = TargetConfig::qwen3(32, 2, WORDS.len() as i64);
        config.eos_token_ids = vec![1];
        let draft = random_draft(&config);
        Target::random(config, 4, Device::Cpu).save(&target_dir, Kind::Float).unwrap();
        write_tokenizer(&target_dir);
        std::fs::create_dir(&draft_dir).unwrap();
        draft.save(&draft_dir).unwrap();
        let hub = FakeHub::start(vec![
            Branch::main("models/some/target", &target_dir),
            Branch::main("models/some/draft", &draft_dir),
        ]);
        std::fs::remove_dir_all(&target_dir).unwrap();
        std::fs::remove_dir_all(&draft_dir).unwrap();
        let prompts = "{\"question\": \"a b\", \"answer\": \"c\"}\n{\"question\": \"c\", \"answer\": \"a\"}\n";
        std::fs::write(dir.path().join("prompts.jsonl"), prompts).unwrap();
        Self { hub, dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Exit code, stdout and stderr of a command line run in the world's directory.
    fn engine(&self, line: &str, offline: bool) -> (Option<i32>, String, String) {
        let output = Command::new(env!("CARGO_BIN_EXE_dflash-engine"))
            .args(line.split_whitespace())
            .current_dir(self.dir.path())
            .env("HF_HOME", self.path("cache"))
            .env("HF_ENDPOINT", &self.hub.endpoint)
            .env("HF_HUB_OFFLINE", if offline { "1" } else { "0" })
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    }

    fn succeeds(&self, line: &str, offline: bool) -> String {
        let (code, stdout, stderr) = self.engine(line, offline);
        assert_eq!(code, Some(0), "{line}: {stderr}");
        stdout
    }
}

fn random_draft(target: &TargetConfig) -> Draft {
    let _alone = dflash_test_support::alone();
    tch::manual_seed(5);
    let config = DraftConfig {
        hidden_size: target.hidden_size,
        intermediate_size: target.dense().intermediate_size,
        num_attention_heads: target.dense().num_attention_heads,
        num_key_value_heads: target.dense().num_key_value_heads,
        head_dim: target.dense().head_dim,
        attention_bias: false,
        rms_norm_eps: target.rms_norm_eps,
        rope_theta: target.dense().rope.theta,
        rope_scaling: None,
        layers: vec![LayerKind::Full],
        sliding_window: None,
        block_size: 4,
        mask_token_id: 7,
        target_layer_ids: vec![0, 2],
        num_target_layers: Some(2),
        vocab_size: target.vocab_size,
        max_position_embeddings: target.max_position_embeddings,
        initializer_range: 0.02,
        eos_token_id: None,
        head: HeadFields::default(),
    };
    Draft::init(config, Device::Cpu, |shape| Tensor::randn(shape, (Kind::Float, Device::Cpu)))
}

fn write_tokenizer(dir: &Path) {
    let vocab: serde_json::Map<String, Value> =
        WORDS.iter().enumerate().map(|(id, word)| ((*word).to_owned(), json!(id))).collect();
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [], "pre_tokenizer": { "type": "WhitespaceSplit" },
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "<unk>" },
    });
    let template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}\
                    {% if add_generation_prompt %}assistant{% endif %}";
    let config = json!({ "eos_token": "<eos>", "chat_template": template });
    std::fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(dir.join("tokenizer_config.json"), config.to_string()).unwrap();
}

#[test]
fn plan_fetches_the_target_s_configuration_alone() {
    let world = World::new();
    let line =
        "plan --rows 10 --mean-length 20 --total-seq-len 64 --block-size 4 --num-layers 1 --json";
    let plan = world.succeeds(&format!("{line} --target some/target"), false);
    assert!(serde_json::from_str::<Value>(&plan).unwrap()["parameters"].as_i64() > Some(0));
    let fetched = world.hub.requests();
    let files: Vec<_> = fetched.iter().filter(|request| request.starts_with("GET /some")).collect();
    assert!(files.len() == 1 && files[0].ends_with("config.json"), "{files:?}");
    for alias in ["--model", "--verifier-name-or-path"] {
        assert_eq!(world.succeeds(&format!("{line} {alias} some/target"), true), plan);
    }
    assert_eq!(world.hub.requests(), Vec::<String>::new());
}

#[test]
fn eval_takes_target_and_draft_by_name_in_either_precision() {
    let world = World::new();
    let line = "eval --target some/target --draft some/draft@main --prompts prompts.jsonl \
                --max-new-tokens 12 --device cpu --json report.json";
    for (dtype, offline) in [("float32", false), ("bfloat16", true)] {
        let table = world.succeeds(&format!("{line} --dtype {dtype}"), offline);
        assert!(table.contains("lossless  yes"), "{table}");
        let report: Value =
            serde_json::from_slice(&std::fs::read(world.path("report.json")).unwrap()).unwrap();
        assert_eq!(report["responses"], json!(2));
    }
    let (code, _, stderr) = world.engine(&line.replace("some/draft", "some/typo"), false);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("cannot fetch the draft some/typo@main"), "{stderr}");
    assert!(stderr.contains("no such repository"), "{stderr}");
}

#[test]
fn regenerate_takes_its_target_by_name() {
    let world = World::new();
    let line = "regenerate --data prompts.jsonl --max-new-tokens 5 --device cpu --dtype float32";
    world.succeeds(&format!("{line} --target some/target --output one.jsonl"), false);
    world.succeeds(&format!("{line} --model some/target --output two.jsonl"), true);
    let rows = |name| std::fs::read_to_string(world.path(name)).unwrap();
    assert_eq!(rows("one.jsonl").lines().count(), 2);
    assert_eq!(rows("one.jsonl"), rows("two.jsonl"));
    let (code, _, stderr) = world.engine(&format!("{line} --target ./gone --output x"), false);
    assert_eq!(code, Some(1));
    assert!(stderr.contains("the target ./gone: no such directory"), "{stderr}");
    assert!(!world.path("x").exists());
}
