//! Files fetched for each part, from the Hub and from the cache.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dflash_hub::{Error, Hub, ModelPart, Split};

use crate::fake_hub::{Branch, FakeHub, Files, Mood};

const COMMIT: &str = "1111111111111111111111111111111111111111";
const OTHER: &str = "2222222222222222222222222222222222222222";

fn files(names: &[(&str, &str)]) -> Files {
    names.iter().map(|&(name, text)| (name.to_owned(), text.as_bytes().to_vec())).collect()
}

/// Two shards, their index, and other files found in repositories.
fn sharded() -> Files {
    let index = r#"{"weight_map": {"a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors", "c": "../outside.safetensors"}}"#;
    files(&[
        ("config.json", "{}"),
        ("generation_config.json", "{}"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{}"),
        ("chat_template.jinja", "hello"),
        ("model.safetensors.index.json", index),
        ("model-00001-of-00002.safetensors", "first shard"),
        ("model-00002-of-00002.safetensors", "second shard"),
        ("consolidated.safetensors", "the same again"),
        ("pytorch_model.bin", "pickle"),
        ("model-q4.gguf", "gguf"),
        ("original/model.safetensors", "another layout"),
        ("README.md", "words"),
    ])
}

fn branch(repository: &'static str, name: &'static str, commit: &str, files: Files) -> Branch {
    Branch { repository, name, commit: commit.to_owned(), files }
}

/// A Hub with a target, a draft on two branches, a dataset, and a repository of pickles.
fn world() -> (FakeHub, tempfile::TempDir) {
    let draft = |text| files(&[("config.json", "{}"), ("model.safetensors", text)]);
    let parquet = files(&[
        ("default/train/0000.parquet", "a"),
        ("default/train/0001.parquet", "b"),
        ("default/partial-train/0000.parquet", "c"),
        ("default/test/0000.parquet", "d"),
    ]);
    let hub = FakeHub::start(vec![
        branch("models/some/target", "main", COMMIT, sharded()),
        branch("models/some/draft", "main", COMMIT, draft("one")),
        branch("models/some/draft", "refs/pr/1", OTHER, draft("two")),
        branch(
            "models/some/pickles",
            "main",
            COMMIT,
            files(&[("config.json", "{}"), ("a.bin", "x")]),
        ),
        branch("datasets/some/data", "refs/convert/parquet", COMMIT, parquet),
        branch("datasets/some/raw", "main", COMMIT, files(&[("data.csv", "x")])),
    ]);
    (hub, tempfile::tempdir().unwrap())
}

fn at(hub: &FakeHub, cache: &Path) -> Hub {
    Hub { endpoint: Some(hub.endpoint.clone()), cache: Some(cache.into()), offline: false }
}

fn offline(hub: &Hub) -> Hub {
    Hub { offline: true, ..hub.clone() }
}

fn model(hub: &Hub, name: &str, part: ModelPart) -> Result<PathBuf, Error> {
    hub.model(name, part, &AtomicBool::new(false))
}

fn refusal(hub: &Hub, name: &str, part: ModelPart) -> String {
    model(hub, name, part).unwrap_err().to_string()
}

fn listing(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_target_comes_with_all_its_shards_and_nothing_else() {
    let (fake, cache) = world();
    let hub = at(&fake, cache.path());
    let dir = model(&hub, "some/target", ModelPart::Target).unwrap();
    let expected = [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    assert_eq!(listing(&dir), expected);
    let shard = std::fs::read(dir.join("model-00002-of-00002.safetensors")).unwrap();
    assert_eq!(shard, b"second shard");
    assert!(!cache.path().join("models--some--target/snapshots/outside.safetensors").exists());
    fake.requests();
    // Once fetched, no file is fetched again; offline, no request is made.
    assert_eq!(model(&hub, "some/target", ModelPart::Target).unwrap(), dir);
    assert!(fake.requests().iter().all(|request| !request.contains("/resolve/")));
    assert_eq!(model(&offline(&hub), "some/target", ModelPart::Target).unwrap(), dir);
    assert_eq!(fake.requests(), Vec::<String>::new());
}

#[test]
fn a_part_fetches_its_own_files_only() {
    let (fake, cache) = world();
    let hub = at(&fake, cache.path());
    let dir = model(&hub, "some/target", ModelPart::Config).unwrap();
    assert_eq!(listing(&dir), ["config.json"]);
    let dir = model(&hub, "some/target", ModelPart::Tokenizer).unwrap();
    let expected =
        ["chat_template.jinja", "config.json", "tokenizer.json", "tokenizer_config.json"];
    assert_eq!(listing(&dir), expected);
    // The cache knows the revision, but not its weights.
    let text = refusal(&offline(&hub), "some/target", ModelPart::Target);
    assert!(text.contains("(HF_HUB_OFFLINE is set): the local cache lacks its model"), "{text}");
}

#[test]
fn a_password_in_the_address_is_not_shown() {
    for endpoint in ["http://user:pass@127.0.0.1:9", "http://user:pa/ss@127.0.0.1:9"] {
        let cache = Some(tempfile::tempdir().unwrap().path().into());
        let hub = Hub { endpoint: Some(endpoint.into()), cache, offline: false };
        let text = refusal(&hub, "some/target", ModelPart::Config);
        assert!(text.contains(" from http://***@127.0.0.1:9"), "{text}");
        assert!(!text.contains("user") && !text.contains("ss@"), "{text}");
    }
}

#[test]
fn a_directory_is_used_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub { endpoint: Some("http://127.0.0.1:9".into()), ..Hub::default() };
    let path = dir.path().to_str().unwrap();
    assert_eq!(model(&hub, path, ModelPart::Target).unwrap(), dir.path());
    let text = refusal(&hub, "./nowhere", ModelPart::Draft);
    assert!(text.starts_with("the draft ./nowhere: no such directory, and not a name"), "{text}");
}

#[test]
fn a_revision_is_a_branch_or_a_commit() {
    let (fake, cache) = world();
    let hub = at(&fake, cache.path());
    let config = |name: &str| {
        let dir = model(&hub, name, ModelPart::Draft).unwrap();
        std::fs::read_to_string(dir.join("model.safetensors")).unwrap()
    };
    assert_eq!(config("some/draft"), "one");
    assert_eq!(config("some/draft@refs/pr/1"), "two");
    assert_eq!(config(&format!("some/draft@{OTHER}")), "two");
    let dir = model(&offline(&hub), "some/draft@refs/pr/1", ModelPart::Draft).unwrap();
    assert!(dir.ends_with(OTHER), "{}", dir.display());
    let text = refusal(&hub, "some/draft@gone", ModelPart::Draft);
    assert!(
        text.contains("the draft some/draft@gone") && text.contains("no revision gone"),
        "{text}"
    );
}

#[test]
fn what_cannot_be_fetched_is_named_with_its_reason() {
    let (fake, cache) = world();
    let hub = at(&fake, cache.path());
    let text = refusal(&hub, "some/typo", ModelPart::Tokenizer);
    assert!(text.contains("the tokenizer of some/typo"), "{text}");
    assert!(text.contains(&fake.endpoint) && text.contains("no such repository"), "{text}");
    let text = refusal(&hub, "some/pickles", ModelPart::Target);
    assert!(text.contains("the repository has no model.safetensors"), "{text}");
    let text = refusal(&offline(&hub), "some/draft", ModelPart::Draft);
    assert!(text.contains("not in the local cache"), "{text}");
    fake.set(Mood::Gated);
    let text = refusal(&hub, "some/draft", ModelPart::Draft);
    assert!(text.contains("refuses access") && text.contains("HF_TOKEN"), "{text}");
    fake.set(Mood::Private);
    let text = refusal(&hub, "some/draft", ModelPart::Draft);
    assert!(text.contains("or it is private") && text.contains("HF_TOKEN"), "{text}");
}

#[test]
fn without_a_network_the_cache_serves_what_it_has() {
    let (fake, cache) = world();
    let dir = model(&at(&fake, cache.path()), "some/draft", ModelPart::Draft).unwrap();
    // Port 9 (discard) is closed wherever tests run.
    let gone = Hub { endpoint: Some("http://127.0.0.1:9".into()), ..at(&fake, cache.path()) };
    assert_eq!(model(&gone, "some/draft", ModelPart::Draft).unwrap(), dir);
    let text = refusal(&gone, "some/target", ModelPart::Config);
    assert!(text.contains("config.json of some/target from http://127.0.0.1:9"), "{text}");
    assert!(text.contains("the Hub cannot be reached"), "{text}");
}

#[test]
fn an_error_page_in_place_of_a_file_is_not_kept() {
    let (fake, cache) = world();
    let hub = at(&fake, cache.path());
    fake.set(Mood::Page("model.safetensors"));
    let dir = cache.path().join("models--some--draft");
    let text = refusal(&hub, "some/draft@refs/pr/1", ModelPart::Draft);
    assert!(text.contains("model.safetensors"), "{text}");
    assert!(!dir.join("snapshots").join(OTHER).join("model.safetensors").exists());
    fake.set(Mood::Well);
    let dir = model(&hub, "some/draft@refs/pr/1", ModelPart::Draft).unwrap();
    assert_eq!(std::fs::read(dir.join("model.safetensors")).unwrap(), b"two");
}

#[test]
fn an_interrupted_download_leaves_no_half_file() {
    let (fake, cache) = world();
    let hub = at(&fake, cache.path());
    let shard = "model-00002-of-00002.safetensors";
    fake.set(Mood::Stall(shard));
    let stop = Arc::new(AtomicBool::new(false));
    let fetching = thread::spawn({
        let (hub, stop) = (hub.clone(), Arc::clone(&stop));
        move || hub.model("some/target", ModelPart::Target, &stop)
    });
    while !fake
        .requests()
        .iter()
        .any(|request| request.starts_with("GET") && request.ends_with(shard))
    {
        assert!(!fetching.is_finished(), "it did not wait for the stalled file");
        thread::yield_now();
    }
    stop.store(true, Ordering::Relaxed);
    assert!(matches!(fetching.join().unwrap(), Err(Error::Interrupted)));
    let snapshot = cache.path().join("models--some--target/snapshots").join(COMMIT);
    assert!(!snapshot.join(shard).exists());
    assert!(
        refusal(&offline(&hub), "some/target", ModelPart::Target).contains("cache lacks its model")
    );
    fake.set(Mood::Well);
    let dir = model(&hub, "some/target", ModelPart::Target).unwrap();
    assert_eq!(std::fs::read(dir.join(shard)).unwrap(), b"second shard");
}

#[test]
fn a_split_is_its_parquet_files_in_order() {
    let (fake, cache) = world();
    let hub = at(&fake, cache.path());
    let fetch = |repo: &str, split: &str| {
        let split = Split { repo: repo.into(), config: "default".into(), split: split.into() };
        hub.split(&split, "files work", &AtomicBool::new(false)).map_err(|error| error.to_string())
    };
    let texts = |split| -> Vec<String> {
        let files = fetch("some/data", split).unwrap();
        files.iter().map(|path| std::fs::read_to_string(path).unwrap()).collect()
    };
    assert_eq!(texts("train"), ["a", "b", "c"]);
    assert_eq!(texts("test"), ["d"]);
    let text = fetch("some/data", "gone").unwrap_err();
    assert!(text.contains("no split gone of configuration default"), "{text}");
    let text = fetch("some/raw", "train").unwrap_err();
    assert!(text.contains("the dataset some/raw") && text.ends_with("files work"), "{text}");
    let text = fetch("some/data@main", "train").unwrap_err();
    assert!(text.contains("no such repository"), "{text}");
}

#[test]
fn a_file_of_a_dataset_is_fetched_alone_and_found_in_the_cache() {
    let (server, cache) = world();
    let hub = at(&server, cache.path());
    let go = AtomicBool::new(false);
    let fetch = |hub: &Hub, file: &str| {
        hub.dataset_file("some/raw", file, &go).map_err(|error| error.to_string())
    };
    let missing = fetch(&offline(&hub), "data.csv").unwrap_err();
    assert!(missing.contains("the dataset some/raw") && missing.contains("NAME=FILE"), "{missing}");
    let path = fetch(&hub, "data.csv").unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "x");
    assert!(path.to_str().unwrap().contains(COMMIT), "{}", path.display());
    assert_eq!(fetch(&offline(&hub), "data.csv").unwrap(), path);
    let missing = fetch(&hub, "other.csv").unwrap_err();
    assert!(missing.contains("the repository has no other.csv"), "{missing}");
}
