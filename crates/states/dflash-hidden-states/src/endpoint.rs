//! The servers of a run: addresses, models, load and health.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use dflash_settings::shown_endpoint;
use reqwest::header::{HeaderMap, LOCATION, RETRY_AFTER};
use reqwest::{Client, Response, StatusCode};
use tokio::time::Instant;

use crate::body::{self, BodyFault};
use crate::digest::{DIGEST_HEADER, Digest};
use crate::error::Error;
use crate::protocol::{
    Metadata, ModelCard, ModelList, OWNER, PROTOCOL_VERSION, error_message, is_error,
};
use crate::record::Dtype;
use crate::retry::{Failure, RetryPolicy, retry_after};
use crate::stream::StreamConfig;
use crate::text::clean;
use crate::vllm_check;

/// A model list is a few hundred bytes; a server that needs longer is not serving.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// A hundred times what the longest known list takes.
const LARGEST_LIST: usize = 1 << 20;
/// Longest name of a model, and largest number of layers. Both are quoted in errors.
const LONGEST_NAME: usize = 512;
const MOST_LAYERS: usize = 1024;

/// The kind of server at an endpoint.
#[derive(Debug, Clone)]
pub(crate) enum Kind {
    /// `dflash hidden-server`.
    Own { model: String, metadata: Metadata },
    /// A stock vLLM with the hidden-state connector.
    Vllm { model: String, max_model_len: Option<usize> },
}

impl Kind {
    /// The properties that must not change during a run.
    fn identity(&self) -> String {
        match self {
            Self::Own { model, metadata } => match &metadata.target {
                Some(target) => format!("{model} ({})", target.digests()),
                None => model.clone(),
            },
            Self::Vllm { model, .. } => format!("{model} by vLLM"),
        }
    }
}

/// The model that each endpoint delivered samples of; shared by all streams of a run.
#[derive(Debug, Clone, Default)]
pub struct ServersSeen(Arc<Mutex<BTreeMap<String, String>>>);

impl ServersSeen {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One server.
#[derive(Debug)]
pub(crate) struct Endpoint {
    /// May contain a password.
    base: String,
    /// Contains no password.
    shown: String,
    /// `None` until it is known, and again when it is in doubt.
    kind: tokio::sync::Mutex<Option<Arc<Kind>>>,
    element_size: AtomicUsize,
    outstanding: AtomicU64,
    damaged: AtomicU64,
    health: Mutex<Health>,
    check: vllm_check::Progress,
}

#[derive(Debug, Default)]
struct Health {
    failures: u32,
    down_until: Option<Instant>,
}

/// Bytes requested from an endpoint; released when dropped.
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
        let bad = |reason| Error::BadEndpoint { endpoint: shown_endpoint(text), reason };
        let (scheme, address) = match text.split_once("://") {
            Some((scheme @ ("http" | "https"), address)) => (scheme, address),
            Some(_) => return Err(bad("the scheme must be http or https")),
            None => ("http", text),
        };
        if address.contains(['?', '#']) {
            return Err(bad("an address ends with its path, without ? and #"));
        }
        let address = address.trim_end_matches('/');
        let address = address.strip_suffix("/v1").unwrap_or(address).trim_end_matches('/');
        if address.is_empty() {
            return Err(bad("it names no host"));
        }
        let base = format!("{scheme}://{address}");
        if reqwest::Url::parse(&base).is_err() {
            return Err(bad("it is not a valid host and port"));
        }
        Ok(Self {
            shown: shown_endpoint(&base),
            base,
            kind: tokio::sync::Mutex::default(),
            element_size: AtomicUsize::new(Dtype::Bf16.size()),
            outstanding: AtomicU64::default(),
            damaged: AtomicU64::default(),
            health: Mutex::default(),
            check: vllm_check::Progress::default(),
        })
    }

    /// The URL of `path`, which starts with a slash, as shown in errors.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("{}{path}", self.shown)
    }

    /// The same URL for requests.
    pub(crate) fn address(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    fn is_https(&self) -> bool {
        self.base.starts_with("https://")
    }

    pub(crate) fn lease(&self, bytes: usize) -> Lease<'_> {
        let bytes = bytes as u64;
        self.outstanding.fetch_add(bytes, Ordering::Relaxed);
        Lease { endpoint: self, bytes }
    }

    /// The progress of the check of a stock vLLM's model.
    pub(crate) fn check(&self) -> &vllm_check::Progress {
        &self.check
    }

    /// Records that a sample has arrived.
    pub(crate) fn mark_up(&self, kind: &Kind, seen: &ServersSeen) {
        if std::mem::take(&mut *self.health()).failures > 0 {
            self.check.restart();
            tracing::info!("{} answers again", self.shown);
        }
        let mut seen = seen.lock();
        if !seen.contains_key(&self.base) {
            seen.insert(self.base.clone(), kind.identity());
        }
    }

    /// Suspends the endpoint for a time that grows with every failure in a row. The first failure
    /// is logged, so that users know why nothing happens.
    pub(crate) fn mark_down(&self, policy: &RetryPolicy, error: &Error) {
        let mut health = self.health();
        health.failures += 1;
        health.down_until = Some(Instant::now() + policy.pause(health.failures));
        if health.failures == 1 {
            let seconds = policy.deadline.as_secs();
            tracing::warn!("asking again for up to {seconds} s: {}", error.chain());
        }
    }

    /// Suspends the endpoint while the server is busy, if others are available.
    pub(crate) fn rest(&self, pause: Duration) {
        self.health().down_until = Some(Instant::now() + pause);
    }

    /// Counts a damaged message, and logs the first, second, fourth and so on.
    pub(crate) fn note_damage(&self, error: &Error) {
        let count = self.damaged.fetch_add(1, Ordering::Relaxed) + 1;
        if count.is_power_of_two() {
            tracing::warn!("asked again, {count} so far: {}", error.chain());
        }
    }

    fn is_up(&self) -> bool {
        self.health().down_until.is_none_or(|until| until <= Instant::now())
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The kind of server, queried once and checked against the target and against its earlier
    /// kind.
    pub(crate) async fn probe(
        &self,
        client: &Client,
        config: &StreamConfig,
    ) -> Result<Arc<Kind>, Failure> {
        let mut known = self.kind.lock().await;
        if let Some(kind) = &*known {
            return Ok(Arc::clone(kind));
        }
        let kind = Arc::new(self.ask_models(client, config).await?);
        self.check_unchanged(&kind, &config.servers)?;
        if let Kind::Own { metadata, .. } = &*kind {
            self.element_size.store(metadata.dtype.size(), Ordering::Relaxed);
        }
        *known = Some(Arc::clone(&kind));
        Ok(kind)
    }

    /// Whether the kind of server is known.
    pub(crate) async fn is_asked(&self) -> bool {
        self.kind.lock().await.is_some()
    }

    /// Makes the next request query the kind of server again.
    pub(crate) async fn forget(&self) {
        *self.kind.lock().await = None;
    }

    /// Whether it has delivered samples in this run.
    pub(crate) fn is_known(&self, seen: &ServersSeen) -> bool {
        seen.lock().contains_key(&self.base)
    }

    fn check_unchanged(&self, kind: &Kind, seen: &ServersSeen) -> Result<(), Failure> {
        let now = kind.identity();
        match seen.lock().get(&self.base).filter(|before| **before != now) {
            None => Ok(()),
            Some(before) => Err(self.changed(before.clone(), now)),
        }
    }

    /// The error of a server that has changed.
    pub(crate) fn changed(&self, before: String, now: String) -> Failure {
        let now = clean(&now, LONGEST_NAME);
        Failure::Doubtful(Error::ServerChanged { url: self.shown.clone(), before, now })
    }

    /// The error of a failed exchange with `path`, which had the timeout `after`.
    pub(crate) fn transport(&self, path: &str, error: reqwest::Error, after: Duration) -> Failure {
        let url = self.url(path);
        Failure::Transient(if error.is_timeout() && !error.is_connect() {
            Error::Timeout { url, after }
        } else {
            Error::Unreachable { url, source: error.into() }
        })
    }

    /// The body of a reply of `path`, of at most `limit` bytes.
    pub(crate) async fn body(
        &self,
        path: &str,
        reply: Response,
        limit: usize,
        after: Duration,
    ) -> Result<bytes::Bytes, Failure> {
        body::read(reply, limit).await.map_err(|fault| match fault {
            BodyFault::TooLong => Failure::Doubtful(Error::TooLong { url: self.url(path), limit }),
            BodyFault::Stalled(after) => {
                Failure::Transient(Error::Timeout { url: self.url(path), after })
            }
            BodyFault::Transport(error) => self.transport(path, error, after),
        })
    }

    async fn ask_models(&self, client: &Client, config: &StreamConfig) -> Result<Kind, Failure> {
        const PATH: &str = "/v1/models";
        let asked = client.get(self.address(PATH)).timeout(PROBE_TIMEOUT).send().await;
        let reply = asked.map_err(|error| self.transport(PATH, error, PROBE_TIMEOUT))?;
        let unknown =
            |found| Failure::Doubtful(Error::UnknownServer { url: self.url(PATH), found });
        match reply.status() {
            status if status.is_success() => {}
            status if status.is_redirection() => return Err(self.redirected(PATH, &reply)),
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => {
                return Err(self.refusal(PATH, reply).await);
            }
            status => return Err(unknown(format!("it answers {}", status.as_u16()))),
        }
        let digest = digest_of(reply.headers());
        let body = self.body(PATH, reply, LARGEST_LIST, PROBE_TIMEOUT).await?;
        if digest.as_ref().is_some_and(|digest| *digest != Digest::of(None, [&body])) {
            return Err(self.damaged(PATH, "its list of models"));
        }
        let list: ModelList = serde_json::from_slice(&body)
            .map_err(|_| unknown("what it sends is not a list of models".into()))?;
        let card = list.data.into_iter().next();
        let card = card.ok_or_else(|| unknown("it lists no model".into()))?;
        // It is sent and shown unchanged.
        if card.id.is_empty() || clean(&card.id, LONGEST_NAME) != card.id {
            return Err(unknown("its model's name is not one".into()));
        }
        self.kind_of(card, digest.is_some(), config, &unknown)
    }

    fn kind_of(
        &self,
        card: ModelCard,
        has_digest: bool,
        config: &StreamConfig,
        unknown: &dyn Fn(String) -> Failure,
    ) -> Result<Kind, Failure> {
        match (card.owned_by.as_str(), card.metadata.clone()) {
            (OWNER, Some(metadata)) => {
                let (got, ours) = (card.protocol.unwrap_or(1), PROTOCOL_VERSION);
                if got != ours {
                    let url = self.shown.clone();
                    return Err(Failure::Doubtful(Error::OtherVersion { url, got, ours }));
                }
                if !has_digest {
                    return Err(self.damaged("/v1/models", "its list of models"));
                }
                if metadata.layer_ids.len() > MOST_LAYERS {
                    return Err(unknown(format!("it has {} layers", metadata.layer_ids.len())));
                }
                self.check_served(&card.id, &metadata, config).map_err(Failure::Doubtful)?;
                Ok(Kind::Own { model: card.id, metadata })
            }
            ("vllm", _) => {
                if config.shared_storage.is_none() {
                    let url = self.shown.clone();
                    return Err(Failure::Doubtful(Error::NoStorage { url }));
                }
                vllm_check::check_name(&self.shown, &card, config.target.as_ref())
                    .map_err(Failure::Doubtful)?;
                Ok(Kind::Vllm { model: card.id, max_model_len: card.max_model_len })
            }
            (owner, _) => {
                Err(unknown(format!("its models are owned by {:?}", clean(owner, LONGEST_NAME))))
            }
        }
    }

    fn check_served(
        &self,
        model: &str,
        served: &Metadata,
        config: &StreamConfig,
    ) -> Result<(), Error> {
        let compare = |key, expected: usize, got: usize| {
            let (url, model) = (self.shown.clone(), model.to_owned());
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
            url: self.shown.clone(),
            wanted: config.layer_ids.clone(),
            served: served.layer_ids.clone(),
        })
    }

    pub(crate) fn damaged(&self, path: &str, what: &'static str) -> Failure {
        Failure::Damaged(Error::Damaged { url: self.url(path), what })
    }

    fn redirected(&self, path: &str, reply: &Response) -> Failure {
        let to = reply.headers().get(LOCATION).map(|to| String::from_utf8_lossy(to.as_bytes()));
        let to = shown_endpoint(&clean(&to.unwrap_or_default(), LONGEST_NAME));
        Failure::Doubtful(Error::Redirected { url: self.url(path), to })
    }

    /// What an error status means for the sample and the endpoint.
    pub(crate) async fn refusal(&self, path: &str, reply: Response) -> Failure {
        let status = reply.status();
        if status.is_redirection() {
            return self.redirected(path, &reply);
        }
        let header = |name: &str| reply.headers().get(name)?.to_str().ok();
        // Our server gives it in milliseconds.
        let after = header("retry-after-ms").and_then(|ms| ms.parse().ok());
        let after = after.map(Duration::from_millis).or_else(|| {
            header(RETRY_AFTER.as_str()).and_then(|text| retry_after(text, SystemTime::now()))
        });
        let reason = body::read_reason(reply).await;
        let is_bare = !is_error(&reason);
        let message = error_message(&reason);
        let error = Error::Status { url: self.url(path), status: status.as_u16(), message };
        match status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                Failure::Busy { after, error }
            }
            StatusCode::REQUEST_TIMEOUT => Failure::Transient(error),
            // Our server's status for a prompt that does not match its digest.
            StatusCode::CONFLICT => Failure::Damaged(error),
            StatusCode::UNAUTHORIZED
            | StatusCode::FORBIDDEN
            | StatusCode::NOT_FOUND
            | StatusCode::METHOD_NOT_ALLOWED => Failure::Doubtful(error),
            StatusCode::BAD_REQUEST if is_bare => Failure::Garbled(error),
            status if status.is_client_error() => Failure::Rejected(error),
            _ => Failure::Transient(error),
        }
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
                Err(Error::OtherTarget { url: self.shown.clone(), found, expected })
            }
            Some(_) => Ok(()),
            None => {
                let url = &self.shown;
                tracing::warn!("{url}: cannot tell whether {model} is {target}: it does not say");
                Ok(())
            }
        }
    }
}

/// The digest of a reply, if it is valid.
pub(crate) fn digest_of(headers: &HeaderMap) -> Option<Digest> {
    headers.get(DIGEST_HEADER)?.to_str().ok()?.parse().ok()
}

/// All servers of a run.
#[derive(Debug)]
pub(crate) struct Pool {
    endpoints: Vec<Endpoint>,
}

impl Pool {
    /// Each text may contain several endpoints, separated by commas.
    pub(crate) fn parse(texts: &[String]) -> Result<Self, Error> {
        let parts = texts.iter().flat_map(|text| text.split(','));
        let parts = parts.map(str::trim).filter(|part| !part.is_empty());
        let parts: Vec<&str> = parts.collect();
        let parsed = parts.iter().map(|part| Endpoint::parse(part));
        match parsed.collect::<Result<Vec<_>, _>>() {
            Ok(endpoints) => Ok(Self { endpoints }),
            // A comma in a password makes parts that are not endpoints, and must not be shown.
            Err(Error::BadEndpoint { reason, .. })
                if parts.iter().any(|part| part.contains('@')) =>
            {
                Err(Error::BadEndpoint { endpoint: "***".into(), reason })
            }
            Err(error) => Err(error),
        }
    }

    pub(crate) fn any_https(&self) -> bool {
        self.endpoints.iter().any(Endpoint::is_https)
    }

    pub(crate) fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    /// The healthy endpoint with the fewest bytes requested; if there is none, the one that is
    /// available first.
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

    /// Bytes per element on the wire, as far as the servers have reported it.
    pub(crate) fn element_size(&self) -> usize {
        let size = |endpoint: &Endpoint| endpoint.element_size.load(Ordering::Relaxed);
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
        check("https://gate:8443/v1", "https://gate:8443");
    }

    #[test]
    fn what_is_not_an_endpoint_says_why() {
        let check = |text: &str, reason: &str| {
            let message = Endpoint::parse(text).unwrap_err().to_string();
            assert!(message.contains(text) && message.contains(reason), "{message}");
        };
        check("ftp://localhost:8000", "scheme");
        check("localhost:8000/v1?key=5", "without ? and #");
        check("http://", "no host");
        check("localhost:99999", "not a valid host and port");
    }

    #[test]
    fn passwords_are_sent_and_never_shown() {
        let endpoint = Endpoint::parse("http://me:secret@host:1/v1").unwrap();
        assert_eq!(endpoint.address("/x"), "http://me:secret@host:1/x");
        assert_eq!(endpoint.url("/x"), "http://***@host:1/x");
        for bad in [
            "http://me:sec/ret@host:1",
            "me:secret@host:99999",
            "ftp://me:secret@host",
            "me:se,cret@h",
        ] {
            let message = Pool::parse(&[bad.into()]).unwrap_err().to_string();
            assert!(!message.contains("sec") && message.contains("***"), "{message}");
        }
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
        let kind = Kind::Vllm { model: "m".into(), max_model_len: None };
        b.mark_up(&kind, &ServersSeen::default());
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
