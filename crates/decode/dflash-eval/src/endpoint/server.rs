//! One server: its address, its kind, and requests to it.

use std::time::Duration;

use dflash_io::say;
use dflash_settings::shown_endpoint;
use reqwest::{Client, RequestBuilder, Response};
use serde_json::Value;

use super::attempts::Attempts;
use super::counters::Counters;
use crate::Error;

/// The variable with the key for servers with the OpenAI interface.
const KEY: &str = "OPENAI_API_KEY";
/// Timeout of requests about the server itself.
const SHORT: Duration = Duration::from_secs(30);
/// Interval between reads of counters that may still change.
const SETTLE: Duration = Duration::from_millis(50);
/// Maximum number of reads: counters of a server with other users never settle.
const LOOKS: usize = 40;
/// Characters of an error page that are shown.
const SHOWN: usize = 400;

#[derive(Debug, Clone)]
pub(crate) struct Server {
    client: Client,
    /// Without `/v1` and trailing slashes.
    root: String,
    key: Option<String>,
    /// Its model's name.
    pub(crate) model: String,
    /// Its kind: vllm, sglang, llamacpp, or the name that it reports.
    pub(crate) kind: String,
    /// Timeout of an answer in seconds.
    pub(crate) timeout: u64,
    /// Whether it counts speculative decoding.
    pub(crate) counts: bool,
}

impl Server {
    /// Queries the server at `url`.
    ///
    /// # Errors
    /// An address that does not answer like a server with the OpenAI interface, after some attempts.
    pub(crate) async fn connect(
        url: &str,
        model: Option<&str>,
        timeout: u64,
    ) -> Result<Self, Error> {
        let with_scheme = if url.contains("://") { url.into() } else { format!("http://{url}") };
        let trimmed = with_scheme.trim_end_matches('/');
        let root = trimmed.strip_suffix("/v1").unwrap_or(trimmed).to_owned();
        let bad = || Error::BadUrl { url: shown_endpoint(url) };
        let parsed = reqwest::Url::parse(&root).map_err(|_| bad())?;
        if !parsed.has_host() || !["http", "https"].contains(&parsed.scheme()) {
            return Err(bad());
        }
        let client = Client::builder().build().map_err(|error| Error::Unreachable {
            url: shown_endpoint(url),
            reason: error.without_url().to_string(),
        })?;
        let key = std::env::var(KEY).ok().filter(|key| !key.is_empty());
        let mut server = Self {
            client,
            root,
            key,
            model: String::new(),
            kind: String::new(),
            timeout,
            counts: false,
        };
        let mut attempts = Attempts::default();
        while let Err(fault) = server.ask_model(model).await {
            if !attempts.again(&fault).await {
                return Err(fault);
            }
        }
        server.counts = server.has_counters().await;
        Ok(server)
    }

    /// Finds the model's name and the server's kind.
    async fn ask_model(&mut self, model: Option<&str>) -> Result<(), Error> {
        let response = self.get("/v1/models").await?;
        let response = self.accepted(response).await?;
        let text = response.text().await.map_err(|error| self.failed(&error))?;
        let listed: Value = serde_json::from_str(&text)
            .map_err(|error| self.strange(format!("/v1/models is not JSON ({error})")))?;
        let first = &listed["data"][0];
        let name = model.or(first["id"].as_str());
        self.model = name.ok_or_else(|| Error::NoModel { url: self.shown() })?.to_owned();
        self.kind = first["owned_by"].as_str().unwrap_or("server").to_owned();
        Ok(())
    }

    /// Whether the server counts speculative decoding. One whose page cannot be read is measured
    /// without its counters.
    async fn has_counters(&self) -> bool {
        let mut attempts = Attempts::default();
        loop {
            match self.counters().await {
                Ok(counters) => return counters.is_some(),
                Err(fault) if attempts.again(&fault).await => {}
                Err(fault) => {
                    say(format!("the counters cannot be read: {fault}"));
                    return false;
                }
            }
        }
    }

    /// The current counters; `None` if the server has no such page, or does not speculate.
    pub(crate) async fn counters(&self) -> Result<Option<Counters>, Error> {
        let response = self.get("/metrics").await?;
        let status = response.status();
        // llama.cpp answers 501 without --metrics.
        if status == 501 || (status.is_client_error() && status != 429) {
            return Ok(None);
        }
        let response = self.accepted(response).await?;
        let page = response.text().await.map_err(|error| self.failed(&error))?;
        Ok(Counters::read(&page))
    }

    /// The counters once they have settled: servers count a step after they have sent its tokens.
    /// `None` if the page has none.
    pub(crate) async fn settled(&self) -> Result<Option<Counters>, Error> {
        let mut last = None;
        for _ in 0..LOOKS {
            let now = self.counters().await?;
            if now == last {
                break;
            }
            last = now;
            tokio::time::sleep(SETTLE).await;
        }
        Ok(last)
    }

    /// Sends a question; the answer is streamed.
    ///
    /// # Errors
    /// [`Error::Unreachable`]; [`Error::Refused`].
    pub(crate) async fn chat(&self, body: &Value) -> Result<Response, Error> {
        let request = self.client.post(format!("{}/v1/chat/completions", self.root)).json(body);
        let response = self.with_key(request).send().await.map_err(|error| self.failed(&error))?;
        self.accepted(response).await
    }

    async fn get(&self, path: &str) -> Result<Response, Error> {
        let request = self.client.get(format!("{}{path}", self.root)).timeout(SHORT);
        self.with_key(request).send().await.map_err(|error| self.failed(&error))
    }

    fn with_key(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    async fn accepted(&self, response: Response) -> Result<Response, Error> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let text = response.text().await.unwrap_or_default();
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let text = text.chars().take(SHOWN).collect();
        Err(Error::Refused { url: self.shown(), status: status.as_u16(), text })
    }

    /// The address without a password.
    pub(crate) fn shown(&self) -> String {
        shown_endpoint(&self.root)
    }

    pub(crate) fn failed(&self, error: &reqwest::Error) -> Error {
        let mut reason = error.to_string();
        let mut cause = std::error::Error::source(error);
        while let Some(deeper) = cause {
            reason = deeper.to_string();
            cause = deeper.source();
        }
        Error::Unreachable { url: self.shown(), reason }
    }

    pub(crate) fn strange(&self, reason: String) -> Error {
        Error::Strange { url: self.shown(), reason }
    }
}
