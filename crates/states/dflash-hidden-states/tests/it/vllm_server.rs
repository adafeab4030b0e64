//! A simulated stock vLLM: completions that name a file on shared storage.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use dflash_hidden_states::{HiddenStates, StreamConfig, TargetLogits};
use dflash_identity::TargetIdentity;
use dflash_settings::OnGenerate;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use crate::fake::{
    HIDDEN, LAYERS, Server, assert_right, config, drain, full_text, prompt, single_rows, start,
    states_of, status,
};

/// Deviations of a vLLM from a correct one.
#[derive(Clone)]
struct Quirks {
    /// The tokens that it reports having run.
    echo: fn(&[i64]) -> Vec<i64>,
    /// The states that it writes to the file.
    states: fn(&[i64]) -> HiddenStates,
    /// Whether it has a KV connector.
    names_a_file: bool,
    /// Whether it locks the file (`use_synchronization_lock`); without a lock it writes at once.
    locks: bool,
    /// Whether the client can see the file.
    shares_storage: bool,
    /// Given the directory and the file about to be named, returns the file to name instead.
    names: fn(&Path, PathBuf) -> PathBuf,
    writing: Duration,
    refuses: bool,
    /// Log-probabilities reported for the last state's first value, if the option is supported.
    log_probabilities: Option<fn(f32) -> Value>,
}

impl Default for Quirks {
    fn default() -> Self {
        Self {
            echo: <[i64]>::to_vec,
            states: |ids| states_of(ids, &[2, 5, 8]),
            names_a_file: true,
            locks: true,
            shares_storage: true,
            names: |_, path| path,
            writing: Duration::from_millis(30),
            refuses: false,
            log_probabilities: Some(|state| log_probabilities(state, 1.0)),
        }
    }
}

struct Vllm {
    server: Server,
    storage: tempfile::TempDir,
    requests: Arc<AtomicUsize>,
}

fn vllm(quirks: Quirks) -> Vllm {
    let storage = tempfile::tempdir().unwrap();
    let dir = storage.path().to_path_buf();
    let requests = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&requests);
    let list = json!({"object": "list", "data": [
        {"id": "tiny", "object": "model", "owned_by": "vllm", "root": "tiny", "max_model_len": 64}]});
    let complete = post(move |Json(request): Json<Value>| {
        let number = count.fetch_add(1, Ordering::SeqCst);
        let path = dir.join(format!("req-{number}.safetensors"));
        let reply = answer(&quirks, &(quirks.names)(&dir, path), &request);
        async { reply }
    });
    let router = Router::new()
        .route("/v1/models", get(async move || Json(list)))
        .route("/v1/completions", complete);
    Vllm { server: Server::start(router), storage, requests }
}

/// Replies at once; the file follows on another thread, under an exclusive lock.
fn answer(quirks: &Quirks, path: &Path, request: &Value) -> Response {
    assert_eq!(request["model"], "tiny");
    assert_eq!(request["max_tokens"], 1);
    assert_eq!(request["return_token_ids"], true);
    if quirks.refuses {
        return status(400, "This model's maximum context length is 4 tokens");
    }
    let ids: Vec<i64> = serde_json::from_value(request["prompt"].clone()).unwrap();
    let mut reply = json!({"choices": [{"prompt_token_ids": (quirks.echo)(&ids)}]});
    if request.get("logprobs").is_some() {
        assert_eq!(request["return_tokens_as_token_ids"], true);
        let Some(of_state) = quirks.log_probabilities else {
            return status(400, "logprobs are not supported");
        };
        reply["choices"][0]["logprobs"] = of_state(first_of_last_state(&ids));
    }
    if quirks.names_a_file {
        reply["kv_transfer_params"] = json!({ "hidden_states_path": path });
    }
    if quirks.names_a_file && !quirks.locks {
        fs::write(path, file_bytes(&ids, &(quirks.states)(&ids))).unwrap();
    } else if quirks.names_a_file && quirks.shares_storage {
        let lock = File::create(path.with_extension("safetensors.lock")).unwrap();
        lock.lock().unwrap();
        let (quirks, path) = (quirks.clone(), path.to_path_buf());
        std::thread::spawn(move || {
            std::thread::sleep(quirks.writing);
            // In two steps, so that a reader without the lock finds a partial file.
            let bytes = file_bytes(&ids, &(quirks.states)(&ids));
            fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
            std::thread::sleep(Duration::from_millis(10));
            fs::write(&path, &bytes).unwrap();
            drop(lock);
        });
    }
    Json(reply).into_response()
}

/// The first value of the last token's last state.
fn first_of_last_state(ids: &[i64]) -> f32 {
    let states = states_of(ids, &[8]);
    let rows = states.layer(8).unwrap();
    let first = rows.len() - states.row_bytes();
    f32::from_bits(u32::from(u16::from_le_bytes([rows[first], rows[first + 1]])) << 16)
}

/// The report of a model whose logit of token t is `t * state / 100` times `scale`.
fn log_probabilities(state: f32, scale: f32) -> Value {
    let value = |token: i64| token as f32 * state / 100.0 * scale - 40.0;
    let top = [9, 7, 4, 2, 1].map(|token| (format!("token_id:{token}"), json!(value(token))));
    let impossible = ("token_id:3".to_owned(), json!(-9999.0));
    let top: serde_json::Map<String, Value> = top.into_iter().chain([impossible]).collect();
    json!({"tokens": ["token_id:9"], "top_logprobs": [top]})
}

/// Stream settings for a target called `name` with logits as in [`log_probabilities`].
fn config_for_target(vllm: &Vllm, name: &str) -> StreamConfig {
    let logits = |state: &[f32], ids: &[i64]| {
        Ok(ids.iter().map(|id| *id as f32 * state[0] / 100.0).collect())
    };
    let target = TargetIdentity { name: name.into(), config: "c".into(), weights: None };
    StreamConfig {
        target: Some(target),
        target_logits: Some(TargetLogits(Arc::new(logits))),
        num_hidden_layers: Some(8),
        vocab_size: Some(1000),
        ..config_for(vllm)
    }
}

fn file_bytes(ids: &[i64], states: &HiddenStates) -> Vec<u8> {
    let width = states.row_bytes();
    let slots = states.layer_ids.len();
    let rows: Vec<u8> = (0..states.tokens)
        .flat_map(|row| states.layer_ids.iter().map(move |id| (row, *id)))
        .flat_map(|(row, id)| states.layer(id).unwrap()[row * width..][..width].to_vec())
        .collect();
    let ids_bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let rows = TensorView::new(Dtype::BF16, vec![states.tokens, slots, HIDDEN], &rows).unwrap();
    let ids = TensorView::new(Dtype::I64, vec![ids.len()], &ids_bytes).unwrap();
    let tensors = HashMap::from([("hidden_states", rows), ("token_ids", ids)]);
    safetensors::serialize(tensors, None).unwrap()
}

fn left_in(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect()
}

fn config_for(vllm: &Vllm) -> StreamConfig {
    let mut config = config(&[&format!("{}/v1", vllm.server.url)]);
    config.shared_storage = Some(vllm.storage.path().into());
    config
}

#[test]
fn samples_are_read_under_the_lock_and_their_files_deleted() {
    for states in [Quirks::default().states, |ids| states_of(ids, &LAYERS)] {
        let vllm = vllm(Quirks { states, ..Quirks::default() });
        let mut stream = start(config_for(&vllm), single_rows(0..12)).unwrap();
        drain(&mut stream).iter().flatten().for_each(assert_right);
        assert_eq!(stream.counters().generated, 12);
        assert_eq!(left_in(vllm.storage.path()), [] as [PathBuf; 0]);
    }
}

#[test]
fn a_vllm_that_does_not_lock_is_read_too() {
    let vllm = vllm(Quirks { locks: false, ..Quirks::default() });
    let mut stream = start(config_for(&vllm), single_rows(0..4)).unwrap();
    drain(&mut stream).iter().flatten().for_each(assert_right);
    assert_eq!(left_in(vllm.storage.path()), [] as [PathBuf; 0]);
}

#[test]
fn cached_samples_keep_the_last_layer() {
    let vllm = vllm(Quirks::default());
    let store = tempfile::tempdir().unwrap();
    let mut config = config_for(&vllm);
    config.on_generate = OnGenerate::Cache;
    config.offline_dir = Some(store.path().into());
    config.num_hidden_layers = Some(8);
    drain(&mut start(config, single_rows(0..1)).unwrap()).iter().flatten().for_each(assert_right);
    let bytes = fs::read(store.path().join("hs_0.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let rows = file.tensor("hidden_states").unwrap();
    assert_eq!(rows.shape(), [prompt(0).input_ids.len(), 3, HIDDEN]);
    let last = states_of(&prompt(0).input_ids, &[8]);
    assert_eq!(&rows.data()[2 * 16..3 * 16], &last.layer(8).unwrap()[..16]);
}

/// The final error with which the stream gives up on this server.
fn fails_with(quirks: Quirks) -> String {
    let vllm = vllm(quirks);
    let mut stream = start(config_for(&vllm), single_rows(0..20)).unwrap();
    let error = std::iter::from_fn(|| stream.next_row()).find_map(Result::err).unwrap();
    drop(stream);
    full_text(&error)
}

#[test]
fn other_tokens_or_rows_than_asked_for_are_refused() {
    let fast = Quirks { writing: Duration::ZERO, ..Quirks::default() };
    let text = fails_with(Quirks { echo: |ids| ids[1..].to_vec(), ..fast.clone() });
    assert!(text.contains("8 consecutive samples") && text.contains("other tokens"), "{text}");
    // Effect of prefix caching: the rows of the cached part are missing.
    let states = |ids: &[i64]| states_of(&ids[1..], &LAYERS);
    let text = fails_with(Quirks { states, ..fast.clone() });
    assert!(text.contains("--no-enable-prefix-caching"), "{text}");
    let states = |ids: &[i64]| {
        let zeros = LAYERS.map(|_| vec![0; ids.len() * HIDDEN * 2].into()).to_vec();
        HiddenStates::new(
            LAYERS.to_vec(),
            ids.len(),
            HIDDEN,
            dflash_hidden_states::Dtype::Bf16,
            zeros,
        )
        .unwrap()
    };
    assert!(fails_with(Quirks { states, ..fast.clone() }).contains("row 0 of layer 2 is all zero"));
    let states = |ids: &[i64]| states_of(ids, &[2, 3, 5, 6]);
    assert!(fails_with(Quirks { states, ..fast }).contains("expected layers [2, 5]"));
}

#[test]
fn a_vllm_without_the_connector_is_told_what_to_start_with() {
    let text = fails_with(Quirks { names_a_file: false, ..Quirks::default() });
    assert!(text.contains("extract_hidden_states"), "{text}");
}

#[test]
fn a_refused_body_is_sent_once_more() {
    let vllm = vllm(Quirks { refuses: true, ..Quirks::default() });
    let mut stream = start(config_for(&vllm), single_rows(0..3)).unwrap();
    assert!(drain(&mut stream).iter().flatten().all(|fetched| fetched.states.is_none()));
    assert_eq!((stream.counters().rejected, vllm.requests.load(Ordering::SeqCst)), (3, 6));
}

#[test]
fn prompts_that_leave_no_room_for_a_token_are_not_sent() {
    let vllm = vllm(Quirks::default());
    let row =
        |sample, tokens| vec![dflash_hidden_states::Request { sample, input_ids: vec![1; tokens] }];
    let mut stream = start(config_for(&vllm), vec![row(0, 63), row(1, 64)]).unwrap();
    let rows = drain(&mut stream);
    assert!(rows[0][0].states.is_some() && rows[1][0].states.is_none());
    assert_eq!((stream.counters().rejected, vllm.requests.load(Ordering::SeqCst)), (1, 1));
}

#[test]
fn storage_that_is_not_shared_is_named() {
    let text = fails_with(Quirks { shares_storage: false, ..Quirks::default() });
    assert!(text.contains("req-") && text.contains("shared_storage_path"), "{text}");
}

#[test]
fn log_probabilities_tell_the_target_from_another_model() {
    let vllm = vllm(Quirks::default());
    let mut stream = start(config_for_target(&vllm, "tiny"), single_rows(0..20)).unwrap();
    drain(&mut stream).iter().flatten().for_each(assert_right);
    // An alias proves nothing; the computed states do.
    let mut stream = start(config_for_target(&vllm, "Owner/Name"), single_rows(0..4)).unwrap();
    drain(&mut stream).iter().flatten().for_each(assert_right);
    let other = Some((|state| log_probabilities(state, 1.3)) as fn(f32) -> Value);
    let vllm = self::vllm(Quirks { log_probabilities: other, ..Quirks::default() });
    let mut stream = start(config_for_target(&vllm, "tiny"), single_rows(0..20)).unwrap();
    let error = stream.next_row().unwrap().unwrap_err();
    let text = full_text(&error);
    for expected in [&vllm.server.url, "tiny is not tiny (config c)", "nats", "--target"] {
        assert!(text.contains(expected), "no {expected:?} in {text}");
    }
    assert_eq!(stream.counters().generated, 0);
}

#[test]
fn a_vllm_that_cannot_be_checked_is_used_by_its_name() {
    let refuses = Quirks { log_probabilities: None, ..Quirks::default() };
    // Only the auxiliary layers, without the last.
    let lacks = Quirks { states: |ids| states_of(ids, &LAYERS), ..Quirks::default() };
    for quirks in [refuses, lacks] {
        let vllm = vllm(quirks);
        let mut stream = start(config_for_target(&vllm, "tiny"), single_rows(0..12)).unwrap();
        drain(&mut stream).iter().flatten().for_each(assert_right);
        assert_eq!((stream.counters().generated, stream.counters().rejected), (12, 0));
    }
}

/// A directory next to the storage, with a file that must survive.
fn precious() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    fs::write(&path, "weights").unwrap();
    (dir, path)
}

/// The stream's error for a server that names `path` and writes nothing.
fn refused(vllm: &Vllm) -> String {
    let mut stream = start(config_for(vllm), single_rows(0..20)).unwrap();
    let error = std::iter::from_fn(|| stream.next_row()).find_map(Result::err).unwrap();
    assert_eq!(stream.counters().generated, 0);
    full_text(&error)
}

#[test]
fn files_outside_of_the_storage_are_neither_read_nor_removed() {
    static OUTSIDE: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    let (_dir, path) = precious();
    OUTSIDE.set(path.clone()).unwrap();
    let quiet = Quirks { shares_storage: false, ..Quirks::default() };
    let server = vllm(Quirks { names: |_, _| OUTSIDE.get().unwrap().clone(), ..quiet.clone() });
    let text = refused(&server);
    assert!(text.contains("model.safetensors") && text.contains("--shared-storage-path"), "{text}");
    // Via a link inside the storage, and via a path out of it.
    let link = |dir: &Path, path: PathBuf| {
        let _ = std::os::unix::fs::symlink(OUTSIDE.get().unwrap(), dir.join("link.safetensors"));
        drop(path);
        dir.join("link.safetensors")
    };
    let text = refused(&vllm(Quirks { names: link, ..quiet.clone() }));
    assert!(text.contains("not a regular file"), "{text}");
    let around = |dir: &Path, _: PathBuf| {
        let there = OUTSIDE.get().unwrap().strip_prefix("/").unwrap();
        dir.join("../../../../../../..").join(there)
    };
    assert!(refused(&vllm(Quirks { names: around, ..quiet })).contains("model.safetensors"));
    assert_eq!(fs::read(&path).unwrap(), b"weights");
}

#[test]
fn what_is_no_file_of_this_prompt_is_left_alone() {
    let quiet = Quirks { shares_storage: false, ..Quirks::default() };
    // A pipe in place of the file, and of its lock.
    let data = |_: &Path, path: PathBuf| {
        std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        path
    };
    let server = vllm(Quirks { names: data, ..quiet.clone() });
    assert!(refused(&server).contains("not a regular file"));
    let lock = |_: &Path, path: PathBuf| {
        let lock = path.with_extension("safetensors.lock");
        std::process::Command::new("mkfifo").arg(lock).status().unwrap();
        fs::write(&path, "rows").unwrap();
        path
    };
    assert!(refused(&vllm(Quirks { names: lock, ..quiet.clone() })).contains("not a regular file"));
    // A sparse file larger than any memory.
    let sparse = |_: &Path, path: PathBuf| {
        File::create(&path).unwrap().set_len(1 << 42).unwrap();
        path
    };
    assert!(refused(&vllm(Quirks { names: sparse, ..quiet.clone() })).contains("not removed"));
    // Another prompt's file.
    let other = |dir: &Path, _: PathBuf| {
        let path = dir.join("other.safetensors");
        fs::write(&path, file_bytes(&[1, 2, 3], &states_of(&[1, 2, 3], &LAYERS))).unwrap();
        path
    };
    let server = vllm(Quirks { names: other, ..quiet });
    let text = refused(&server);
    assert!(text.contains("8 consecutive samples"), "{text}");
    assert!(server.storage.path().join("other.safetensors").exists());
}

#[test]
fn a_vllm_needs_a_named_storage() {
    let vllm = vllm(Quirks::default());
    let config = config(&[&vllm.server.url]);
    let text = full_text(&start(config, single_rows(0..1)).unwrap_err());
    assert!(text.contains("--shared-storage-path DIR"), "{text}");
}
