//! Requests one sample from our own server.

use bytes::Bytes;
use dflash_settings::OnGenerate;
use reqwest::header::{CONTENT_TYPE, TRANSFER_ENCODING};
use reqwest::{Client, Response};

use crate::digest::{DIGEST_HEADER, Digest, prompt_digest};
use crate::endpoint::{Endpoint, digest_of};
use crate::error::Error;
use crate::fetch::Request;
use crate::protocol::{Metadata, StatesRequest, TARGET_HEADER};
use crate::record::HiddenStates;
use crate::retry::Failure;
use crate::stream::StreamConfig;
use crate::text::clean;
use crate::wire::decode;

const PATH: &str = "/v1/hidden_states";
/// Bytes for the stream's header and padding in addition to the rows.
const STREAM_OVERHEAD: usize = 1 << 20;

/// One exchange with one endpoint.
pub(crate) struct Call<'a> {
    pub(crate) client: &'a Client,
    pub(crate) endpoint: &'a Endpoint,
    pub(crate) config: &'a StreamConfig,
    pub(crate) request: &'a Request,
}

impl Call<'_> {
    /// Whether to fetch the last layer's output too, which other readers of stored files expect.
    pub(crate) fn with_last(&self) -> bool {
        self.config.on_generate == OnGenerate::Cache
    }

    /// Posts `body` to `path`, with its digest, and returns a successful reply.
    pub(crate) async fn post(
        &self,
        path: &str,
        body: &impl serde::Serialize,
    ) -> Result<Response, Failure> {
        let body = Bytes::from(serde_json::to_vec(body).expect("numbers and strings"));
        let digest = Digest::of(None, [&body]).to_string();
        let post = self.client.post(self.endpoint.address(path)).body(body);
        let post = post.header(CONTENT_TYPE, "application/json").header(DIGEST_HEADER, digest);
        let sent = post.send().await;
        let after = self.config.retry.request_timeout;
        let reply = sent.map_err(|error| self.endpoint.transport(path, error, after))?;
        if reply.status().is_success() {
            return Ok(reply);
        }
        Err(self.endpoint.refusal(path, reply).await)
    }

    /// The body of a reply of `path`, of at most `limit` bytes.
    pub(crate) async fn body(
        &self,
        path: &str,
        reply: Response,
        limit: usize,
    ) -> Result<Bytes, Failure> {
        self.endpoint.body(path, reply, limit, self.config.retry.request_timeout).await
    }
}

/// The expected reply to one prompt.
struct Expected<'a> {
    model: &'a str,
    prompt: &'a str,
    layer_ids: &'a [u32],
    tokens: usize,
    hidden_size: usize,
}

/// The record of a prompt: the auxiliary layers, and the last one with [`Call::with_last`].
pub(crate) async fn fetch(
    call: &Call<'_>,
    model: &str,
    served: &Metadata,
) -> Result<HiddenStates, Failure> {
    let mut layer_ids = call.config.layer_ids.clone();
    if call.with_last() && !layer_ids.contains(&served.num_hidden_layers) {
        layer_ids.push(served.num_hidden_layers);
    }
    let input_ids = &call.request.input_ids;
    let (tokens, prompt) = (input_ids.len(), prompt_digest(input_ids, Some(&layer_ids)));
    let body = StatesRequest {
        model: Some(model.to_owned()),
        input_ids: Some(input_ids.clone()),
        layer_ids: Some(layer_ids.clone()),
        ..StatesRequest::default()
    };
    let reply = call.post(PATH, &body).await?;
    let hidden_size = call.config.hidden_size;
    let limit = layer_ids.len() * tokens * hidden_size * served.dtype.size() + STREAM_OVERHEAD;
    check_target(call, &reply)?;
    let digest = digest_of(reply.headers());
    check_length(call.endpoint, digest.as_ref(), &reply)?;
    let body = call.body(PATH, reply, limit).await?;
    let (prompt, layer_ids) = (prompt.as_str(), layer_ids.as_slice());
    accept(call.endpoint, digest, body, &Expected { model, prompt, layer_ids, tokens, hidden_size })
}

/// With a damaged length the client would wait for bytes that never come. Proxies may send a body
/// in chunks.
fn check_length(
    endpoint: &Endpoint,
    digest: Option<&Digest>,
    reply: &Response,
) -> Result<(), Failure> {
    let announced = reply.content_length();
    let is_chunked = reply.headers().contains_key(TRANSFER_ENCODING);
    match digest {
        Some(digest) if announced == Some(digest.bytes) => Ok(()),
        Some(_) if announced.is_none() && is_chunked => Ok(()),
        _ => Err(endpoint.damaged(PATH, "the head of its reply")),
    }
}

/// The record in a reply's body, if both match the request.
fn accept(
    endpoint: &Endpoint,
    digest: Option<Digest>,
    body: Bytes,
    expected: &Expected<'_>,
) -> Result<HiddenStates, Failure> {
    let own = Digest::of(Some(expected.prompt.to_owned()), [&body]);
    let sent = digest.ok_or_else(|| endpoint.damaged(PATH, "the head of its reply"))?;
    if sent.prompt != own.prompt {
        return Err(endpoint.damaged(PATH, "the prompt of its reply"));
    }
    if sent != own {
        return Err(endpoint.damaged(PATH, "its reply"));
    }
    let url = endpoint.url(PATH);
    let (states, model) = decode(body, &url).map_err(Failure::Damaged)?;
    check_shape(&states, expected, &url)?;
    if model != expected.model {
        return Err(endpoint.changed(expected.model.to_owned(), model));
    }
    states.check_rows(&url).map_err(Failure::Invalid)?;
    Ok(states)
}

/// Detects another model at the same address, or one that alternates with the right one.
fn check_target(call: &Call<'_>, reply: &Response) -> Result<(), Failure> {
    let Some(target) = &call.config.target else { return Ok(()) };
    let digests = reply.headers().get(TARGET_HEADER).and_then(|value| value.to_str().ok());
    match digests.filter(|digests| target.contradicts(digests)) {
        None => Ok(()),
        // A damaged header differs once, another model differs again.
        Some(digests) => Err(Failure::Doubtful(Error::OtherTarget {
            url: call.endpoint.url(PATH),
            found: format!("a model of {}", clean(digests, 100)),
            expected: target.to_string(),
        })),
    }
}

/// Detects a server that does not match its own list of models.
fn check_shape(states: &HiddenStates, expected: &Expected<'_>, url: &str) -> Result<(), Failure> {
    let url = url.to_owned();
    if states.layer_ids != expected.layer_ids {
        let wanted = expected.layer_ids.to_vec();
        let served = states.layer_ids.iter().take(64).copied().collect();
        return Err(Failure::Doubtful(Error::LayerMismatch { url, wanted, served }));
    }
    if states.hidden_size != expected.hidden_size {
        return Err(Failure::Doubtful(Error::ModelMismatch {
            url,
            model: "a model".into(),
            key: "hidden_size",
            expected: expected.hidden_size,
            got: states.hidden_size,
        }));
    }
    if states.tokens != expected.tokens {
        let (expected, got) = (expected.tokens, states.tokens);
        return Err(Failure::Invalid(Error::RowCount { origin: url, expected, got }));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use dflash_test_support::random;

    use super::*;
    use crate::encode_stream;
    use crate::endpoint::Pool;
    use crate::tests::{damaged, sample};

    /// 15,000 replies with damaged bodies, headers or both.
    #[test]
    fn a_damaged_reply_is_never_taken_for_a_good_one() {
        let pool = Pool::parse(&["h:1".into()]).unwrap();
        let endpoint = &pool.endpoints()[0];
        let states = sample(&[2, 5], 7, 6);
        let body = Bytes::from(encode_stream(&states, "tiny").unwrap().concat());
        let prompt = prompt_digest(&[1, 2, 3, 4, 5, 6, 7], Some(&[2, 5]));
        let head = Digest::of(Some(prompt.clone()), [&body]).to_string();
        let expected = Expected {
            model: "tiny",
            prompt: &prompt,
            layer_ids: &[2, 5],
            tokens: 7,
            hidden_size: 6,
        };
        let take = |head: &str, body: Bytes| accept(endpoint, head.parse().ok(), body, &expected);
        assert_eq!(take(&head, body.clone()).unwrap(), states);
        let mut random = random();
        for round in 0..15_000 {
            let (mut sent_head, mut sent) = (head.clone(), body.clone());
            if round % 3 != 0 {
                sent = damaged(&body, &mut random).into();
            }
            if round % 3 != 1 {
                let bytes = damaged(head.as_bytes(), &mut random);
                sent_head = String::from_utf8_lossy(&bytes).into_owned();
            }
            match take(&sent_head, sent) {
                Err(Failure::Damaged(_)) => {}
                Err(other) => panic!("{other:?}"),
                Ok(taken) => assert_eq!(taken, states),
            }
        }
        // Nor one for other tokens, or from another model, with matching digests.
        let other = prompt_digest(&[1, 2, 3, 4, 5, 6, 8], Some(&[2, 5]));
        let other = Digest::of(Some(other), [&body]).to_string();
        assert!(matches!(take(&other, body), Err(Failure::Damaged(_))));
        let body = Bytes::from(encode_stream(&states, "tidy").unwrap().concat());
        let head = Digest::of(Some(prompt.clone()), [&body]).to_string();
        assert!(matches!(take(&head, body), Err(Failure::Doubtful(Error::ServerChanged { .. }))));
    }
}
