//! Requests one sample from a stock vLLM, which answers with the name of a file on shared storage.
//!
//! vLLM runs the prompt, replies, and writes the file afterwards, holding an exclusive flock on
//! `<file>.lock` until it is complete. The client waits for the lock, reads, and deletes both.

use std::fs::TryLockError;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use reqwest::Response;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::error::Error;
use crate::fetch::{Request, joined};
use crate::offline::first_difference;
use crate::own::Call;
use crate::probe::LogProbability;
use crate::record::{Dtype, HiddenStates};
use crate::retry::Failure;
use crate::storage::SharedFiles;
use crate::tensor_file::{Wanted, open_regular};
use crate::vllm_check::{Check, Extra, Finding, reported};

const PATH: &str = "/v1/completions";
/// Bytes of a reply in addition to its tokens, and per token.
const REPLY_ROOM: usize = 1 << 20;
const TOKEN_ROOM: usize = 32;
/// The same if each token has two log-probabilities.
const PROBE_ROOM: usize = 1 << 10;

/// How long a file may take to appear. It is created before the reply or right after it, so a
/// longer absence means that server and trainer do not share the directory.
const APPEARS_WITHIN: Duration = Duration::from_secs(5);
/// How long vLLM may take to write it.
const WRITTEN_WITHIN: Duration = Duration::from_secs(30);
/// Interval between checks of the lock; writing takes a few milliseconds.
const LOOK_EVERY: Duration = Duration::from_millis(2);

#[derive(Serialize)]
struct CompletionRequest<'a> {
    model: &'a str,
    prompt: &'a [i64],
    max_tokens: u32,
    return_token_ids: bool,
    #[serde(flatten)]
    check: Option<Extra>,
}

#[derive(Deserialize)]
struct CompletionReply {
    #[serde(default)]
    choices: Vec<Choice>,
    kv_transfer_params: Option<TransferParams>,
}

#[derive(Deserialize)]
struct Choice {
    prompt_token_ids: Option<Vec<i64>>,
}

#[derive(Deserialize)]
struct TransferParams {
    hidden_states_path: Option<PathBuf>,
}

/// The states of one prompt from the server's model `model`.
pub(crate) async fn fetch(
    call: &Call<'_>,
    model: &str,
    max_model_len: Option<usize>,
) -> Result<HiddenStates, Failure> {
    let prompt = &call.request.input_ids;
    check_length(call, max_model_len)?;
    let mut check = Check::due(call, model);
    let reply = match post(call, model, check.as_ref().map(|_| Extra::AFTER)).await {
        // It may accept the prompt but refuse the check's parameters.
        Err(Failure::Rejected(_) | Failure::Garbled(_)) if check.is_some() => {
            let reply = post(call, model, None).await?;
            let refused = Finding::Unknown("it refuses to send log-probabilities");
            check.take().inspect(|check| check.note(call.endpoint.check(), &refused));
            reply
        }
        reply => reply?,
    };
    let body = call.body(PATH, reply, REPLY_ROOM + TOKEN_ROOM * prompt.len()).await?;
    let files = named_files(call, &body)?;
    wait_until_written(&files).await?;
    let config = call.config;
    let last = config.num_hidden_layers.filter(|_| call.with_last() || check.is_some());
    let (layer_ids, hidden_size) = (config.layer_ids.clone(), config.hidden_size);
    let request = call.request.clone();
    let read = move || {
        let with_last = last.filter(|last| !layer_ids.contains(last));
        let with_last = with_last.map(|last| [&layer_ids[..], &[last]].concat());
        let states = read(&files, &request, &layer_ids, with_last.as_deref(), hidden_size)?;
        let checked = match check {
            Some(check) => Some((check.run(&body, &states)?, check)),
            None => None,
        };
        Ok((states, checked))
    };
    let (states, checked) =
        joined(tokio::task::spawn_blocking(read).await).map_err(Failure::Fatal)??;
    if let Some((finding, check)) = checked {
        check.note(call.endpoint.check(), &finding);
    }
    Ok(states)
}

/// The states of one prompt including the last layer's, if they are in the file, the
/// log-probabilities in the reply, and the number of requests: a server may refuse to send
/// log-probabilities.
pub(crate) async fn probe(
    call: &Call<'_>,
    model: &str,
    max_model_len: Option<usize>,
) -> Result<(HiddenStates, Vec<LogProbability>, u32), Failure> {
    check_length(call, max_model_len)?;
    let mut requests = 1;
    let mut reply = post(call, model, Some(Extra::OF_PROMPT)).await;
    for less in [Some(Extra::AFTER), None] {
        if matches!(reply, Err(Failure::Rejected(_) | Failure::Garbled(_))) {
            requests += 1;
            reply = post(call, model, less).await;
        }
    }
    let prompt = &call.request.input_ids;
    let body = call.body(PATH, reply?, REPLY_ROOM + PROBE_ROOM * prompt.len()).await?;
    let files = named_files(call, &body)?;
    wait_until_written(&files).await?;
    let reported = reported(&body, prompt.len());
    let (request, config) = (call.request.clone(), call.config);
    let (layer_ids, hidden_size) = (config.layer_ids.clone(), config.hidden_size);
    let last = config.num_hidden_layers.filter(|last| !layer_ids.contains(last));
    let with_last = last.map(|last| [&layer_ids[..], &[last]].concat());
    let read = move || read(&files, &request, &layer_ids, with_last.as_deref(), hidden_size);
    let states = joined(tokio::task::spawn_blocking(read).await).map_err(Failure::Fatal)??;
    Ok((states, reported, requests))
}

async fn post(call: &Call<'_>, model: &str, check: Option<Extra>) -> Result<Response, Failure> {
    let prompt = &*call.request.input_ids;
    let body = CompletionRequest { model, prompt, max_tokens: 1, return_token_ids: true, check };
    call.post(PATH, &body).await
}

/// vLLM generates a token after the prompt, so the prompt must leave room for it.
fn check_length(call: &Call<'_>, max_model_len: Option<usize>) -> Result<(), Failure> {
    let tokens = call.request.input_ids.len();
    match max_model_len {
        Some(longest) if tokens >= longest => Err(Failure::Rejected(Error::PromptTooLong {
            sample: call.request.sample,
            tokens,
            limit: longest.saturating_sub(1),
            url: call.endpoint.url(""),
        })),
        _ => Ok(()),
    }
}

/// The files that a reply names, if it is a reply to this prompt.
fn named_files(call: &Call<'_>, body: &[u8]) -> Result<SharedFiles, Failure> {
    let url = call.endpoint.url(PATH);
    let (config, request) = (call.config, call.request);
    let Some(dir) = &config.shared_storage else {
        return Err(Failure::Doubtful(Error::NoStorage { url }));
    };
    let path = path_in(body, request, &url)?;
    // It may have one slot more than requested, of the widest type.
    let largest_row = (config.layer_ids.len() + 1) * config.hidden_size * Dtype::F32.size();
    SharedFiles::new(&path, dir, &url, &request.input_ids, largest_row)
}

/// The path in a reply to the prompt of `request`.
fn path_in(body: &[u8], request: &Request, url: &str) -> Result<PathBuf, Failure> {
    let origin = || url.to_owned();
    let reply: CompletionReply = serde_json::from_slice(body).map_err(|_| {
        let found = "it does not reply to a prompt as vLLM does".into();
        Failure::Doubtful(Error::UnknownServer { url: origin(), found })
    })?;
    let path = reply.kv_transfer_params.and_then(|params| params.hidden_states_path);
    let path = path.ok_or_else(|| Failure::Doubtful(Error::NoStatesPath { url: origin() }))?;
    let ran = reply.choices.into_iter().next().and_then(|choice| choice.prompt_token_ids);
    let missing = "choices[0].prompt_token_ids";
    let ran =
        ran.ok_or_else(|| Failure::Doubtful(Error::Incomplete { origin: origin(), missing }))?;
    match position_of_difference(&ran, &request.input_ids) {
        None => Ok(path),
        Some(0) if ran.get(1..) == Some(&request.input_ids) => {
            Err(Failure::Doubtful(Error::AddedToken { origin: origin(), token: ran[0] }))
        }
        Some(position) => {
            let sample = request.sample;
            Err(Failure::Invalid(Error::OtherTokens { origin: origin(), sample, position }))
        }
    }
}

fn unreadable(files: &SharedFiles, source: io::Error) -> Failure {
    Failure::Fatal(Error::SharedFile { path: files.data.clone(), source })
}

/// Waits until vLLM releases its exclusive lock.
async fn wait_until_written(files: &SharedFiles) -> Result<(), Failure> {
    let start = Instant::now();
    loop {
        let state = lock_state(files).map_err(|source| unreadable(files, source))?;
        let waited = start.elapsed();
        match state {
            LockState::Written => return Ok(()),
            LockState::Absent if waited > APPEARS_WITHIN => {
                return Err(unreadable(files, io::ErrorKind::NotFound.into()));
            }
            LockState::Held if waited > WRITTEN_WITHIN => {
                let (path, after) = (files.lock.clone(), WRITTEN_WITHIN);
                return Err(Failure::Transient(Error::StillLocked { path, after }));
            }
            _ => tokio::time::sleep(LOOK_EVERY).await,
        }
    }
}

enum LockState {
    Absent,
    Held,
    Written,
}

fn lock_state(files: &SharedFiles) -> io::Result<LockState> {
    let file = match open_regular(&files.lock, false) {
        Ok(file) => file,
        // vLLM creates the lock before it replies, unless locks were turned off.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(if files.has_data()? { LockState::Written } else { LockState::Absent });
        }
        Err(error) => return Err(error),
    };
    match file.try_lock_shared() {
        // Unlocked before the data is there: vLLM has created the file but not locked it yet.
        Ok(()) if files.has_data()? => Ok(LockState::Written),
        Ok(()) => Ok(LockState::Absent),
        Err(TryLockError::WouldBlock) => Ok(LockState::Held),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// The requested layers, and the last one if the server has returned it. Refuses the results of
/// prefix caching, chunked prefill or a broken server.
fn read(
    files: &SharedFiles,
    request: &Request,
    layer_ids: &[u32],
    with_last: Option<&[u32]>,
    hidden_size: usize,
) -> Result<HiddenStates, Failure> {
    let refused = |error| match error {
        Error::SharedFile { .. } => Failure::Fatal(error),
        Error::Shape { .. } | Error::FileSize { .. } => Failure::Doubtful(error),
        _ => Failure::Invalid(error),
    };
    let mut file = files.open().map_err(refused)?;
    let (expected, origin) = (request.input_ids.len(), files.data.display().to_string());
    let (tokens, ids) = file.token_ids(expected).map_err(refused)?;
    let got = file.rows().unwrap_or(tokens);
    if got != expected {
        return Err(Failure::Invalid(Error::RowCount { origin, expected, got }));
    }
    let position = (tokens > expected).then_some(expected);
    if let Some(position) = position_of_difference(&ids, &request.input_ids).or(position) {
        let sample = request.sample;
        return Err(Failure::Invalid(Error::OtherTokens { origin, sample, position }));
    }
    let mut take = |layer_ids| file.states(Wanted { layer_ids, hidden_size, tokens: expected });
    let states = match with_last.map(&mut take) {
        Some(Ok(states)) => states,
        _ => take(layer_ids).map_err(refused)?,
    };
    states.check_rows(&origin).map_err(Failure::Invalid)?;
    Ok(states)
}

fn position_of_difference(a: &[i64], b: &[i64]) -> Option<usize> {
    first_difference(a, b).or(first_difference(b, a))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use dflash_test_support::random;
    use safetensors::Dtype as StoredDtype;
    use safetensors::tensor::TensorView;

    use super::*;
    use crate::tests::{damaged, sample};

    const PROMPT: [i64; 3] = [10, 11, 12];

    fn request() -> Request {
        Request { sample: 7, input_ids: PROMPT.to_vec() }
    }

    #[test]
    fn a_damaged_reply_names_no_other_file_for_other_tokens() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("cmpl-1.safetensors");
        let reply = serde_json::json!({"choices": [{"prompt_token_ids": PROMPT}],
            "kv_transfer_params": {"hidden_states_path": file}});
        let reply = reply.to_string();
        let named = |body: &[u8]| {
            let path = path_in(body, &request(), "url").ok()?;
            SharedFiles::new(&path, dir.path(), "url", &PROMPT, 64).ok()
        };
        assert_eq!(
            named(reply.as_bytes()).unwrap().data,
            fs::canonicalize(&dir).unwrap().join("cmpl-1.safetensors")
        );
        let mut random = random();
        for _ in 0..10_000 {
            if let Some(files) = named(&damaged(reply.as_bytes(), &mut random)) {
                assert_eq!(files.data.parent(), Some(fs::canonicalize(&dir).unwrap().as_path()));
            }
        }
    }

    /// As vLLM writes it, with one slot more than requested.
    fn write(path: &Path) -> Vec<u8> {
        let states = sample(&[2, 5, 8], 3, 4);
        let row = |row: usize, id: u32| states.layer(id).unwrap()[row * 8..][..8].to_vec();
        let rows: Vec<u8> = (0..3).flat_map(|r| [2, 5, 8].map(|id| row(r, id)).concat()).collect();
        let ids: Vec<u8> = PROMPT.iter().flat_map(|id| id.to_le_bytes()).collect();
        let ids = TensorView::new(StoredDtype::I64, vec![3], &ids).unwrap();
        let view = TensorView::new(StoredDtype::BF16, vec![3, 3, 4], &rows).unwrap();
        let tensors = [("hidden_states", view), ("token_ids", ids)];
        fs::write(path, safetensors::serialize(tensors, None).unwrap()).unwrap();
        rows
    }

    #[test]
    fn a_damaged_file_gives_no_rows_but_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cmpl-1.safetensors");
        let files = || SharedFiles::new(&path, dir.path(), "url", &PROMPT, 3 * 16).unwrap();
        let mut random = random();
        let (rows, whole) = (write(&path), fs::read(&path).unwrap());
        let take = |files: &SharedFiles| read(files, &request(), &[2, 5], None, 4);
        let right = take(&files()).unwrap();
        assert_eq!(right, sample(&[2, 5], 3, 4));
        assert!(!path.exists(), "what was read is removed");
        for _ in 0..10_000 {
            let bytes = damaged(&whole, &mut random);
            fs::write(&path, &bytes).unwrap();
            if let Ok(states) = take(&files()) {
                // Without a digest, damage in the rows themselves cannot be noticed.
                let has_rows = bytes.windows(rows.len()).any(|window| window == rows);
                assert!(states == right || !has_rows);
            }
        }
    }
}
