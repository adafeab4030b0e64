//! Targets with recurrent layers and with latent attention, through the commands: the vectors'
//! models with a synthetic tokenizer and a random draft.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use dflash_draft::{Draft, DraftConfig, HeadFields, LayerKind};
use dflash_golden::entries;
use dflash_tensor::checkpoint::TensorFile;
use dflash_test_support::{alone, eventually};
use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor, no_grad};

const NAMES: [&str; 4] = ["qwen3_5_moe", "qwen3_5_nested", "qwen3_next", "deepseek_v3"];
const VOCAB: usize = 96;
const HIDDEN: i64 = 32;

/// A directory with a copy of a model, a word tokenizer, and a draft.
struct HybridDir(tempfile::TempDir);

impl HybridDir {
    fn new(name: &str) -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        let found = entries("targets2", None).into_iter().find(|entry| entry.name == name);
        let vectors = found.unwrap_or_else(|| panic!("no vectors of {name}")).path;
        std::fs::create_dir(place.path("target")).unwrap();
        for file in ["config.json", "model.safetensors", "golden.safetensors"] {
            std::fs::copy(vectors.join(file), place.path("target").join(file)).unwrap();
        }
        write_tokenizer(&place.path("target"));
        std::fs::create_dir(place.path("draft")).unwrap();
        save_draft(&place.path("draft"));
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn engine(&self, line: &str) -> Command {
        let mut engine = Command::new(env!("CARGO_BIN_EXE_dflash-engine"));
        engine.args(line.split_whitespace()).current_dir(self.0.path()).stdin(Stdio::null());
        engine.args(["--device", "cpu", "--dtype", "float32"]);
        // Models this small gain nothing from a second thread, and other tests need the cores.
        engine.env("OMP_NUM_THREADS", "1").env_remove("NO_COLOR").env_remove("DFLASH_API_KEY");
        engine
    }

    /// A command's standard output.
    fn run(&self, line: &str, more: &[&str]) -> String {
        let output = self.engine(line).args(more).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{line}: {stderr}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn serve(&self, line: &str) -> Server {
        let port_file = self.path("port");
        let _ = std::fs::remove_file(&port_file);
        let child = self.engine(line).args(["--port", "0", "--port-file", "port"]).spawn().unwrap();
        let mut server = Server { child, port: 0 };
        eventually("the server tells its port", || {
            server.port = port_in(&port_file).unwrap_or(0);
            server.port > 0
        });
        server
    }
}

fn port_in(path: &Path) -> Option<u16> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Words w0, w1, …, so that every token has a text.
fn write_tokenizer(dir: &Path) {
    let vocabulary: Map<String, Value> =
        (0..VOCAB).map(|id| (format!("w{id}"), json!(id))).collect();
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}});
    let template = "{% for m in messages %}w1 {{ m.content }} {% endfor %}w2";
    std::fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(dir.join("chat_template.jinja"), template).unwrap();
}

fn save_draft(dir: &Path) {
    let config = DraftConfig {
        hidden_size: HIDDEN,
        intermediate_size: 48,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        attention_bias: false,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        rope_scaling: None,
        layers: vec![LayerKind::Full],
        sliding_window: None,
        block_size: 5,
        mask_token_id: VOCAB as i64 - 1,
        target_layer_ids: vec![0, 2],
        num_target_layers: None,
        vocab_size: VOCAB as i64,
        max_position_embeddings: 512,
        initializer_range: 0.3,
        eos_token_id: None,
        head: HeadFields::default(),
    };
    let _alone = alone();
    tch::manual_seed(3);
    let options = (Kind::Float, Device::Cpu);
    Draft::init(config, Device::Cpu, |shape| Tensor::randn(shape, options)).save(dir).unwrap();
}

/// A server, killed when dropped.
struct Server {
    child: Child,
    port: u16,
}

impl Server {
    /// The body of the reply to a request that succeeds.
    fn post(&self, path: &str, body: &Value) -> Vec<u8> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let body = body.to_string();
        // HTTP/1.0, so that the reply is not chunked.
        let head = format!("POST {path} HTTP/1.0\r\nContent-Type: application/json");
        write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut reply = Vec::new();
        stream.read_to_end(&mut reply).unwrap();
        let head_end = reply.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
        let head = String::from_utf8_lossy(&reply[..head_end]).into_owned();
        assert!(head.contains(" 200 "), "{head}\n{}", String::from_utf8_lossy(&reply[head_end..]));
        reply.split_off(head_end + 4)
    }

    fn complete(&self, prompt: &str) -> Value {
        let body = json!({ "prompt": prompt, "max_tokens": 20, "temperature": 0 });
        serde_json::from_slice(&self.post("/v1/completions", &body)).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn words(from: usize, count: usize) -> String {
    let word = |at: usize| format!("w{}", (from + at * 7 + at * at) % VOCAB);
    (0..count).map(word).collect::<Vec<_>>().join(" ")
}

#[test]
fn drafted_answers_are_the_targets_own() {
    for name in NAMES {
        let place = HybridDir::new(name);
        let generate = "generate --target target --max-new-tokens 40 --raw";
        for prompt in [words(5, 3), words(11, 60)] {
            let plain = place.run(generate, &[&prompt]);
            assert!(plain.split_whitespace().count() >= 30, "{name}: {plain}");
            let prompt = prompt.as_str();
            let sampled = ["--temperature", "0.8", "--seed", "5", prompt];
            let sampled_plain = place.run(generate, &sampled);
            assert_ne!(sampled_plain, plain, "{name}");
            for draft in ["draft", "ngram"] {
                for speculate in ["auto", "2", "off"] {
                    let drafted = ["--draft", draft, "--speculate", speculate];
                    let greedy = place.run(generate, &[&drafted[..], &[prompt]].concat());
                    assert_eq!(greedy, plain, "{name}, {draft}, {speculate}");
                    let drawn = place.run(generate, &[&drafted[..], &sampled[..]].concat());
                    // With a fixed number of proposals a draft's text differs, but is always the
                    // same.
                    let expect = match (draft, speculate) {
                        ("draft", "2") => {
                            place.run(generate, &[&drafted[..], &sampled[..]].concat())
                        }
                        _ => sampled_plain.clone(),
                    };
                    assert_eq!(drawn, expect, "{name}, {draft}, {speculate}");
                }
            }
        }
        let rows: Vec<String> =
            (0..4).map(|n| json!({ "question": words(n, 5 + 9 * n) }).to_string()).collect();
        std::fs::write(place.path("questions.jsonl"), rows.join("\n")).unwrap();
        // It fails if an answer differs by more than a tie.
        let eval = "eval --target target --draft draft --draft ngram --prompts questions.jsonl \
                    --max-new-tokens 30 --json report.json";
        let shown = place.run(eval, &["--concurrency", "1,3"]);
        let report = std::fs::read_to_string(place.path("report.json")).unwrap();
        assert!(
            report.contains("\"holds\": true") && !report.contains("\"holds\": false"),
            "{report}"
        );
        assert!(report.contains("\"ngram auto\""), "{report}");
        assert!(shown.contains("advice  draft, one answer at a time: "), "{shown}");
        assert!(shown.contains("draft, 3 answers at a time: "), "{shown}");
        // A batch gives the same answers as one at a time.
        let regenerate = "regenerate --target target --data questions.jsonl --max-new-tokens 20";
        let ways = [("1", "none"), ("4", "none"), ("4", "draft"), ("3", "ngram")];
        let made = ways.map(|(batch, draft)| {
            let output = format!("by-{batch}-{draft}.jsonl");
            place.run(regenerate, &["--batch", batch, "--draft", draft, "--output", &output]);
            std::fs::read_to_string(place.path(&output)).unwrap()
        });
        assert!(made.iter().all(|rows| *rows == made[0]), "{name}");
    }
}

/// The same prefix repeatedly, like a system prompt.
#[test]
fn a_server_answers_alike_whatever_it_has_kept() {
    for name in NAMES {
        let place = HybridDir::new(name);
        let server = place.serve("serve --target target --draft draft");
        let system = words(30, 70);
        let prompts: Vec<String> = (0..4).map(|n| format!("{system} {}", words(n, 6))).collect();
        let cached = |reply: &Value| {
            reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
        };
        let mut reused = Vec::new();
        for prompt in &prompts {
            let reply = server.complete(prompt);
            reused.push(cached(&reply));
            let generate = "generate --target target --max-new-tokens 20 --raw";
            let alone = place.run(generate, &[prompt]);
            let text = reply["choices"][0]["text"].as_str().unwrap();
            assert_eq!(text.trim(), alone.trim(), "{name}");
        }
        assert!(reused[0] == 0 && reused[3] >= 70, "{name}: {reused:?}");
    }
}

#[test]
fn served_hidden_states_are_those_of_the_vectors() {
    for name in NAMES {
        let place = HybridDir::new(name);
        let server = place.serve("hidden-server target --target-layer-ids 0 1 2 --wire-dtype f32");
        let golden = TensorFile::open(&place.path("target/golden.safetensors")).unwrap();
        let ids = golden.any_tensor("input_ids").unwrap().flatten(0, -1);
        let ids = Vec::<i64>::try_from(ids).unwrap();
        let body = server.post("/v1/hidden_states", &json!({ "input_ids": ids }));
        let states = dflash_hidden_states::decode_stream(body.into(), "the server").unwrap();
        let expected = golden.any_tensor("hidden_states").unwrap();
        for layer in 0..3 {
            let bytes = states.layer(layer).unwrap().chunks_exact(4);
            let found: Vec<f32> =
                bytes.map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect();
            let found = Tensor::from_slice(&found).view([-1, HIDDEN]);
            let difference = no_grad(|| found - expected.get(i64::from(layer))).abs().max();
            let difference = difference.double_value(&[]);
            assert!(difference < 1e-4, "{name}, layer {layer}: {difference:e}");
        }
    }
}
