//! Fetching a dataset's files, a model's tokenizer or a drafter from the Hugging Face Hub.
//!
//! The official client does the work, with its cache, token, `HF_ENDPOINT` and `HF_HOME`. Data
//! comes from the Hub's own Parquet conversion (branch `refs/convert/parquet`, one folder for each
//! configuration and split), which spares us every repository's own layout.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hf_hub::repository::RepoType;
use hf_hub::{HFClient, HFError, HFRepository};

use crate::error::Error;
use crate::source::HubData;

/// The branch on which the Hub keeps its Parquet conversion.
const PARQUET_BRANCH: &str = "refs/convert/parquet";
/// What a tokenizer with a chat template consists of.
const TOKENIZER_FILES: [&str; 6] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
];
/// What a drafter's checkpoint consists of, as far as training starts from it.
const DRAFT_FILES: [&str; 2] = ["config.json", "model.safetensors"];
/// How long the Hub may take to say that it knows a repository.
const FIRST_ANSWER: Duration = Duration::from_secs(30);
/// How often a download looks whether it should stop.
const STOP_POLL: Duration = Duration::from_millis(100);

/// Downloads a dataset's split and returns its Parquet files in order.
pub(crate) fn fetch_data(data: &HubData, stop: &AtomicBool) -> Result<Vec<PathBuf>, Error> {
    let failed =
        |reason: String| Error::FetchData { repo: data.repo.clone(), offline: whence(), reason };
    let folder = format!("{}/{}", data.config, data.split);
    // Splits too large to convert whole are kept under this name.
    let partial = format!("{}/partial-{}", data.config, data.split);
    let patterns = vec![format!("{folder}/*.parquet"), format!("{partial}/*.parquet")];
    let snapshot = on_runtime(stop, async {
        let client = client()?;
        let (owner, name) = hf_hub::split_id(&data.repo);
        fetch(&client.dataset(owner, name), Some(PARQUET_BRANCH), patterns).await
    })?
    .map_err(failed)?;
    let mut files = parquet_files(&snapshot.join(&folder));
    files.extend(parquet_files(&snapshot.join(&partial)));
    if files.is_empty() {
        return Err(failed(format!(
            "it has no split {} of configuration {}",
            data.split, data.config
        )));
    }
    Ok(files)
}

/// Downloads a model's tokenizer files and returns their directory.
pub(crate) fn fetch_tokenizer(repo: &str, stop: &AtomicBool) -> Result<PathBuf, Error> {
    let failed =
        |reason: String| Error::FetchModel { repo: repo.to_owned(), offline: whence(), reason };
    fetch_model(repo, &TOKENIZER_FILES, stop)?.map_err(failed)
}

/// Downloads a drafter's checkpoint from the Hub and returns its directory.
pub(crate) fn fetch_draft(repo: &str, stop: &AtomicBool) -> Result<PathBuf, Error> {
    let failed =
        |reason: String| Error::FetchDraft { repo: repo.to_owned(), offline: whence(), reason };
    fetch_model(repo, &DRAFT_FILES, stop)?.map_err(failed)
}

/// Downloads `files` of a model's repository, those that it has.
fn fetch_model(
    repo: &str,
    files: &[&str],
    stop: &AtomicBool,
) -> Result<Result<PathBuf, String>, Error> {
    let patterns = files.iter().map(|&file| file.to_owned()).collect();
    on_runtime(stop, async {
        let client = client()?;
        let (owner, name) = hf_hub::split_id(repo);
        fetch(&client.model(owner, name), None, patterns).await
    })
}

async fn fetch<T: RepoType>(
    repository: &HFRepository<T>,
    revision: Option<&str>,
    patterns: Vec<String>,
) -> Result<PathBuf, String> {
    let offline = is_offline();
    if !offline {
        // A host that never answers would otherwise hold us for the kernel's patience.
        match tokio::time::timeout(FIRST_ANSWER, repository.exists().send()).await {
            Err(_) => return Err(format!("no answer within {} s", FIRST_ANSWER.as_secs())),
            Ok(Err(error)) => return Err(explain(&error)),
            Ok(Ok(false)) => return Err("the Hub knows no such repository".to_owned()),
            Ok(Ok(true)) => {}
        }
    }
    repository
        .snapshot_download()
        .maybe_revision(revision.map(str::to_owned))
        .allow_patterns(patterns)
        .local_files_only(offline)
        .send()
        .await
        .map_err(|error| explain(&error))
}

fn client() -> Result<HFClient, String> {
    HFClient::builder()
        .retry_max_attempts(2)
        .retry_base_delay(Duration::from_millis(200))
        .build()
        .map_err(|error| explain(&error))
}

/// Runs a download until it ends or the run is asked to stop.
fn on_runtime<T>(
    stop: &AtomicBool,
    work: impl Future<Output = Result<T, String>>,
) -> Result<Result<T, String>, Error> {
    let runtime =
        match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => return Ok(Err(error.to_string())),
        };
    runtime.block_on(async {
        let stopped = async {
            while !stop.load(Ordering::Relaxed) {
                tokio::time::sleep(STOP_POLL).await;
            }
        };
        tokio::select! {
            done = work => Ok(done),
            () = stopped => Err(Error::Interrupted),
        }
    })
}

/// The innermost cause says what happened ("connection refused"); the layers above only say that
/// a request failed.
fn explain(error: &HFError) -> String {
    if matches!(error, HFError::LocalEntryNotFound { .. }) {
        return "it is not in the local cache".to_owned();
    }
    let mut cause: &dyn std::error::Error = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

/// ` from <endpoint>`, or that the offline mode is on.
fn whence() -> String {
    if is_offline() {
        return " (HF_HUB_OFFLINE is set)".to_owned();
    }
    std::env::var("HF_ENDPOINT")
        .map_or_else(|_| String::new(), |endpoint| format!(" from {endpoint}"))
}

/// Whether the user forbids network access, in the words of the official Python client.
fn is_offline() -> bool {
    std::env::var("HF_HUB_OFFLINE")
        .is_ok_and(|value| matches!(value.to_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE"))
}

fn parquet_files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|ending| ending == "parquet"))
        .collect();
    files.sort();
    files
}
