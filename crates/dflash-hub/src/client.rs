//! The Hub, asked for exactly the files that are needed.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::cache::Cache;
use crate::error::Reason;
use crate::fetch::Repository;
use crate::home;
use crate::login::HUGGING_FACE;
use crate::name::Name;
use crate::part::Part;
use crate::progress::Meter;
use crate::web::Web;

/// The branch that a name without a revision means.
const MAIN: &str = "main";
/// The branch on which the Hub keeps its Parquet conversion of a dataset.
const PARQUET_BRANCH: &str = "refs/convert/parquet";
/// How long the Hub may take to say that it knows a repository.
const FIRST_ANSWER: Duration = Duration::from_secs(30);
/// The same where somebody only waits to be told so.
const LOGIN_ANSWER: Duration = Duration::from_secs(10);

/// The Hub, its cache on this machine, and whether the network may be used.
#[derive(Debug)]
pub(crate) struct Session {
    web: Web,
    cache: PathBuf,
    offline: bool,
}

impl Session {
    pub(crate) fn open(
        endpoint: Option<&str>,
        cache: Option<&Path>,
        offline: bool,
    ) -> Result<Self, Reason> {
        let named = home::set("HF_ENDPOINT");
        let web = Web::open(endpoint.or(named.as_deref()).unwrap_or(HUGGING_FACE))?;
        Ok(Self { web, cache: cache.map_or_else(home::cache, Path::to_owned), offline })
    }

    /// The name that the Hub knows us by.
    pub(crate) async fn whoami(&self) -> Result<String, Reason> {
        let asked = self.web.json(self.web.url(["api", "whoami-v2"]));
        let facts = in_time(LOGIN_ANSWER, asked).await?;
        let none = || Reason::Client("the Hub's answer has no name".to_owned());
        facts["name"].as_str().map(str::to_owned).ok_or_else(none)
    }

    /// The directory with `part` of a model, complete.
    pub(crate) async fn model(&self, name: Name<'_>, part: Part) -> Result<PathBuf, Reason> {
        let repository = self.repository("models", name).await?;
        let label = repository.id();
        let revision = name.revision.unwrap_or(MAIN);
        let dir = self.snapshot(&repository, label.clone(), (revision, part.files())).await?;
        let weights = part.weights(&dir);
        if !weights.is_empty() {
            // Of the same commit, even if somebody pushes meanwhile: its hash names the directory.
            let commit = dir.file_name().and_then(|name| name.to_str()).unwrap_or(revision);
            let label = format!("the weights of {label}");
            self.snapshot(&repository, label, (commit, weights)).await?;
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
        (config, split): (&str, &str),
    ) -> Result<Vec<PathBuf>, Reason> {
        let repository = self.repository("datasets", name).await?;
        // Splits too large to convert whole are kept under the second name.
        let folders = [format!("{config}/{split}"), format!("{config}/partial-{split}")];
        let patterns = folders.iter().map(|folder| format!("{folder}/*.parquet")).collect();
        let none = || Reason::NoSplit { config: config.into(), split: split.into() };
        let label = format!("{} ({config}/{split})", repository.id());
        let dir = match self.snapshot(&repository, label, (PARQUET_BRANCH, patterns)).await {
            Err(Reason::UnknownRevision(_)) => return Err(none()),
            outcome => outcome?,
        };
        let files: Vec<PathBuf> =
            folders.iter().flat_map(|folder| parquet_files(&dir.join(folder))).collect();
        if files.is_empty() { Err(none()) } else { Ok(files) }
    }

    /// One file of a dataset's repository, as it is on the main branch.
    pub(crate) async fn dataset_file(&self, name: Name<'_>, file: &str) -> Result<PathBuf, Reason> {
        let repository = self.repository("datasets", name).await?;
        let label = format!("{file} of {}", repository.id());
        let wanted = (name.revision.unwrap_or(MAIN), vec![file.to_owned()]);
        let path = self.snapshot(&repository, label, wanted).await?.join(file);
        match path.is_file() {
            true => Ok(path),
            false if self.offline => Err(Reason::NotCachedWhole(file.to_owned())),
            false => Err(Reason::NoFile(file.to_owned())),
        }
    }

    /// A repository that the Hub knows, where it may be asked. Asked first: later answers do not tell
    /// it from its revision, and a host that never answers would hold us until the kernel gives up.
    async fn repository<'a>(
        &'a self,
        kind: &'static str,
        Name { owner, name, .. }: Name<'a>,
    ) -> Result<Repository<'a>, Reason> {
        let cache = Cache::of(&self.cache, &format!("{kind}/{owner}/{name}"));
        let repository = Repository { web: &self.web, cache, kind, owner, name };
        if !self.offline {
            match in_time(FIRST_ANSWER, self.web.json(repository.api([]))).await {
                // Without a login the Hub answers 401 for repositories that do not exist.
                Err(Reason::NotThere | Reason::NoLogin) => return Err(Reason::UnknownRepository),
                answer => answer.map(drop)?,
            }
        }
        Ok(repository)
    }

    /// The snapshot's directory, with what the repository has of `files`; offline, as it is.
    async fn snapshot(
        &self,
        repository: &Repository<'_>,
        label: String,
        (revision, files): (&str, Vec<String>),
    ) -> Result<PathBuf, Reason> {
        if self.offline {
            return repository.cached(revision);
        }
        let meter = Meter::start(label);
        let dir = repository.fetch(revision, &files, &meter).await?;
        meter.finish();
        Ok(dir)
    }
}

/// The answer, if it comes in time.
async fn in_time<T>(
    limit: Duration,
    answer: impl Future<Output = Result<T, Reason>>,
) -> Result<T, Reason> {
    let late = || Reason::Unreachable(format!("no answer within {} s", limit.as_secs()));
    tokio::time::timeout(limit, answer).await.unwrap_or_else(|_| Err(late()))
}

fn parquet_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.retain(|path| path.extension().is_some_and(|ending| ending == "parquet"));
    files.sort();
    files
}
