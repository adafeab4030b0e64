//! Rows of samples, prefetched and delivered in order.
//!
//! The trainer is synchronous and must see the same rows in the same order whatever the network
//! does, or runs could not be repeated. So requests run concurrently, results wait for their turn,
//! and a window bounds the bytes that are requested or waiting, which gives back-pressure. The
//! trainer's own row travels with its samples, so that it is made only once; an error in making a
//! row is delivered in its place.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use dflash_identity::TargetIdentity;
use dflash_settings::{OnGenerate, OnMissing};
use tokio::runtime::Runtime;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinHandle;

use crate::counters::Counters;
pub use crate::endpoint::ServersSeen;
use crate::error::Error;
use crate::fetch::{Fetched, Fetcher, Outcome, Request, joined};
use crate::record::HiddenStates;
use crate::retry::RetryPolicy;
use crate::vllm_check::TargetLogits;

/// How soon a set stop flag is noticed.
const STOP_POLL: Duration = Duration::from_millis(25);
/// How long dropping a stream waits for file operations in progress.
const DROP_GRACE: Duration = Duration::from_millis(200);
/// The window is granted in these units, because a semaphore counts in 32 bits.
const WINDOW_UNIT: usize = 4096;

/// What to fetch, from where, and how far ahead.
#[derive(Debug, Clone)]
pub struct StreamConfig {
    /// Servers, each `host:port` or a URL with or without `/v1`; commas separate several.
    pub endpoints: Vec<String>,
    /// Directory in which a stock vLLM writes hidden states; they are read and removed only there.
    pub shared_storage: Option<PathBuf>,
    /// Directory of stored samples: checked first, and written to by [`OnGenerate::Cache`].
    pub offline_dir: Option<PathBuf>,
    /// The auxiliary layers of the draft, ascending.
    pub layer_ids: Vec<u32>,
    /// The target's hidden size; a server with another one is refused.
    pub hidden_size: usize,
    /// Rows of the target's embedding, compared with the server's if given.
    pub vocab_size: Option<usize>,
    /// The target's layers, compared with the server's if given.
    pub num_hidden_layers: Option<u32>,
    /// The target, if given: servers and stored samples of another one are refused.
    pub target: Option<TargetIdentity>,
    /// Checks a stock vLLM, which does not identify its model, against the target.
    pub target_logits: Option<TargetLogits>,
    /// What to do with samples that are not stored.
    pub on_missing: OnMissing,
    /// What to do with samples that were generated.
    pub on_generate: OnGenerate,
    /// Bytes of hidden states that may be requested or waiting. A larger row is fetched alone.
    pub window_bytes: usize,
    /// Minimum size of the window in tokens, however few bytes it has.
    pub window_tokens: usize,
    /// Samples that may be requested at the same time.
    pub max_in_flight: usize,
    /// Retry settings.
    pub retry: RetryPolicy,
    /// The servers' models in earlier streams; clones share them.
    pub servers: ServersSeen,
    /// Set from outside to make a waiting call return [`Error::Interrupted`].
    pub stop: Arc<AtomicBool>,
}

impl StreamConfig {
    /// A stream of generated samples with a window of 256 MiB and 16 requests in flight.
    pub fn new(endpoints: Vec<String>, layer_ids: Vec<u32>, hidden_size: usize) -> Self {
        Self {
            endpoints,
            shared_storage: None,
            offline_dir: None,
            layer_ids,
            hidden_size,
            vocab_size: None,
            num_hidden_layers: None,
            target: None,
            target_logits: None,
            on_missing: OnMissing::Generate,
            on_generate: OnGenerate::Delete,
            window_bytes: 256 << 20,
            window_tokens: 0,
            max_in_flight: 16,
            retry: RetryPolicy::default(),
            servers: ServersSeen::default(),
            stop: Arc::default(),
        }
    }
}

/// A row that goes into a stream.
#[derive(Debug, Clone)]
pub struct WantedRow<T> {
    /// The trainer's row.
    pub row: T,
    /// Its samples.
    pub requests: Vec<Request>,
}

/// A row that comes out of a stream.
#[derive(Debug, Clone)]
pub struct FetchedRow<T> {
    /// The row, unchanged.
    pub row: T,
    /// One entry for each request, in their order.
    pub samples: Vec<Fetched>,
}

/// Rows of type `T` in flight; making one may fail with an `E`. Dropping it ends its threads, even
/// if a server hangs.
#[derive(Debug)]
pub struct Stream<T, E> {
    /// Always `Some` until the drop.
    runtime: Option<Runtime>,
    rows: mpsc::UnboundedReceiver<Result<Pending<T>, E>>,
    current: Option<Pending<T>>,
    fetcher: Arc<Fetcher>,
    failures_in_a_row: u32,
    failed: bool,
    closed: Arc<AtomicBool>,
}

/// A row whose samples are being fetched, with its part of the window.
#[derive(Debug)]
struct Pending<T> {
    row: T,
    samples: VecDeque<(u64, JoinHandle<Result<Outcome, Error>>)>,
    done: Vec<Fetched>,
    _window: OwnedSemaphorePermit,
}

impl<T: Send + 'static, E: From<Error> + Send + 'static> Stream<T, E> {
    /// Checks the servers, then starts fetching `rows` ahead of [`Self::next_row`].
    ///
    /// `rows` runs on a thread of its own and is pulled as the window allows, up to its first
    /// error.
    ///
    /// # Errors
    /// A bad, unreachable, unknown or mismatching server; [`Error::Interrupted`].
    pub fn start(
        config: StreamConfig,
        rows: impl Iterator<Item = Result<WantedRow<T>, E>> + Send + 'static,
    ) -> Result<Self, Error> {
        let fetcher = Arc::new(Fetcher::new(config)?);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("hidden-states")
            .enable_all()
            .build()
            .map_err(Error::Runtime)?;
        let stop = &*fetcher.config.stop;
        let checked = runtime.block_on(unless_set(&[stop], fetcher.preflight()));
        if let Err(error) = checked.unwrap_or(Err(Error::Interrupted)) {
            runtime.shutdown_background();
            return Err(error);
        }
        let (sender, receiver) = mpsc::channel(1);
        thread::Builder::new()
            .name("rows".into())
            .spawn(move || feed(rows, &sender))
            .map_err(Error::Runtime)?;
        let (pending, rows) = mpsc::unbounded_channel();
        runtime.spawn(prefetch(Arc::clone(&fetcher), receiver, pending));
        let (runtime, current) = (Some(runtime), None);
        let closed = Arc::default();
        Ok(Self { runtime, rows, current, fetcher, failures_in_a_row: 0, failed: false, closed })
    }

    /// The next row; `None` after the last row, and after an error.
    ///
    /// # Errors
    /// The row could not be made, or one of its samples could be neither fetched nor skipped.
    #[allow(clippy::should_implement_trait, reason = "a row can fail without ending the iterator")]
    pub fn next_row(&mut self) -> Option<Result<FetchedRow<T>, E>> {
        let runtime = self.runtime.take().filter(|_| !self.failed)?;
        let (stop, closed) = (Arc::clone(&self.fetcher.config.stop), self.closer());
        let row = runtime.block_on(unless_set(&[&stop, &closed], self.advance()));
        self.runtime = Some(runtime);
        let row = row.unwrap_or_else(|| Some(Err(Error::Interrupted.into())));
        self.failed = matches!(row, Some(Err(_)));
        row
    }

    /// A flag of this stream that has the effect of [`StreamConfig::stop`]: for dropping a stream
    /// that another thread waits for.
    pub fn closer(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.closed)
    }

    /// The counters so far.
    pub fn counters(&self) -> Counters {
        *self.fetcher.counters()
    }

    /// Cancel-safe: what has been received stays in `current`.
    async fn advance(&mut self) -> Option<Result<FetchedRow<T>, E>> {
        if self.current.is_none() {
            match self.rows.recv().await? {
                Ok(row) => self.current = Some(row),
                Err(error) => return Some(Err(error)),
            }
        }
        while let Some((sample, outcome)) = self.current.as_mut()?.samples.front_mut() {
            let (sample, outcome) = (*sample, outcome.await);
            let outcome = joined(outcome).flatten();
            self.current.as_mut()?.samples.pop_front();
            match outcome.and_then(|outcome| self.states_of(sample, outcome)) {
                Ok(states) => self.current.as_mut()?.done.push(Fetched { sample, states }),
                Err(error) => return Some(Err(error.into())),
            }
        }
        self.current.take().map(|Pending { row, done, .. }| Ok(FetchedRow { row, samples: done }))
    }

    /// The trainer's states of a sample. Unusable samples are counted here, in row order, so that a
    /// stream fails at the same sample whatever the network does.
    fn states_of(&mut self, sample: u64, outcome: Outcome) -> Result<Option<HiddenStates>, Error> {
        match outcome {
            Outcome::Have(states) => {
                self.failures_in_a_row = 0;
                Ok(Some(states))
            }
            Outcome::NotStored => Ok(None),
            Outcome::Failed(reason) => {
                self.failures_in_a_row += 1;
                let count = self.failures_in_a_row;
                if count >= self.fetcher.config.retry.failures_in_a_row {
                    return Err(Error::TooManyFailures { count, source: Box::new(reason) });
                }
                tracing::warn!("leaving out sample {sample}: {}", reason.chain());
                Ok(None)
            }
        }
    }
}

impl<T, E> Drop for Stream<T, E> {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(DROP_GRACE);
        }
    }
}

/// A row, or the error of making it.
type Made<T, E> = Result<WantedRow<T>, E>;

/// Delivers rows until the stream is gone, or one could not be made.
fn feed<T, E>(rows: impl Iterator<Item = Made<T, E>>, sender: &mpsc::Sender<Made<T, E>>) {
    for row in rows {
        let failed = row.is_err();
        if sender.blocking_send(row).is_err() || failed {
            return;
        }
    }
}

/// Starts requests in order as window and concurrency allow.
async fn prefetch<T, E>(
    fetcher: Arc<Fetcher>,
    mut rows: mpsc::Receiver<Made<T, E>>,
    pending: mpsc::UnboundedSender<Result<Pending<T>, E>>,
) {
    let config = &fetcher.config;
    let bytes = config.window_bytes.max(fetcher.bytes_of(config.window_tokens));
    let units = (bytes / WINDOW_UNIT).clamp(1, Semaphore::MAX_PERMITS.min(1 << 30));
    let window = Arc::new(Semaphore::new(units));
    let slots = Arc::new(Semaphore::new(config.max_in_flight.max(1)));
    while let Some(made) = rows.recv().await {
        let WantedRow { row, requests } = match made {
            Ok(wanted) => wanted,
            Err(error) => {
                // If the stream is gone, nobody needs the error.
                let _ = pending.send(Err(error));
                return;
            }
        };
        let tokens = requests.iter().map(|request| request.input_ids.len());
        let bytes = fetcher.bytes_of(tokens.sum());
        let share = bytes.div_ceil(WINDOW_UNIT).clamp(1, units) as u32;
        let Ok(permit) = Arc::clone(&window).acquire_many_owned(share).await else { return };
        let mut samples = VecDeque::with_capacity(requests.len());
        for request in requests {
            // Acquired here, not in the task, so that samples are requested in the order of their
            // use.
            let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
            let (fetcher, sample) = (Arc::clone(&fetcher), request.sample);
            let work = tokio::spawn(async move {
                let _slot = slot;
                fetcher.fetch(request).await
            });
            samples.push_back((sample, work));
        }
        let done = Vec::with_capacity(samples.len());
        if pending.send(Ok(Pending { row, samples, done, _window: permit })).is_err() {
            return;
        }
    }
}

/// The value of `work`, or `None` as soon as one of the flags is set.
pub(crate) async fn unless_set<T>(
    flags: &[&AtomicBool],
    work: impl Future<Output = T>,
) -> Option<T> {
    let stopped = async {
        while !flags.iter().any(|flag| flag.load(Ordering::Relaxed)) {
            tokio::time::sleep(STOP_POLL).await;
        }
    };
    tokio::select! {
        biased;
        value = work => Some(value),
        () = stopped => None,
    }
}
