//! Resolves a name to a directory or files: blocking calls that watch the stop flag.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dflash_io::say;
use dflash_settings::shown_endpoint;

use crate::client::Session;
use crate::error::{Error, Reason};
use crate::name::Name;
use crate::owner::with_owner;
use crate::part::ModelPart;
use crate::recognise;

/// How often a download checks the stop flag.
const STOP_POLL: Duration = Duration::from_millis(100);

/// The Hub, or a mirror of it, and its cache on this machine.
#[derive(Debug, Clone, Default)]
pub struct Hub {
    /// `None` for the client's choice: `HF_ENDPOINT`, else huggingface.co.
    pub endpoint: Option<String>,
    /// `None` for the client's choice: `HF_HUB_CACHE`, else `HF_HOME`, else the home directory.
    pub cache: Option<PathBuf>,
    /// Whether only the cache may be used.
    pub offline: bool,
}

/// One split of a dataset on the Hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    /// `OWNER/NAME`.
    pub repo: String,
    /// The configuration (subset).
    pub config: String,
    /// The split.
    pub split: String,
}

/// The directory that the official clients keep repositories in, as the environment names it.
pub fn cache_dir() -> PathBuf {
    hf_hub::resolve_cache_dir()
}

impl Hub {
    /// The Hub as set by the environment; `HF_HUB_OFFLINE` is parsed as in the official Python
    /// client.
    pub fn from_env() -> Self {
        let offline = std::env::var("HF_HUB_OFFLINE").is_ok_and(|value| {
            matches!(value.to_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE")
        });
        Self { endpoint: std::env::var("HF_ENDPOINT").ok(), cache: None, offline }
    }

    /// The directory with `part` of the model `name`: a local one, or fetched into the cache.
    ///
    /// # Errors
    /// [`Error::NoDirectory`], [`Error::Misnamed`], [`Error::Fetch`] or, once `stop` is set,
    /// [`Error::Interrupted`].
    pub fn model(&self, name: &str, part: ModelPart, stop: &AtomicBool) -> Result<PathBuf, Error> {
        let path = Path::new(name);
        let dir =
            if path.is_dir() { path.to_path_buf() } else { self.fetched_model(name, part, stop)? };
        match recognise::directory(&dir, part) {
            None => Ok(dir),
            Some(is) => Err(Error::Misnamed { model: part.model(), name: name.to_owned(), is }),
        }
    }

    fn fetched_model(
        &self,
        name: &str,
        part: ModelPart,
        stop: &AtomicBool,
    ) -> Result<PathBuf, Error> {
        let (model, path) = (part.model(), Path::new(name));
        if path.is_file() {
            let is = recognise::file(path, part);
            return Err(Error::Misnamed { model, name: name.to_owned(), is });
        }
        let Some(repository) = Name::parse(name) else {
            let guess = with_owner(name);
            return Err(Error::NoDirectory { model, name: name.to_owned(), guess });
        };
        self.fetch(name, stop, &async |session: Session| session.model(repository, part).await)?
            .map_err(|reason| {
                self.failed(part.of(name), reason, "the path of a model directory works too")
            })
    }

    /// The Parquet files of `split`, in order.
    ///
    /// They come from the Hub's own conversion, so that each repository's layout does not matter.
    /// `instead` says what works without the Hub.
    ///
    /// # Errors
    /// [`Error::Fetch`] or, once `stop` is set, [`Error::Interrupted`].
    pub fn split(
        &self,
        split: &Split,
        instead: &'static str,
        stop: &AtomicBool,
    ) -> Result<Vec<PathBuf>, Error> {
        let Split { repo, config, split } = split;
        self.fetch(repo, stop, &async |session: Session| {
            let name = Name::parse(repo).filter(|name| name.revision.is_none());
            let name = name.ok_or(Reason::UnknownRepository)?;
            session.split(name, config, split).await
        })?
        .map_err(|reason| self.failed(format!("the dataset {repo}"), reason, instead))
    }

    /// One file of the dataset `repo`, for datasets that the Hub does not convert.
    ///
    /// # Errors
    /// [`Error::Fetch`] or, once `stop` is set, [`Error::Interrupted`].
    pub fn dataset_file(
        &self,
        repo: &str,
        file: &str,
        stop: &AtomicBool,
    ) -> Result<PathBuf, Error> {
        self.fetch(repo, stop, &async |session: Session| {
            let name = Name::parse(repo).ok_or(Reason::UnknownRepository)?;
            session.dataset_file(name, file).await
        })?
        .map_err(|reason| {
            let instead = "a local file works too: NAME=FILE";
            self.failed(format!("the dataset {repo}"), reason, instead)
        })
    }

    /// Runs `work`; if the Hub does not answer, once more with the cache only.
    fn fetch<T>(
        &self,
        name: &str,
        stop: &AtomicBool,
        work: &impl AsyncFn(Session) -> Result<T, Reason>,
    ) -> Result<Result<T, Reason>, Error> {
        let attempt = |offline: bool| {
            until_stopped(stop, async {
                let session =
                    Session::open(self.endpoint.as_deref(), self.cache.as_deref(), offline)?;
                work(session).await
            })
        };
        match attempt(self.offline)? {
            Err(Reason::Unreachable(why)) if !self.offline => match attempt(true)? {
                Ok(found) => {
                    say(format!("the Hub cannot be reached ({why}); using {name} from the cache"));
                    Ok(Ok(found))
                }
                Err(_) => Ok(Err(Reason::Unreachable(why))),
            },
            outcome => Ok(outcome),
        }
    }

    fn failed(&self, what: String, reason: Reason, instead: &'static str) -> Error {
        let from = match &self.endpoint {
            _ if self.offline => " (HF_HUB_OFFLINE is set)".to_owned(),
            Some(endpoint) => format!(" from {}", shown_endpoint(endpoint)),
            None => String::new(),
        };
        Error::Fetch { what, from, reason, instead }
    }
}

/// Runs `work` until it ends or the run is told to stop.
pub(crate) fn until_stopped<T>(
    stop: &AtomicBool,
    work: impl Future<Output = T>,
) -> Result<T, Error> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(2).enable_all().build().map_err(Error::Threads)?;
    let outcome = runtime.block_on(async {
        let stopped = async {
            while !stop.load(Ordering::Relaxed) {
                tokio::time::sleep(STOP_POLL).await;
            }
        };
        tokio::select! {
            done = work => Ok(done),
            () = stopped => Err(Error::Interrupted),
        }
    });
    // A host name lookup, or waiting for another process's lock, cannot be interrupted.
    runtime.shutdown_background();
    outcome
}
