//! Fetches one sample: from storage if it is there, else from a server, with retries; or skips it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use dflash_settings::{OnGenerate, OnMissing};
use reqwest::Client;
use reqwest::redirect::Policy;
use tokio::task::JoinError;
use tokio::time::{Instant, sleep, timeout};

use crate::counters::Counters;
use crate::endpoint::{Endpoint, Kind, Pool};
use crate::error::Error;
use crate::offline::{OfflineFiles, Stored};
use crate::own::Call;
use crate::record::HiddenStates;
use crate::retry::Failure;
use crate::stream::StreamConfig;
use crate::tensor_file::Wanted;
use crate::{own, vllm};

/// A request for the hidden states of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// The dataset row, which also names the stored file.
    pub sample: u64,
    /// The prompt's tokens.
    pub input_ids: Vec<i64>,
}

/// A sample as the trainer gets it.
#[derive(Debug, Clone)]
pub struct Fetched {
    /// The request's dataset row.
    pub sample: u64,
    /// `None` if the sample is skipped; the counters say why.
    pub states: Option<HiddenStates>,
}

/// The result for a sample.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Its states.
    Have(HiddenStates),
    /// It is skipped because it is not stored, as the user chose.
    NotStored,
    /// It is skipped because no server delivers it or the reply was unusable.
    Failed(Error),
}

/// State shared by all samples of a stream.
#[derive(Debug)]
pub(crate) struct Fetcher {
    pub(crate) config: StreamConfig,
    client: Client,
    pool: Pool,
    files: Option<OfflineFiles>,
    counters: Mutex<Counters>,
    /// Logs once that vLLM does not say which layers it returns.
    told: Once,
}

/// Failed probes after which a run logs that it waits for a server: two or three tenths of a
/// second.
const TELL_AFTER: u32 = 3;

/// The attempts at one sample so far.
pub(crate) struct Attempts {
    start: Instant,
    made: u32,
    invalid: u32,
    refused: u32,
    garbled: u32,
    doubted: u32,
}

impl Attempts {
    pub(crate) fn from(start: Instant) -> Self {
        Self { start, made: 0, invalid: 0, refused: 0, garbled: 0, doubted: 0 }
    }

    pub(crate) fn count(&mut self) {
        self.made += 1;
    }
}

/// What to do after a failed attempt.
pub(crate) enum Next {
    /// Retry after a pause.
    AskAgain(Duration),
    /// Retry the same endpoint, whose kind is queried first.
    AskTheSame(Duration),
    LeaveOut(Error),
}

impl Fetcher {
    pub(crate) fn new(config: StreamConfig) -> Result<Self, Error> {
        let pool = Pool::parse(&config.endpoints)?;
        if pool.endpoints().is_empty() && config.on_missing == OnMissing::Generate {
            return Err(Error::NoEndpoint);
        }
        // Hidden states stay inside the cluster: they must not pass through a web proxy, nor go to
        // another host by a redirect.
        let client = Client::builder().no_proxy().redirect(Policy::none());
        let client = client.connect_timeout(Duration::from_secs(3));
        // A client with TLS would fail on a machine without certificates.
        let client = if pool.any_https() { client } else { client.tls_certs_only([]) };
        Ok(Self {
            client: client.build().map_err(Error::Client)?,
            pool,
            files: config
                .offline_dir
                .clone()
                .map(|dir| OfflineFiles::new(dir).of_target(config.target.clone())),
            config,
            counters: Mutex::default(),
            told: Once::new(),
        })
    }

    /// The counters so far.
    pub(crate) fn counters(&self) -> MutexGuard<'_, Counters> {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    pub(crate) fn endpoints(&self) -> &[Endpoint] {
        self.pool.endpoints()
    }

    pub(crate) fn files(&self) -> Option<&OfflineFiles> {
        self.files.as_ref()
    }

    /// Expected bytes of the states of this many tokens.
    pub(crate) fn bytes_of(&self, tokens: usize) -> usize {
        let row = self.config.hidden_size * self.pool.element_size();
        tokens * self.config.layer_ids.len() * row
    }

    /// Queries every server before the first sample. If samples are stored a server may not be
    /// needed at all; it is then queried when the first sample is missing.
    pub(crate) async fn preflight(&self) -> Result<(), Error> {
        let stored = self.files.as_ref().is_some_and(OfflineFiles::has_any);
        if self.config.on_missing != OnMissing::Generate {
            return Ok(());
        }
        if stored {
            return self.refuse_other_targets().await;
        }
        let reached = AtomicBool::new(false);
        let probes = self.pool.endpoints().iter().map(|endpoint| self.wait_for(endpoint, &reached));
        let mut absent = Vec::new();
        for probe in futures::future::join_all(probes).await {
            match probe {
                Ok(()) => {}
                Err(Failure::Fatal(error) | Failure::Doubtful(error)) => return Err(error),
                Err(failure) => absent.push(failure.into_error()),
            }
        }
        if !reached.into_inner()
            && let Some(source) = absent.pop()
        {
            let after = self.config.retry.startup;
            return Err(Error::NotReady { after, source: Box::new(source) });
        }
        for error in absent {
            tracing::warn!("going on without one server for now: {}", error.chain());
        }
        Ok(())
    }

    /// Queries every server once and ignores failures: only a server of another target is refused.
    async fn refuse_other_targets(&self) -> Result<(), Error> {
        let endpoints = self.pool.endpoints().iter();
        let probes = endpoints.map(|endpoint| endpoint.probe(&self.client, &self.config));
        for probe in futures::future::join_all(probes).await {
            if let Err(Failure::Doubtful(error @ Error::OtherTarget { .. })) = probe {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Gives a starting server time to listen and to load; less if another one is ready.
    async fn wait_for(&self, endpoint: &Endpoint, reached: &AtomicBool) -> Result<(), Failure> {
        let policy = &self.config.retry;
        // A server that answered before is expected to come back.
        let known = endpoint.is_known(&self.config.servers);
        let startup = if known { policy.startup.max(policy.deadline) } else { policy.startup };
        let (start, mut failed, mut doubted) = (Instant::now(), 0, 0);
        loop {
            let failure = match endpoint.probe(&self.client, &self.config).await {
                Ok(_) => {
                    reached.store(true, Ordering::Relaxed);
                    return Ok(());
                }
                Err(failure) => failure,
            };
            failed += 1;
            let patience = match &failure {
                Failure::Busy { .. } => startup.max(policy.deadline),
                Failure::Transient(_) | Failure::Damaged(_) => startup,
                Failure::Doubtful(_) if doubted + 1 < policy.doubts => {
                    doubted += 1;
                    policy.deadline
                }
                _ => return Err(failure),
            };
            let others = Duration::from_secs(2).min(startup);
            let is_absent = !matches!(failure, Failure::Busy { .. });
            let waited = start.elapsed();
            if waited >= patience
                || is_absent && reached.load(Ordering::Relaxed) && waited >= others
            {
                return Err(failure);
            }
            let pause = policy.pause(failed).min(Duration::from_secs(1)).min(patience - waited);
            if failed == TELL_AFTER {
                let seconds = patience.as_secs();
                let error = failure.into_error();
                tracing::info!("waiting up to {seconds} s for a server: {}", error.chain());
            }
            sleep(pause).await;
        }
    }

    /// One sample, checked and counted.
    pub(crate) async fn fetch(&self, request: Request) -> Result<Outcome, Error> {
        let outcome = match self.stored(&request).await? {
            Stored::Found(states) => {
                self.counters().stored += 1;
                Outcome::Have(states)
            }
            Stored::Absent => self.missing(request, None).await?,
            Stored::Stale(reason) => {
                self.counters().stale += 1;
                self.missing(request, Some(reason)).await?
            }
        };
        if let Outcome::Have(states) = &outcome {
            self.counters().bytes += states.byte_len() as u64;
        }
        Ok(outcome)
    }

    async fn stored(&self, request: &Request) -> Result<Stored, Error> {
        let Some(files) = self.files.clone() else { return Ok(Stored::Absent) };
        let (request, layer_ids) = (request.clone(), self.config.layer_ids.clone());
        let (hidden_size, tokens) = (self.config.hidden_size, request.input_ids.len());
        let read =
            move || files.read(&request, Wanted { layer_ids: &layer_ids, hidden_size, tokens });
        match blocking(read).await {
            // Treated as absent: another program that was killed may have truncated it.
            Err(
                error @ (Error::BadFile { .. } | Error::ZeroRow { .. } | Error::NonFinite { .. }),
            ) => Ok(Stored::Stale(error)),
            result => result,
        }
    }

    async fn missing(&self, request: Request, stale: Option<Error>) -> Result<Outcome, Error> {
        let reason = stale.map_or_else(|| "not stored".to_owned(), |error| error.chain());
        match self.config.on_missing {
            OnMissing::Generate => return self.generate(request).await,
            OnMissing::Skip => {}
            OnMissing::Warn => {
                tracing::warn!("leaving out sample {}: {reason}", request.sample);
            }
            OnMissing::Raise => {
                let dir = self.config.offline_dir.clone().unwrap_or_default();
                return Err(Error::Missing { sample: request.sample, dir, reason });
            }
        }
        self.counters().missing += 1;
        Ok(Outcome::NotStored)
    }

    async fn generate(&self, request: Request) -> Result<Outcome, Error> {
        let states = match self.ask(&request).await? {
            Outcome::Have(states) => states,
            outcome => return Ok(outcome),
        };
        self.counters().generated += 1;
        if self.config.on_generate == OnGenerate::Cache {
            self.store(request, states.clone()).await?;
        }
        // The server may have sent the last layer too; every source has checked the rest.
        Ok(Outcome::Have(states.select(&self.config.layer_ids).unwrap_or(states)))
    }

    async fn store(&self, request: Request, states: HiddenStates) -> Result<(), Error> {
        let Some(files) = self.files.clone() else { return Ok(()) };
        let write = move || files.write(request.sample, &request.input_ids, &states);
        blocking(write).await?;
        self.counters().cached += 1;
        Ok(())
    }

    /// Retries until there is an answer, successful or final.
    async fn ask(&self, request: &Request) -> Result<Outcome, Error> {
        let mut attempts = Attempts::from(Instant::now());
        let mut same = None;
        loop {
            let endpoint = same.take().or_else(|| self.pool.pick()).ok_or(Error::NoEndpoint)?;
            attempts.count();
            self.counters().requests += 1;
            let failure = match self.ask_once(endpoint, request).await {
                Ok((states, kind)) => {
                    endpoint.mark_up(&kind, &self.config.servers);
                    return Ok(Outcome::Have(states));
                }
                Err(failure) => failure,
            };
            // A server that failed may have been replaced; one that was only busy was not.
            if !matches!(failure, Failure::Busy { .. } | Failure::Damaged(_) | Failure::Invalid(_))
            {
                endpoint.forget().await;
            }
            match self.judge(failure, endpoint, &mut attempts, request.sample)? {
                Next::LeaveOut(reason) => return Ok(Outcome::Failed(reason)),
                Next::AskAgain(pause) => sleep(pause).await,
                Next::AskTheSame(pause) => {
                    same = Some(endpoint);
                    sleep(pause).await;
                }
            }
        }
    }

    async fn ask_once(
        &self,
        endpoint: &Endpoint,
        request: &Request,
    ) -> Result<(HiddenStates, Arc<Kind>), Failure> {
        let after = self.config.retry.request_timeout.min(self.config.retry.deadline);
        let call = Call { client: &self.client, endpoint, config: &self.config, request };
        let _lease = endpoint.lease(self.bytes_of(request.input_ids.len()));
        let exchange = async {
            let kind = endpoint.probe(&self.client, &self.config).await?;
            let states = match &*kind {
                Kind::Own { model, metadata } => own::fetch(&call, model, metadata).await?,
                Kind::Vllm { model, max_model_len } => {
                    self.tell_once_about_layers(model);
                    vllm::fetch(&call, model, *max_model_len).await?
                }
            };
            Ok((states, kind))
        };
        timeout(after, exchange).await.unwrap_or_else(|_| {
            Err(Failure::Transient(Error::Timeout { url: endpoint.url(""), after }))
        })
    }

    pub(crate) fn judge(
        &self,
        failure: Failure,
        endpoint: &Endpoint,
        attempts: &mut Attempts,
        sample: u64,
    ) -> Result<Next, Error> {
        let policy = &self.config.retry;
        let mut pause = policy.pause(attempts.made);
        let mut same = false;
        let error = match failure {
            Failure::Fatal(error) => return Err(error),
            Failure::Doubtful(error) => {
                attempts.doubted += 1;
                if attempts.doubted >= policy.doubts {
                    return Err(error);
                }
                same = true;
                error
            }
            Failure::Rejected(error) => {
                attempts.refused += 1;
                if attempts.refused >= policy.refusals {
                    self.counters().rejected += 1;
                    return Ok(Next::LeaveOut(error));
                }
                same = true;
                error
            }
            Failure::Garbled(error) => {
                attempts.garbled += 1;
                self.counters().damaged += 1;
                if attempts.garbled >= policy.bare_refusals {
                    self.counters().rejected += 1;
                    return Ok(Next::LeaveOut(error));
                }
                error
            }
            Failure::Invalid(error) => {
                attempts.invalid += 1;
                if attempts.invalid >= policy.invalid_attempts {
                    self.counters().invalid += 1;
                    return Ok(Next::LeaveOut(error));
                }
                error
            }
            Failure::Damaged(error) => {
                self.counters().damaged += 1;
                endpoint.note_damage(&error);
                error
            }
            Failure::Busy { after, error } => {
                self.counters().busy += 1;
                pause = policy.busy_pause(attempts.made, after);
                endpoint.rest(pause);
                if self.pool.any_up() {
                    pause = policy.first_pause.min(pause);
                }
                error
            }
            Failure::Transient(error) => {
                endpoint.mark_down(policy, &error);
                if self.pool.any_up() {
                    pause = Duration::ZERO;
                }
                error
            }
        };
        self.counters().retries += 1;
        let left = policy.deadline.saturating_sub(attempts.start.elapsed());
        if left.is_zero() {
            let (attempts, after) = (attempts.made, policy.deadline);
            return Err(Error::GaveUp { sample, attempts, after, source: Box::new(error) });
        }
        tracing::debug!("sample {sample}, attempt {}: {}", attempts.made, error.chain());
        // Not beyond the deadline: the last attempt starts at its end.
        let pause = pause.min(left);
        Ok(if same { Next::AskTheSame(pause) } else { Next::AskAgain(pause) })
    }

    fn tell_once_about_layers(&self, model: &str) {
        let ids = &self.config.layer_ids;
        self.told.call_once(|| {
            tracing::info!(
                "{model} is served by vLLM, which does not say which layers it captures; \
                 eagle_aux_hidden_state_layer_ids must start with {ids:?}"
            );
        });
    }
}

/// Runs file work off the network threads.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    joined(tokio::task::spawn_blocking(work).await)?
}

/// The result of a task. Its panic is propagated; a task that was cancelled when the stream ended
/// was interrupted.
pub(crate) fn joined<T>(outcome: Result<T, JoinError>) -> Result<T, Error> {
    outcome.map_err(|error| match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(_cancelled) => Error::Interrupted,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_cancelled_task_was_interrupted_and_a_panic_goes_on() {
        let waiting = tokio::spawn(std::future::pending::<()>());
        waiting.abort();
        assert!(matches!(joined(waiting.await), Err(Error::Interrupted)));
        assert_eq!(joined(tokio::spawn(async { 5 }).await).unwrap(), 5);
        let panicked = tokio::spawn(async { panic!("on purpose") }).await;
        let caught =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| joined::<()>(panicked)));
        assert!(caught.is_err());
    }
}
