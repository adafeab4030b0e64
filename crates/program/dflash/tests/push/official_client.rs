//! The Hub's official Python client on the same server: it reads our pushes, and pushes itself.

use std::path::Path;
use std::process::{Command, Output};
use std::sync::OnceLock;

use serde_json::{Value, json};

use crate::hub_server::TOKEN;
use crate::world::{REPO, World, digests_below};

/// An interpreter with the client; prints a note if there is none.
fn python() -> Option<String> {
    // Set up once, however many tests need it.
    static PYTHON: OnceLock<Result<String, String>> = OnceLock::new();
    match PYTHON.get_or_init(set_up) {
        Ok(python) => Some(python.clone()),
        Err(why) => {
            println!("skipped: no huggingface_hub ({why})");
            None
        }
    }
}

fn set_up() -> Result<String, String> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../scripts/hub-client.sh");
    let output = Command::new(script).output().unwrap();
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        return Err(why.lines().last().unwrap_or_default().to_owned());
    }
    Ok(String::from_utf8(output.stdout).unwrap().trim().to_owned())
}

fn client(python: &str, world: &World, verb: &str, repository: &str, dir: &Path) -> Output {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/push/client.py");
    let mut command = Command::new(python);
    command.arg(script).args([verb, repository]).arg(dir);
    command.env("HF_ENDPOINT", world.hub.address()).env("HF_HOME", world.path("client-home"));
    // Our server has no Xet, like the Hub's mirrors.
    command.env("HF_TOKEN", TOKEN).env("HF_HUB_DISABLE_XET", "1");
    command.env_remove("HF_HUB_OFFLINE").output().unwrap()
}

fn succeeds(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_official_client_reads_what_we_push() {
    let Some(python) = python() else { return };
    let world = World::new();
    world.push(&format!(
        "run --repo {REPO} --private --license apache-2.0 --language no --base-model some/target \
         --dataset my/data"
    ));
    let fetched = client(&python, &world, "download", REPO, &world.path("fetched"));
    let fetched: Value = serde_json::from_str(&succeeds(fetched)).unwrap();
    let ours = |name: &str| {
        json!(crate::hub_server::sha256(&world.read(&format!("run/step-000010/{name}"))))
    };
    for name in ["config.json", "model.safetensors"] {
        assert_eq!(fetched["files"][name], ours(name), "{name}");
    }
    assert_eq!(fetched["files"].as_object().unwrap().len(), 4, "{fetched}");
    assert_eq!(fetched["private"], json!(true));
    let data = json!({
        "license": "apache-2.0", "language": ["no"], "library_name": "transformers",
        "pipeline_tag": "text-generation", "base_model": "some/target",
        "base_model_relation": "adapter", "datasets": ["openai/gsm8k", "my/data"],
        "tags": ["dflash", "speculative-decoding", "draft-model", "block-diffusion"],
    });
    for (key, value) in data.as_object().unwrap() {
        assert_eq!(fetched["data"][key], *value, "{key}");
    }
    let dataset = ["text-generation", "test", "test.jsonl"];
    let result =
        |metric: &str, value: f64| json!([dataset[0], dataset[1], dataset[2], metric, value]);
    let expected = json!([
        result("acceptance_length", 3.25),
        result("acceptance_length_per_response", 3.5),
        result("speed_up", 1.5)
    ]);
    assert_eq!(fetched["results"], expected);
}

/// The server behaves like a Hub if the official client can push to it: whole and in parts.
#[test]
fn the_official_client_pushes_to_the_same_server() {
    let Some(python) = python() else { return };
    for parts in [None, Some(1 << 20)] {
        let world = World::new();
        parts.into_iter().for_each(|bytes| world.hub.send_in_parts(bytes));
        std::fs::remove_dir_all(world.path("run/step-000010/trainer")).unwrap();
        let dir = world.path("run/step-000010");
        succeeds(client(&python, &world, "upload", "me/theirs", &dir));
        let repository = world.hub.repository("models/me/theirs").unwrap();
        let files = repository.files("main").into_iter();
        let stored: serde_json::Map<String, Value> = files
            .map(|(name, blob)| (name, json!(crate::hub_server::sha256(&blob.content))))
            .collect();
        assert_eq!(Value::Object(stored), digests_below(&dir));
        assert_eq!(repository.summaries(), ["initial commit", "by the client"]);
        assert_eq!(world.hub.leaks(), Vec::<String>::new());
    }
}
