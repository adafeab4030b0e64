//! The servers of a run: their addresses, what they are, how busy and how healthy.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use reqwest::{Client, StatusCode};
use tokio::sync::OnceCell;
use tokio::time::Instant;

use crate::error::Error;
use crate::protocol::{Metadata, ModelList, OWNER, error_message};
use crate::record::Dtype;
use crate::retry::{Failure, RetryPolicy};
use crate::stream::StreamConfig;
use crate::vllm_check;

/// A model list is a few hundred bytes; a server that needs longer is not serving.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// What answers at an endpoint.
#[derive(Debug, Clone)]
pub(crate) enum Kind {
    /// `dflash hidden-server`.
    Own(Metadata),
    /// A stock vLLM with the hidden-state connector.
    Vllm { model: String, max_model_len: Option<usize> },
}

/// One server.
#[derive(Debug, Default)]
pub(crate) struct Endpoint {
    base: String,
    kind: OnceCell<Kind>,
    outstanding: AtomicU64,
    health: Mutex<Health>,
    check: vllm_check::Progress,
}

#[derive(Debug, Default)]
struct Health {
    failures: u32,
    down_until: Option<Instant>,
}

/// Bytes that an endpoint owes; given back when dropped.
#[derive(Debug)]
pub(crate) struct Lease<'a> {
    endpoint: &'a Endpoint,
    bytes: u64,
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        self.endpoint.outstanding.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Endpoint {
    /// Takes `host:port`, with or without scheme, trailing slash and `/v1`.
    fn parse(text: &str) -> Result<Self, Error> {
        let bad = |reason| Error::BadEndpoint { endpoint: text.to_owned(), reason };
        let address = match text.split_once("://") {
            Some(("http", address)) => address,
            Some(("https", _)) => return Err(bad("only plain http is spoken inside a cluster")),
            Some(_) => return Err(bad("the scheme must be http")),
            None => text,
        };
        let address = address.trim_end_matches('/');
        let address = address.strip_suffix("/v1").unwrap_or(address).trim_end_matches('/');
        if address.is_empty() {
            return Err(bad("it names no host"));
        }
        let base = format!("http://{address}");
        if reqwest::Url::parse(&base).is_err() {
            return Err(bad("it is not a valid host and port"));
        }
        Ok(Self { base, ..Self::default() })
    }

    /// The URL of `path`, which starts with a slash.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    pub(crate) fn lease(&self, bytes: usize) -> Lease<'_> {
        let bytes = bytes as u64;
        self.outstanding.fetch_add(bytes, Ordering::Relaxed);
        Lease { endpoint: self, bytes }
    }

    /// How far the check of a stock vLLM's model has come.
    pub(crate) fn check(&self) -> &vllm_check::Progress {
        &self.check
    }

    pub(crate) fn mark_up(&self) {
        if std::mem::take(&mut *self.health()).failures > 0 {
            self.check.restart();
            tracing::info!("{} answers again", self.base);
        }
    }

    /// Keeps new samples away for a while that grows with every failure in a row. The first one
    /// is logged, so that nobody wonders why nothing moves.
    pub(crate) fn mark_down(&self, policy: &RetryPolicy, error: &Error) {
        let mut health = self.health();
        health.failures += 1;
        health.down_until = Some(Instant::now() + policy.pause(health.failures));
        if health.failures == 1 {
            let seconds = policy.deadline.as_secs();
            tracing::warn!("asking again for up to {seconds} s: {}", error.chain());
        }
    }

    fn is_up(&self) -> bool {
        self.health().down_until.is_none_or(|until| until <= Instant::now())
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the server is, asked once and checked against the target.
    pub(crate) async fn probe(
        &self,
        client: &Client,
        config: &StreamConfig,
    ) -> Result<&Kind, Failure> {
        self.kind.get_or_try_init(|| self.ask_models(client, config)).await
    }

    async fn ask_models(&self, client: &Client, config: &StreamConfig) -> Result<Kind, Failure> {
        let url = self.url("/v1/models");
        let reply = client.get(&url).timeout(PROBE_TIMEOUT).send().await;
        let reply = reply.map_err(|error| transport(&url, error, PROBE_TIMEOUT))?;
        let status = reply.status();
        let body = reply.bytes().await.map_err(|error| transport(&url, error, PROBE_TIMEOUT))?;
        let unknown = |found| Failure::Fatal(Error::UnknownServer { url: url.clone(), found });
        if status == StatusCode::SERVICE_UNAVAILABLE {
            let message = error_message(&body);
            let error = Error::Status { url, status: status.as_u16(), message };
            return Err(Failure::Busy { after: None, error });
        }
        if !status.is_success() {
            return Err(unknown(format!("it answers {}", status.as_u16())));
        }
        let list: ModelList = serde_json::from_slice(&body)
            .map_err(|_| unknown("what it sends is not a list of models".into()))?;
        let card = list.data.into_iter().next();
        let card = card.ok_or_else(|| unknown("it lists no model".into()))?;
        match (card.owned_by.as_str(), card.metadata.clone()) {
            (OWNER, Some(metadata)) => {
                self.check_served(&card.id, &metadata, config).map_err(Failure::Fatal)?;
                Ok(Kind::Own(metadata))
            }
            ("vllm", _) => {
                vllm_check::check_name(&self.base, &card, config.target.as_ref())
                    .map_err(Failure::Fatal)?;
                Ok(Kind::Vllm { model: card.id, max_model_len: card.max_model_len })
            }
            (owner, _) => Err(unknown(format!("its models are owned by {owner:?}"))),
        }
    }

    fn check_served(
        &self,
        model: &str,
        served: &Metadata,
        config: &StreamConfig,
    ) -> Result<(), Error> {
        let compare = |key, expected: usize, got: usize| {
            let (url, model) = (self.base.clone(), model.to_owned());
            let mismatch = Error::ModelMismatch { url, model, key, expected, got };
            if expected == got { Ok(()) } else { Err(mismatch) }
        };
        compare("hidden_size", config.hidden_size, served.hidden_size)?;
        if let Some(vocab_size) = config.vocab_size {
            compare("vocab_size", vocab_size, served.vocab_size)?;
        }
        if let Some(layers) = config.num_hidden_layers {
            compare("num_hidden_layers", layers as usize, served.num_hidden_layers as usize)?;
        }
        self.check_target(model, served, config)?;
        let has = |id: &u32| served.layer_ids.contains(id) || *id == served.num_hidden_layers;
        if config.layer_ids.iter().all(has) {
            return Ok(());
        }
        Err(Error::LayerMismatch {
            url: self.base.clone(),
            wanted: config.layer_ids.clone(),
            served: served.layer_ids.clone(),
        })
    }
}

impl Endpoint {
    fn check_target(
        &self,
        model: &str,
        served: &Metadata,
        config: &StreamConfig,
    ) -> Result<(), Error> {
        let Some(target) = &config.target else { return Ok(()) };
        match &served.target {
            Some(served) if !served.is_same_as(target) => {
                let (found, expected) = (served.to_string(), target.to_string());
                Err(Error::OtherTarget { url: self.base.clone(), found, expected })
            }
            Some(_) => Ok(()),
            None => {
                let url = &self.base;
                tracing::warn!("{url}: cannot tell whether {model} is {target}: it does not say");
                Ok(())
            }
        }
    }
}

/// A failed exchange; `after` is the time it had.
pub(crate) fn transport(url: &str, source: reqwest::Error, after: Duration) -> Failure {
    let url = url.to_owned();
    Failure::Transient(if source.is_timeout() && !source.is_connect() {
        Error::Timeout { url, after }
    } else {
        Error::Unreachable { url, source: source.without_url() }
    })
}

/// All servers of a run.
#[derive(Debug)]
pub(crate) struct Pool {
    endpoints: Vec<Endpoint>,
}

impl Pool {
    /// Each text may hold several endpoints, separated by commas.
    pub(crate) fn parse(texts: &[String]) -> Result<Self, Error> {
        let parts = texts.iter().flat_map(|text| text.split(','));
        let parts = parts.map(str::trim).filter(|part| !part.is_empty());
        let endpoints = parts.map(Endpoint::parse).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { endpoints })
    }

    pub(crate) fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    /// The healthy endpoint that owes least; without one, the one that is due back first.
    pub(crate) fn pick(&self) -> Option<&Endpoint> {
        let healthy = self.endpoints.iter().filter(|endpoint| endpoint.is_up());
        let owed = |endpoint: &&Endpoint| endpoint.outstanding.load(Ordering::Relaxed);
        healthy
            .min_by_key(owed)
            .or_else(|| self.endpoints.iter().min_by_key(|endpoint| endpoint.health().down_until))
    }

    pub(crate) fn any_up(&self) -> bool {
        self.endpoints.iter().any(Endpoint::is_up)
    }

    /// Bytes per element on the wire, as far as the servers have said.
    pub(crate) fn element_size(&self) -> usize {
        let size = |endpoint: &Endpoint| match endpoint.kind.get() {
            Some(Kind::Own(metadata)) => metadata.dtype.size(),
            _ => Dtype::Bf16.size(),
        };
        self.endpoints.iter().map(size).max().unwrap_or(Dtype::Bf16.size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_taken_in_every_usual_spelling() {
        let check = |text: &str, base: &str| {
            assert_eq!(Endpoint::parse(text).unwrap().base, base, "{text}");
        };
        check("http://localhost:8000/v1", "http://localhost:8000");
        check("http://localhost:8000/v1/", "http://localhost:8000");
        check("http://localhost:8000", "http://localhost:8000");
        check("10.0.0.1:9000", "http://10.0.0.1:9000");
        check("http://gate/target/v1", "http://gate/target");
        check("http://[::1]:8000", "http://[::1]:8000");
    }

    #[test]
    fn what_is_not_an_endpoint_says_why() {
        let check = |text: &str, reason: &str| {
            let message = Endpoint::parse(text).unwrap_err().to_string();
            assert!(message.contains(text) && message.contains(reason), "{message}");
        };
        check("https://localhost:8000", "plain http");
        check("ftp://localhost:8000", "scheme");
        check("http://", "no host");
        check("localhost:99999", "not a valid host and port");
    }

    #[test]
    fn work_goes_where_least_is_owed_and_comes_back_to_the_recovered() {
        let pool = Pool::parse(&["a:1, b:1".into(), "c:1".into()]).unwrap();
        let picked = |pool: &Pool| pool.pick().unwrap().base.clone();
        let [a, b, c] = pool.endpoints() else { panic!() };
        let lease = a.lease(10);
        let _b = b.lease(5);
        let _c = c.lease(7);
        assert_eq!(picked(&pool), "http://b:1");
        b.mark_down(&RetryPolicy::default(), &Error::Interrupted);
        assert_eq!(picked(&pool), "http://c:1");
        drop(lease);
        assert_eq!(picked(&pool), "http://a:1");
        b.mark_up();
        let _a = a.lease(6);
        assert_eq!(picked(&pool), "http://b:1");
    }

    #[test]
    fn with_everything_down_the_first_to_recover_is_asked() {
        let pool = Pool::parse(&["a:1,b:1".into()]).unwrap();
        let slow = RetryPolicy { first_pause: Duration::from_secs(4), ..Default::default() };
        pool.endpoints()[0].mark_down(&slow, &Error::Interrupted);
        pool.endpoints()[1].mark_down(&RetryPolicy::default(), &Error::Interrupted);
        assert!(!pool.any_up());
        assert_eq!(pool.pick().unwrap().base, "http://b:1");
    }
}
