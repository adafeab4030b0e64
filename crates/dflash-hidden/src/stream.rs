//! Rows of samples, fetched ahead and handed over in order.
//!
//! The trainer is synchronous and must see the same rows in the same order whatever the network
//! does, or runs could not be repeated. So requests run concurrently, results wait for their
//! turn, and a window bounds the bytes that are requested or waiting: that is the back-pressure.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dflash_settings::{OnGenerate, OnMissing};
use tokio::runtime::Runtime;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinHandle;

use crate::counters::Counters;
use crate::error::Error;
use crate::fetch::{Fetched, Fetcher, Outcome, Request, SourceConfig, joined};
use crate::record::HiddenStates;
use crate::retry::RetryPolicy;

/// How soon a set stop flag is noticed.
const STOP_POLL: Duration = Duration::from_millis(25);
/// How long dropping a stream waits for file work that has begun.
const DROP_GRACE: Duration = Duration::from_millis(200);
/// The window is granted in these units, because a semaphore counts in 32 bits.
const WINDOW_UNIT: usize = 4096;

/// What to fetch, from where, and how far ahead.
#[derive(Debug, Clone)]
pub struct StreamConfig {
    /// Servers and stored files.
    pub source: SourceConfig,
    /// The captures the draft needs, ascending.
    pub layer_ids: Vec<u32>,
    /// The target's hidden size; a server of another one is refused.
    pub hidden_size: usize,
    /// Rows of the target's embedding, compared with the server's where given.
    pub vocab_size: Option<usize>,
    /// The target's layers, compared with the server's where given.
    pub num_hidden_layers: Option<u32>,
    /// About samples that are not stored.
    pub on_missing: OnMissing,
    /// About samples that were generated.
    pub on_generate: OnGenerate,
    /// Bytes of hidden states that may be requested or waiting. A larger row goes alone.
    pub window_bytes: usize,
    /// Samples that may be requested at the same time.
    pub max_in_flight: usize,
    /// How often and how long to ask.
    pub retry: RetryPolicy,
    /// Set from outside to make a waiting call return [`Error::Interrupted`].
    pub stop: Arc<AtomicBool>,
}

impl StreamConfig {
    /// A stream of generated samples with a window of 256 MiB and 16 requests in flight.
    pub fn new(source: SourceConfig, layer_ids: Vec<u32>, hidden_size: usize) -> Self {
        Self {
            source,
            layer_ids,
            hidden_size,
            vocab_size: None,
            num_hidden_layers: None,
            on_missing: OnMissing::Generate,
            on_generate: OnGenerate::Delete,
            window_bytes: 256 << 20,
            max_in_flight: 16,
            retry: RetryPolicy::default(),
            stop: Arc::default(),
        }
    }
}

/// Rows on their way. Dropping it ends its threads, also when a server hangs.
#[derive(Debug)]
pub struct Stream {
    /// Always there until the drop.
    runtime: Option<Runtime>,
    rows: mpsc::UnboundedReceiver<Pending>,
    current: Option<Pending>,
    fetcher: Arc<Fetcher>,
    stop: Arc<AtomicBool>,
    failures_in_a_row: u32,
    failed: bool,
}

/// A row whose samples are being fetched, holding its part of the window.
#[derive(Debug)]
struct Pending {
    samples: VecDeque<(u64, JoinHandle<Result<Outcome, Error>>)>,
    done: Vec<Fetched>,
    _window: OwnedSemaphorePermit,
}

impl Stream {
    /// Checks the servers, then starts fetching `rows` ahead of [`Self::next_row`].
    ///
    /// `rows` runs on a thread of its own and is pulled as the window allows.
    ///
    /// # Errors
    /// A bad, unreachable, unknown or mismatching server; [`Error::Interrupted`].
    pub fn start(
        config: StreamConfig,
        rows: impl Iterator<Item = Vec<Request>> + Send + 'static,
    ) -> Result<Self, Error> {
        let fetcher = Arc::new(Fetcher::new(&config)?);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("hidden-states")
            .enable_all()
            .build()
            .map_err(Error::Runtime)?;
        let checked = runtime.block_on(unless_stopped(&config.stop, fetcher.preflight()));
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
        let stop = Arc::clone(&config.stop);
        runtime.spawn(prefetch(config, Arc::clone(&fetcher), receiver, pending));
        Ok(Self {
            runtime: Some(runtime),
            rows,
            current: None,
            fetcher,
            stop,
            failures_in_a_row: 0,
            failed: false,
        })
    }

    /// The next row's samples in the order of their requests; `None` after the last row, and
    /// after an error.
    ///
    /// # Errors
    /// The first failure of a sample that could be neither had nor left out.
    #[allow(clippy::should_implement_trait, reason = "a row can fail without ending the iterator")]
    pub fn next_row(&mut self) -> Option<Result<Vec<Fetched>, Error>> {
        let runtime = self.runtime.take().filter(|_| !self.failed)?;
        let start = Instant::now();
        let stop = Arc::clone(&self.stop);
        let row = runtime.block_on(unless_stopped(&stop, self.advance()));
        self.runtime = Some(runtime);
        self.fetcher.tally.wait_nanos.add(start.elapsed().as_nanos() as u64);
        let row = row.unwrap_or(Some(Err(Error::Interrupted)));
        self.failed = matches!(row, Some(Err(_)));
        row
    }

    /// What has happened so far.
    pub fn counters(&self) -> Counters {
        self.fetcher.tally.snapshot()
    }

    /// Cancel-safe: what has been received stays in `current`.
    async fn advance(&mut self) -> Option<Result<Vec<Fetched>, Error>> {
        if self.current.is_none() {
            self.current = self.rows.recv().await;
        }
        while let Some((sample, outcome)) = self.current.as_mut()?.samples.front_mut() {
            let (sample, outcome) = (*sample, outcome.await);
            let outcome = joined(outcome).flatten();
            self.current.as_mut()?.samples.pop_front();
            match outcome.and_then(|outcome| self.states_of(sample, outcome)) {
                Ok(states) => self.current.as_mut()?.done.push(Fetched { sample, states }),
                Err(error) => return Some(Err(error)),
            }
        }
        self.current.take().map(|row| Ok(row.done))
    }

    /// What the trainer gets of a sample. Unusable samples are counted here, in the order of the
    /// rows, so that a stream fails at the same sample whatever the network does.
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
                if count >= self.fetcher.policy.failures_in_a_row {
                    return Err(Error::TooManyFailures { count, last: Box::new(reason) });
                }
                tracing::warn!("leaving out sample {sample}: {}", reason.chain());
                Ok(None)
            }
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(DROP_GRACE);
        }
    }
}

/// Hands rows over until the stream is gone.
fn feed(rows: impl Iterator<Item = Vec<Request>>, sender: &mpsc::Sender<Vec<Request>>) {
    for row in rows {
        if sender.blocking_send(row).is_err() {
            return;
        }
    }
}

/// Starts requests in order as window and concurrency allow.
async fn prefetch(
    config: StreamConfig,
    fetcher: Arc<Fetcher>,
    mut rows: mpsc::Receiver<Vec<Request>>,
    pending: mpsc::UnboundedSender<Pending>,
) {
    let units = (config.window_bytes / WINDOW_UNIT).clamp(1, Semaphore::MAX_PERMITS.min(1 << 30));
    let window = Arc::new(Semaphore::new(units));
    let slots = Arc::new(Semaphore::new(config.max_in_flight.max(1)));
    while let Some(row) = rows.recv().await {
        let bytes: usize = row.iter().map(|request| fetcher.bytes_of(request)).sum();
        let share = bytes.div_ceil(WINDOW_UNIT).clamp(1, units) as u32;
        let Ok(permit) = Arc::clone(&window).acquire_many_owned(share).await else { return };
        let mut samples = VecDeque::with_capacity(row.len());
        for request in row {
            // Taken here, not in the task: samples are asked for in the order of their use.
            let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
            let (fetcher, sample) = (Arc::clone(&fetcher), request.sample);
            let work = tokio::spawn(async move {
                let _slot = slot;
                fetcher.fetch(request).await
            });
            samples.push_back((sample, work));
        }
        let row = Pending { done: Vec::with_capacity(samples.len()), samples, _window: permit };
        if pending.send(row).is_err() {
            return;
        }
    }
}

/// The value of `work`, or `None` as soon as the flag is set.
async fn unless_stopped<T>(stop: &AtomicBool, work: impl Future<Output = T>) -> Option<T> {
    let stopped = async {
        while !stop.load(Ordering::Relaxed) {
            tokio::time::sleep(STOP_POLL).await;
        }
    };
    tokio::select! {
        biased;
        value = work => Some(value),
        () = stopped => None,
    }
}
