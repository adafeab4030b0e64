//! Asking a stock vLLM for one sample: it answers with the name of a file on shared storage.
//!
//! vLLM runs the prompt, replies, and writes the file afterwards, holding an exclusive flock on
//! `<file>.lock` until it is whole. The client waits for the lock, reads, and deletes both.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::Response;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::error::Error;
use crate::fetch::joined;
use crate::offline::{Wanted, first_difference, parse_file};
use crate::own::Call;
use crate::record::HiddenStates;
use crate::retry::Failure;
use crate::vllm_check::{Check, Extra, Finding};

/// How long a file may take to appear. It is created before the reply or right after it, so a
/// longer absence means that server and trainer do not share the directory.
const APPEARS_WITHIN: Duration = Duration::from_secs(5);
/// How long vLLM may take to write it.
const WRITTEN_WITHIN: Duration = Duration::from_secs(30);
/// Between two looks at the lock; writing takes a few milliseconds.
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
    let reply = match post(call, model, check.as_ref()).await {
        // It may take the prompt and refuse what the check asks for.
        Err(Failure::Rejected(_)) if check.is_some() => {
            let reply = post(call, model, None).await?;
            let refused = Finding::Unknown("it refuses to send log-probabilities");
            check.take().inspect(|check| check.note(call.endpoint.check(), &refused));
            reply
        }
        reply => reply?,
    };
    let url = call.endpoint.url("/v1/completions");
    let bytes = reply.bytes().await.map_err(|error| call.transport(&url, error))?;
    let files = SharedFiles::from_reply(&bytes, prompt, call.request.sample, &url)?;
    files.wait_until_written().await?;
    let config = call.config;
    let last = config.num_hidden_layers.filter(|_| call.with_last() || check.is_some());
    let (layer_ids, hidden_size) = (config.layer_ids.clone(), config.hidden_size);
    let (prompt, sample) = (prompt.clone(), call.request.sample);
    let read = move || {
        let states = files.read(&layer_ids, last, hidden_size)?;
        let states = check_rows(states, &prompt, sample, &files.data.display().to_string())?;
        let checked = match check {
            Some(check) => Some((check.run(&bytes, &states)?, check)),
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

async fn post(call: &Call<'_>, model: &str, check: Option<&Check>) -> Result<Response, Failure> {
    let (prompt, check) = (&*call.request.input_ids, check.map(Check::extra));
    let body = CompletionRequest { model, prompt, max_tokens: 1, return_token_ids: true, check };
    call.post("/v1/completions", &body).await
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

/// The file that a reply names and its lock. Both are gone when this is dropped.
#[derive(Debug)]
struct SharedFiles {
    data: PathBuf,
    lock: PathBuf,
}

impl Drop for SharedFiles {
    fn drop(&mut self) {
        // Shared memory fills up otherwise. A file that is not there was never written.
        let _ = fs::remove_file(&self.data);
        let _ = fs::remove_file(&self.lock);
    }
}

impl SharedFiles {
    fn from_reply(body: &[u8], prompt: &[i64], sample: u64, url: &str) -> Result<Self, Failure> {
        let origin = || url.to_owned();
        let reply: CompletionReply = serde_json::from_slice(body).map_err(|_| {
            let found = "it does not reply to a prompt as vLLM does".into();
            Failure::Fatal(Error::UnknownServer { url: origin(), found })
        })?;
        let path = reply.kv_transfer_params.and_then(|params| params.hidden_states_path);
        // The file will be deleted: whatever else a server names is left alone.
        let path = path.filter(|path| path.extension().is_some_and(|end| end == "safetensors"));
        let data = path.ok_or_else(|| Failure::Fatal(Error::NoStatesPath { url: origin() }))?;
        let mut lock = data.clone().into_os_string();
        lock.push(".lock");
        let files = Self { data, lock: lock.into() };
        let ran = reply.choices.into_iter().next().and_then(|choice| choice.prompt_token_ids);
        let missing = "choices[0].prompt_token_ids";
        let ran =
            ran.ok_or_else(|| Failure::Fatal(Error::Incomplete { origin: origin(), missing }))?;
        match position_of_difference(&ran, prompt) {
            None => Ok(files),
            Some(position) => {
                Err(Failure::Invalid(Error::OtherTokens { origin: origin(), sample, position }))
            }
        }
    }

    fn unreadable(&self, source: io::Error) -> Failure {
        Failure::Fatal(Error::SharedFile { path: self.data.clone(), source })
    }

    /// Waits for vLLM's exclusive lock to go.
    async fn wait_until_written(&self) -> Result<(), Failure> {
        let start = Instant::now();
        loop {
            let state = lock_state(&self.lock, &self.data);
            let state = state.map_err(|source| self.unreadable(source))?;
            let waited = start.elapsed();
            match state {
                LockState::Written => return Ok(()),
                LockState::Absent if waited > APPEARS_WITHIN => {
                    return Err(self.unreadable(io::ErrorKind::NotFound.into()));
                }
                LockState::Held if waited > WRITTEN_WITHIN => {
                    let (path, after) = (self.lock.clone(), WRITTEN_WITHIN);
                    return Err(Failure::Transient(Error::StillLocked { path, after }));
                }
                _ => tokio::time::sleep(LOOK_EVERY).await,
            }
        }
    }

    /// The wanted layers, and the last one if the server has captured it.
    fn read(
        &self,
        layer_ids: &[u32],
        last: Option<u32>,
        hidden_size: usize,
    ) -> Result<(Vec<i64>, HiddenStates), Failure> {
        let bytes = fs::read(&self.data).map_err(|source| self.unreadable(source))?;
        let parse =
            |layer_ids: &[u32]| parse_file(&self.data, &bytes, Wanted { layer_ids, hidden_size });
        let last = last.filter(|last| !layer_ids.contains(last));
        let with_last = last.map(|last| [layer_ids, &[last]].concat());
        let parsed = match with_last.map(|ids| parse(&ids)) {
            Some(Ok(parsed)) => Ok(parsed),
            _ => parse(layer_ids),
        };
        parsed.map_err(|error| match error {
            Error::Shape { .. } => Failure::Fatal(error),
            _ => Failure::Invalid(error),
        })
    }
}

enum LockState {
    Absent,
    Held,
    Written,
}

fn lock_state(lock: &Path, data: &Path) -> io::Result<LockState> {
    let file = match File::open(lock) {
        Ok(file) => file,
        // vLLM makes the lock before it replies, unless it was told to do without.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(if data.exists() { LockState::Written } else { LockState::Absent });
        }
        Err(error) => return Err(error),
    };
    match file.try_lock_shared() {
        // Free before the data is there: vLLM has made the file and not locked it yet.
        Ok(()) if data.exists() => Ok(LockState::Written),
        Ok(()) => Ok(LockState::Absent),
        Err(TryLockError::WouldBlock) => Ok(LockState::Held),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Refuses what prefix caching, chunked prefill or a broken server leave behind.
fn check_rows(
    (stored_ids, states): (Vec<i64>, HiddenStates),
    prompt: &[i64],
    sample: u64,
    origin: &str,
) -> Result<HiddenStates, Failure> {
    let origin = || origin.to_owned();
    if states.tokens != prompt.len() {
        let (expected, got) = (prompt.len(), states.tokens);
        return Err(Failure::Invalid(Error::RowCount { origin: origin(), expected, got }));
    }
    if let Some(position) = position_of_difference(&stored_ids, prompt) {
        return Err(Failure::Invalid(Error::OtherTokens { origin: origin(), sample, position }));
    }
    states.check_rows(&origin()).map_err(Failure::Invalid)?;
    Ok(states)
}

fn position_of_difference(a: &[i64], b: &[i64]) -> Option<usize> {
    first_difference(a, b).or(first_difference(b, a))
}
