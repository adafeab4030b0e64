//! Requests to the Hub with retries, and the meaning of its error statuses.

use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use reqwest::{Client, Method, RequestBuilder, Response, Url};
use serde_json::Value;

use crate::push::refusal::Refusal;
use crate::push::token::Token;

/// Maximum number of attempts of a request, after a lost connection or a server error.
pub(crate) const ATTEMPTS: u32 = 4;
/// Pause before the second attempt; it doubles for each later one.
pub(crate) const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The longest pause that a server may ask for.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
const CONNECT: Duration = Duration::from_secs(15);
/// Timeout of a request with a small answer. A commit of many files takes the Hub a while.
const ANSWER: Duration = Duration::from_secs(120);
/// Longest error text of a server in one line of ours, characters.
const LONGEST_WORDS: usize = 300;
pub(crate) const JSON: &str = "application/json";
pub(crate) const LFS_JSON: &str = "application/vnd.git-lfs+json";

/// A Hub, and the token for it.
#[derive(Debug)]
pub(crate) struct Api<'a> {
    http: Client,
    endpoint: Url,
    pub(crate) token: &'a Token,
}

/// How a request went wrong.
#[derive(Debug)]
pub(crate) enum Fault {
    /// No answer.
    Lost(String),
    /// A status above 299, and what the server said.
    Status { status: u16, code: Option<String>, said: String, body: String },
    /// A local file that cannot be read.
    Own(Refusal),
}

impl<'a> Api<'a> {
    pub(crate) fn open(endpoint: &str, token: &'a Token) -> Result<Self, Refusal> {
        let fault = |why: String| Refusal::Endpoint(why);
        let parsed = Url::parse(endpoint).map_err(|error| fault(error.to_string()))?;
        if !matches!(parsed.scheme(), "http" | "https") || !parsed.has_host() {
            return Err(fault("it must begin with http:// or https:// and name a host".to_owned()));
        }
        let agent = concat!("dflash/", env!("CARGO_PKG_VERSION"));
        let client = Client::builder().user_agent(agent).connect_timeout(CONNECT);
        let http = client.build().map_err(|error| fault(error.to_string()))?;
        Ok(Self { http, endpoint: parsed, token })
    }

    /// The address as given, including a password: for requests only.
    pub(crate) fn address(&self) -> &str {
        self.endpoint.as_str()
    }

    /// The URL of `parts` below the endpoint; a part with a slash stays one part.
    pub(crate) fn url<'p>(&self, parts: impl IntoIterator<Item = &'p str>) -> Url {
        let mut url = self.endpoint.clone();
        // Only addresses without a host have no path.
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(parts);
        }
        url
    }

    /// A request without the token.
    pub(crate) fn plain(&self, method: Method, url: Url) -> RequestBuilder {
        self.http.request(method, url)
    }

    /// A request with the token, if it goes to the Hub itself.
    pub(crate) fn request(&self, method: Method, url: Url) -> RequestBuilder {
        let is_hub = url.origin() == self.endpoint.origin();
        let request = self.plain(method, url);
        let mut bearer = HeaderValue::try_from(format!("Bearer {}", self.token.secret()))
            .expect("a token is printable ASCII");
        bearer.set_sensitive(true);
        if is_hub { request.header(AUTHORIZATION, bearer) } else { request }
    }

    /// Sends `body` as JSON and reads an answer in JSON.
    pub(crate) async fn post(
        &self,
        doing: &'static str,
        url: Url,
        kind: &'static str,
        body: Vec<u8>,
    ) -> Result<Value, Refusal> {
        self.try_post(doing, url, kind, body).await?.map_err(|fault| self.refusal(doing, fault))
    }

    /// As [`Self::post`], for callers that interpret the fault themselves.
    pub(crate) async fn try_post(
        &self,
        doing: &'static str,
        url: Url,
        kind: &'static str,
        body: Vec<u8>,
    ) -> Result<Result<Value, Fault>, Refusal> {
        self.post_at_most(ATTEMPTS, doing, url, kind, body.into()).await
    }

    /// As [`Self::try_post`], without retries: for requests that must not be made twice.
    pub(crate) async fn post_once(
        &self,
        doing: &'static str,
        url: Url,
        kind: &'static str,
        body: Bytes,
    ) -> Result<Result<Value, Fault>, Refusal> {
        self.post_at_most(1, doing, url, kind, body).await
    }

    async fn post_at_most(
        &self,
        attempts: u32,
        doing: &'static str,
        url: Url,
        kind: &'static str,
        body: Bytes,
    ) -> Result<Result<Value, Fault>, Refusal> {
        let request = || {
            let request = self.request(Method::POST, url.clone()).timeout(ANSWER);
            let request = request.header(CONTENT_TYPE, kind).header(ACCEPT, accepted(kind));
            let sent = request.body(body.clone()).send();
            Ok(async { sent.await.map_err(|error| lost(&error)) })
        };
        let answer = match self.send_at_most(attempts, request).await {
            Ok(answer) => answer,
            Err(fault) => return Ok(Err(fault)),
        };
        Self::json(doing, answer).await
    }

    /// Reads the document at `url`.
    pub(crate) async fn get(&self, doing: &'static str, url: Url) -> Result<Value, Refusal> {
        let request = || {
            let request = self.request(Method::GET, url.clone()).timeout(ANSWER);
            let sent = request.header(ACCEPT, JSON).send();
            Ok(async { sent.await.map_err(|error| lost(&error)) })
        };
        let answer = match self.send(request).await {
            Ok(answer) => Self::json(doing, answer).await?,
            Err(fault) => Err(fault),
        };
        answer.map_err(|fault| self.refusal(doing, fault))
    }

    async fn json(doing: &'static str, answer: Response) -> Result<Result<Value, Fault>, Refusal> {
        let text = match answer.bytes().await {
            Ok(text) => text,
            Err(error) => return Ok(Err(lost(&error))),
        };
        let json = serde_json::from_slice(&text);
        json.map(Ok).map_err(|error| Refusal::Protocol { doing, what: format!("no JSON, {error}") })
    }

    /// Makes a request, with retries after a lost connection or a server error. `request` builds it
    /// for each attempt.
    pub(crate) async fn send<F>(
        &self,
        request: impl Fn() -> Result<F, Refusal>,
    ) -> Result<Response, Fault>
    where
        F: Future<Output = Result<Response, Fault>>,
    {
        self.send_at_most(ATTEMPTS, request).await
    }

    async fn send_at_most<F>(
        &self,
        attempts: u32,
        request: impl Fn() -> Result<F, Refusal>,
    ) -> Result<Response, Fault>
    where
        F: Future<Output = Result<Response, Fault>>,
    {
        let mut pause = FIRST_PAUSE;
        for attempt in 1.. {
            let outcome = request().map_err(Fault::Own)?.await;
            let (fault, asked) = match outcome {
                Ok(answer) if answer.status().is_success() => return Ok(answer),
                Ok(answer) => {
                    let asked = retry_after(&answer);
                    (self.fault(answer).await, asked)
                }
                Err(fault) => (fault, None),
            };
            if attempt == attempts || !fault.may_pass() {
                return Err(fault);
            }
            tokio::time::sleep(asked.unwrap_or(pause)).await;
            pause *= 2;
        }
        unreachable!("the last attempt returns")
    }

    async fn fault(&self, answer: Response) -> Fault {
        let status = answer.status().as_u16();
        let header = |name: &str| {
            let value = answer.headers().get(name)?.to_str().ok()?;
            Some(value.to_owned())
        };
        let (code, message) = (header("x-error-code"), header("x-error-message"));
        let body = answer.text().await.unwrap_or_default();
        let said = message.unwrap_or_else(|| words(&body));
        Fault::Status { status, code, said, body }
    }

    /// The refusal that a fault means for the user.
    pub(crate) fn refusal(&self, doing: &'static str, fault: Fault) -> Refusal {
        let (status, code, said) = match fault {
            Fault::Own(refusal) => return refusal,
            Fault::Lost(why) => return Refusal::Unreachable { doing, why },
            Fault::Status { status, code, said, .. } => (status, code, self.one_line(&said)),
        };
        let origin = self.token.origin().to_owned();
        match (status, code.as_deref()) {
            (402 | 413 | 507, _) => Refusal::Quota { said },
            (403 | 400, _) if is_about_storage(&said) => Refusal::Quota { said },
            (401, _) => Refusal::BadToken { origin, said },
            (403, _) => Refusal::Forbidden { origin, said },
            (404, Some("RevisionNotFound")) => Refusal::NoRevision(said),
            _ => Refusal::Status { doing, status, said },
        }
    }

    /// A server's text as one line.
    pub(crate) fn one_line(&self, said: &str) -> String {
        let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
        let said: String = said.chars().filter(|c| !c.is_control()).take(LONGEST_WORDS).collect();
        let said = self.token.hidden_in(&said);
        if said.is_empty() { "it says no more".to_owned() } else { said }
    }
}

impl Fault {
    /// Whether the same request may succeed in a moment.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            Self::Lost(_) => true,
            Self::Status { status, .. } => matches!(status, 408 | 429 | 500 | 502 | 503 | 504),
            Self::Own(_) => false,
        }
    }
}

/// The innermost cause says what happened.
pub(crate) fn lost(error: &reqwest::Error) -> Fault {
    let mut cause: &dyn std::error::Error = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    Fault::Lost(cause.to_string())
}

/// The media type to accept for this kind of request.
fn accepted(kind: &'static str) -> &'static str {
    if kind == LFS_JSON { LFS_JSON } else { JSON }
}

fn retry_after(answer: &Response) -> Option<Duration> {
    let seconds: u64 = answer.headers().get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds).min(LONGEST_PAUSE))
}

/// The message of a body in JSON, else the body if it is text.
fn words(body: &str) -> String {
    let json: Option<Value> = serde_json::from_str(body).ok();
    let message = json.as_ref().and_then(|json| {
        let error = json.get("error").or(json.get("message"))?;
        error.as_str().or(error.get("message").and_then(Value::as_str)).map(str::to_owned)
    });
    // A proxy's HTML page has no useful line.
    message.unwrap_or_else(|| if body.contains('<') { String::new() } else { body.to_owned() })
}

/// The Hub also answers 403 if an account's storage is used up.
fn is_about_storage(said: &str) -> bool {
    let said = said.to_lowercase();
    ["storage limit", "storage quota", "quota", "storage space", "upgrade your plan"]
        .iter()
        .any(|words| said.contains(words))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_of_an_answer_is_found() {
        let check = |body: &str, expect: &str| assert_eq!(words(body), expect, "{body}");
        check(r#"{"error": "no room"}"#, "no room");
        check(r#"{"message": "no room"}"#, "no room");
        check(r#"{"error": {"message": "no room"}}"#, "no room");
        check("no room", "no room");
        check("<html>busy</html>", "");
        check(r#"{"ok": false}"#, r#"{"ok": false}"#);
    }

    #[test]
    fn room_is_told_from_rights() {
        assert!(is_about_storage("Private repository storage limit reached, please upgrade"));
        assert!(is_about_storage("Quota exceeded"));
        assert!(!is_about_storage("You need write access to owner/name"));
    }
}
