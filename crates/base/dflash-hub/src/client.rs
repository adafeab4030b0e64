//! The official client, limited to the files that are needed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hf_hub::repository::RepoType;
use hf_hub::{HFClient, HFError, HFRepository};

use crate::error::Reason;
use crate::name::Name;
use crate::part::ModelPart;
use crate::progress::Meter;

/// The branch on which the Hub keeps its Parquet conversion of a dataset.
const PARQUET_BRANCH: &str = "refs/convert/parquet";
/// How long the Hub may take to confirm that a repository exists.
const FIRST_ANSWER: Duration = Duration::from_secs(30);
/// The same if only the login is checked.
const LOGIN_ANSWER: Duration = Duration::from_secs(10);

/// A client, and whether it may use the network.
#[derive(Debug)]
pub(crate) struct Session {
    client: HFClient,
    offline: bool,
}

impl Session {
    pub(crate) fn open(
        endpoint: Option<&str>,
        cache: Option<&Path>,
        offline: bool,
    ) -> Result<Self, Reason> {
        let mut builder =
            HFClient::builder().retry_max_attempts(2).retry_base_delay(Duration::from_millis(200));
        if let Some(endpoint) = endpoint {
            builder = builder.endpoint(endpoint);
        }
        if let Some(cache) = cache {
            builder = builder.cache_dir(cache);
        }
        Ok(Self { client: builder.build().map_err(reason)?, offline })
    }

    /// Our user name on the Hub.
    pub(crate) async fn whoami(&self) -> Result<String, Reason> {
        match tokio::time::timeout(LOGIN_ANSWER, self.client.whoami().send()).await {
            Ok(answer) => answer.map(|user| user.username).map_err(reason),
            Err(_) => {
                Err(Reason::Unreachable(format!("no answer within {} s", LOGIN_ANSWER.as_secs())))
            }
        }
    }

    /// The directory with `part` of a model, complete.
    pub(crate) async fn model(&self, name: Name<'_>, part: ModelPart) -> Result<PathBuf, Reason> {
        let repository = self.client.model(name.owner, name.name);
        if !self.offline {
            known(&repository).await?;
        }
        let id = repository.repo_path();
        let dir = self.snapshot(&repository, id.clone(), name.revision, part.files()).await?;
        let weights = part.weights(&dir);
        if !weights.is_empty() {
            // Of the same commit, even if someone pushes meanwhile: its hash names the directory.
            let commit = dir.file_name().and_then(|name| name.to_str());
            let label = format!("the weights of {id}");
            self.snapshot(&repository, label, commit, weights).await?;
        }
        match part.missing(&dir) {
            None => Ok(dir),
            Some(file) if self.offline => Err(Reason::NotCachedWhole(file)),
            Some(file) => Err(Reason::NoFile(file)),
        }
    }

    /// The Parquet files of a dataset's split.
    pub(crate) async fn split(
        &self,
        name: Name<'_>,
        config: &str,
        split: &str,
    ) -> Result<Vec<PathBuf>, Reason> {
        let repository = self.client.dataset(name.owner, name.name);
        if !self.offline {
            known(&repository).await?;
        }
        // Splits too large to convert whole are kept under the second name.
        let folders = [format!("{config}/{split}"), format!("{config}/partial-{split}")];
        let patterns = folders.iter().map(|folder| format!("{folder}/*.parquet")).collect();
        let none = || Reason::NoSplit { config: config.into(), split: split.into() };
        let label = format!("{} ({config}/{split})", repository.repo_path());
        let dir = match self.snapshot(&repository, label, Some(PARQUET_BRANCH), patterns).await {
            Err(Reason::UnknownRevision(_)) => return Err(none()),
            outcome => outcome?,
        };
        let files: Vec<PathBuf> =
            folders.iter().flat_map(|folder| parquet_files(&dir.join(folder))).collect();
        if files.is_empty() { Err(none()) } else { Ok(files) }
    }

    /// One file of a dataset's repository, as it is on the main branch.
    pub(crate) async fn dataset_file(&self, name: Name<'_>, file: &str) -> Result<PathBuf, Reason> {
        let repository = self.client.dataset(name.owner, name.name);
        if !self.offline {
            known(&repository).await?;
        }
        let label = format!("{file} of {}", repository.repo_path());
        let dir = self.snapshot(&repository, label, name.revision, vec![file.to_owned()]).await?;
        let path = dir.join(file);
        match path.is_file() {
            true => Ok(path),
            false if self.offline => Err(Reason::NotCachedWhole(file.to_owned())),
            false => Err(Reason::NoFile(file.to_owned())),
        }
    }

    /// The snapshot's directory, with those of `files` that the repository has; offline, as it is.
    async fn snapshot<T: RepoType>(
        &self,
        repository: &HFRepository<T>,
        label: String,
        revision: Option<&str>,
        files: Vec<String>,
    ) -> Result<PathBuf, Reason> {
        let meter = Arc::new(Meter::start(label));
        loop {
            let outcome = repository
                .snapshot_download()
                .maybe_revision(revision.map(str::to_owned))
                .allow_patterns(files.clone())
                .local_files_only(self.offline)
                .progress(Arc::clone(&meter))
                .send()
                .await;
            match outcome {
                // The client gives up after ten seconds; a model takes minutes.
                Err(HFError::CacheLockTimeout { .. }) => meter.wait_for_another(),
                outcome => {
                    let dir = outcome.map_err(reason)?;
                    meter.finish();
                    return meter.verify(&dir).map(|()| dir);
                }
            }
        }
    }
}

/// Checks the repository first: later answers do not distinguish a missing repository from a
/// missing revision, and an unresponsive host would block us until the kernel gives up.
async fn known<T: RepoType>(repository: &HFRepository<T>) -> Result<(), Reason> {
    match tokio::time::timeout(FIRST_ANSWER, repository.exists().send()).await {
        Err(_) => {
            Err(Reason::Unreachable(format!("no answer within {} s", FIRST_ANSWER.as_secs())))
        }
        // Without a login the Hub answers 401 for repositories that do not exist.
        Ok(Ok(false) | Err(HFError::AuthRequired { .. })) => Err(Reason::UnknownRepository),
        Ok(Err(error)) => Err(reason(error)),
        Ok(Ok(true)) => Ok(()),
    }
}

fn reason(error: HFError) -> Reason {
    match error {
        HFError::LocalEntryNotFound { .. } => Reason::NotCached,
        HFError::RevisionNotFound { revision, .. } => Reason::UnknownRevision(revision),
        HFError::AuthRequired { .. } | HFError::Forbidden { .. } => Reason::Refused,
        HFError::Http { context } if matches!(context.status.as_u16(), 401 | 403) => {
            Reason::Refused
        }
        HFError::Request { .. } => Reason::Unreachable(innermost(&error)),
        error => Reason::Client(innermost(&error)),
    }
}

/// The innermost cause says what happened ("connection refused"); the layers above only say that
/// a request failed.
pub(crate) fn innermost(error: &HFError) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

fn parquet_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.retain(|path| path.extension().is_some_and(|ending| ending == "parquet"));
    files.sort();
    files
}
