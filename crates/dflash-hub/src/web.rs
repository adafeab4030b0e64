//! Requests that read from the Hub, repeated where that helps, and what its answers mean.

use std::time::Duration;

use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue, LINK};
use reqwest::redirect::Policy;
use reqwest::{Client, Method, Response, StatusCode, Url};
use serde_json::Value;

use crate::error::Reason;
use crate::home;

/// After a lost connection or a server's own fault.
const REPETITIONS: u32 = 2;
/// Before the first of them; twice as long before each later one.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const CONNECT: Duration = Duration::from_secs(15);
/// As many as browsers follow.
const MOST_REDIRECTS: usize = 10;

/// A Hub, and who we are to it.
#[derive(Debug)]
pub(crate) struct Web {
    files: Client,
    heads: Client,
    endpoint: Url,
    token: Option<HeaderValue>,
}

/// What the Hub says of a file before it sends it.
#[derive(Debug)]
pub(crate) struct Head {
    /// The name of its content in caches.
    pub(crate) etag: String,
    pub(crate) bytes: u64,
}

impl Web {
    pub(crate) fn open(endpoint: &str) -> Result<Self, Reason> {
        let endpoint = Url::parse(endpoint).map_err(|error| Reason::Client(error.to_string()))?;
        if !endpoint.has_host() {
            return Err(Reason::Client("the Hub's address names no host".to_owned()));
        }
        let client = |policy| {
            let client = Client::builder().user_agent(AGENT).connect_timeout(CONNECT);
            client.redirect(policy).build().map_err(|error| Reason::Client(error.to_string()))
        };
        let token = home::token().map(|token| {
            let mut bearer = HeaderValue::try_from(format!("Bearer {token}"))
                .expect("a token is printable ASCII");
            bearer.set_sensitive(true);
            bearer
        });
        let files = client(Policy::limited(MOST_REDIRECTS))?;
        Ok(Self { files, heads: client(within_the_hub())?, endpoint, token })
    }

    /// The URL of `parts` below the endpoint; a part with a slash stays one part.
    pub(crate) fn url<'p>(&self, parts: impl IntoIterator<Item = &'p str>) -> Url {
        below(&self.endpoint, parts)
    }

    /// An answer in JSON.
    pub(crate) async fn json(&self, url: Url) -> Result<Value, Reason> {
        Ok(self.page(url).await?.0)
    }

    /// All pages of a list.
    pub(crate) async fn list(&self, url: Url) -> Result<Vec<Value>, Reason> {
        let (mut entries, mut next) = (Vec::new(), Some(url));
        while let Some(url) = next {
            let (page, following) = self.page(url).await?;
            let Value::Array(page) = page else {
                return Err(Reason::Client("the Hub's list of files is none".to_owned()));
            };
            entries.extend(page);
            next = following;
        }
        Ok(entries)
    }

    async fn page(&self, url: Url) -> Result<(Value, Option<Url>), Reason> {
        let answer = self.send(&self.files, Method::GET, &url).await?;
        let next = answer.headers().get(LINK).and_then(|link| next_page(link.to_str().ok()?));
        let next = next.and_then(|next| answer.url().join(next).ok());
        let text = answer.bytes().await.map_err(|error| unreachable(&error))?;
        let json = serde_json::from_slice(&text);
        Ok((json.map_err(|error| Reason::Client(format!("no JSON from the Hub: {error}")))?, next))
    }

    /// What the Hub says of the file at `url`. Large files lie elsewhere: what it says of them is in
    /// the answer that names the place.
    pub(crate) async fn head(&self, url: Url) -> Result<Head, Reason> {
        let answer = self.send(&self.heads, Method::HEAD, &url).await?;
        let headers = answer.headers();
        let text = |names: [&str; 2]| names.into_iter().find_map(|name| header(headers, name));
        let etag = text(["x-linked-etag", "etag"]).and_then(|etag| plain_etag(&etag));
        let bytes = text(["x-linked-size", "content-length"]).and_then(|text| text.parse().ok());
        match (etag, bytes) {
            (Some(etag), Some(bytes)) => Ok(Head { etag, bytes }),
            _ => Err(Reason::Client(format!("the Hub names no size or ETag of {}", url.path()))),
        }
    }

    /// The content of the file at `url`.
    pub(crate) async fn get(&self, url: &Url) -> Result<Response, Reason> {
        self.send(&self.files, Method::GET, url).await
    }

    /// An answer that is no refusal; again where it was lost or the server stumbled.
    async fn send(&self, client: &Client, method: Method, url: &Url) -> Result<Response, Reason> {
        let mut pause = FIRST_PAUSE;
        for repetition in 0.. {
            let mut request = client.request(method.clone(), url.clone());
            // The token is for the Hub alone.
            if let Some(token) = self.token.as_ref().filter(|_| self.is_hub(url)) {
                request = request.header(AUTHORIZATION, token.clone());
            }
            match request.send().await {
                Ok(answer) if repetition == REPETITIONS || !may_pass(answer.status()) => {
                    return accepted(answer);
                }
                Err(error) if repetition == REPETITIONS => return Err(unreachable(&error)),
                _ => tokio::time::sleep(pause).await,
            }
            pause *= 2;
        }
        unreachable!("the last attempt returns")
    }

    fn is_hub(&self, url: &Url) -> bool {
        url.origin() == self.endpoint.origin()
    }
}

/// How we present ourselves.
pub(crate) const AGENT: &str = concat!("dflash/", env!("CARGO_PKG_VERSION"));

/// The URL of `parts` below `endpoint`; a part with a slash stays one part.
pub(crate) fn below<'p>(endpoint: &Url, parts: impl IntoIterator<Item = &'p str>) -> Url {
    let mut url = endpoint.clone();
    // Only addresses without a host have no path.
    if let Ok(mut path) = url.path_segments_mut() {
        path.pop_if_empty().extend(parts);
    }
    url
}

/// The innermost cause says what happened ("connection refused"); the layers above only say that
/// a request failed.
pub(crate) fn innermost(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

pub(crate) fn unreachable(error: &reqwest::Error) -> Reason {
    Reason::Unreachable(innermost(error))
}

/// Follows a repository that was renamed, and does not leave for the place where large files lie.
fn within_the_hub() -> Policy {
    Policy::custom(|attempt| {
        let from = attempt.previous();
        let is_hub = from.last().is_some_and(|from| from.origin() == attempt.url().origin());
        if is_hub && from.len() < MOST_REDIRECTS { attempt.follow() } else { attempt.stop() }
    })
}

fn accepted(answer: Response) -> Result<Response, Reason> {
    match answer.status() {
        status if status.is_success() || status.is_redirection() => Ok(answer),
        StatusCode::UNAUTHORIZED => Err(Reason::NoLogin),
        StatusCode::FORBIDDEN => Err(Reason::Refused),
        StatusCode::NOT_FOUND => Err(Reason::NotThere),
        status => Err(Reason::Client(format!("the Hub answers {status}"))),
    }
}

fn may_pass(status: StatusCode) -> bool {
    matches!(status.as_u16(), 408 | 429 | 500 | 502 | 503 | 504)
}

fn header(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name)?.to_str().ok().map(str::to_owned)
}

/// The ETag without its quotation marks. It becomes the name of a file.
fn plain_etag(text: &str) -> Option<String> {
    let etag = text.trim().trim_start_matches("W/").trim_matches('"');
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let is_name = !etag.is_empty() && !etag.starts_with('.') && etag.bytes().all(is_plain);
    is_name.then(|| etag.to_owned())
}

/// The address of the next page in a `Link` header.
fn next_page(link: &str) -> Option<&str> {
    let next = link.split(',').find(|part| part.contains("rel=\"next\""))?;
    Some(next.split_once('<')?.1.split_once('>')?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_etag_is_a_plain_name() {
        let check = |text, expect: Option<&str>| {
            assert_eq!(plain_etag(text).as_deref(), expect, "{text}");
        };
        check("\"9d3f\"", Some("9d3f"));
        check("W/\"9d3f-gzip\"", Some("9d3f-gzip"));
        for wrong in ["\"\"", "\"../9d\"", "\"..\"", "\"a/b\""] {
            check(wrong, None);
        }
    }

    #[test]
    fn the_next_page_is_the_one_called_so() {
        let link = "<https://hub/a?cursor=0>; rel=\"first\", </b?cursor=2>; rel=\"next\"";
        assert_eq!(next_page(link), Some("/b?cursor=2"));
        assert_eq!(next_page("<https://hub/a>; rel=\"first\""), None);
    }
}
