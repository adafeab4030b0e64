//! Asking our own server for one sample.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use dflash_settings::OnGenerate;
use reqwest::header::RETRY_AFTER;
use reqwest::{Client, Response, StatusCode};

use crate::endpoint::{Endpoint, transport};
use crate::error::Error;
use crate::fetch::Request;
use crate::protocol::{Metadata, StatesRequest, error_message};
use crate::record::HiddenStates;
use crate::retry::Failure;
use crate::stream::StreamConfig;
use crate::wire::decode_stream;

/// Room for the stream's header and padding beside the rows.
const STREAM_OVERHEAD: usize = 1 << 20;

/// One exchange with one endpoint.
pub(crate) struct Call<'a> {
    pub(crate) client: &'a Client,
    pub(crate) endpoint: &'a Endpoint,
    pub(crate) config: &'a StreamConfig,
    pub(crate) request: &'a Request,
}

impl Call<'_> {
    /// Whether to bring the last layer's output too, which other readers of stored files expect.
    pub(crate) fn with_last(&self) -> bool {
        self.config.on_generate == OnGenerate::Cache
    }

    /// A failed exchange with `url`.
    pub(crate) fn transport(&self, url: &str, source: reqwest::Error) -> Failure {
        transport(url, source, self.config.retry.request_timeout)
    }

    /// Posts `body` to `path` and hands back a successful reply.
    pub(crate) async fn post(
        &self,
        path: &str,
        body: &impl serde::Serialize,
    ) -> Result<Response, Failure> {
        let url = self.endpoint.url(path);
        let sent = self.client.post(&url).json(body).send().await;
        let reply = sent.map_err(|error| self.transport(&url, error))?;
        if reply.status().is_success() {
            return Ok(reply);
        }
        Err(refusal(url, reply).await)
    }
}

/// The record of a prompt: the captured layers, and the last one with [`Call::with_last`].
pub(crate) async fn fetch(call: &Call<'_>, served: &Metadata) -> Result<HiddenStates, Failure> {
    let mut layer_ids = call.config.layer_ids.clone();
    if call.with_last() && !layer_ids.contains(&served.num_hidden_layers) {
        layer_ids.push(served.num_hidden_layers);
    }
    let body = StatesRequest {
        input_ids: Some(call.request.input_ids.clone()),
        layer_ids: Some(layer_ids.clone()),
        ..StatesRequest::default()
    };
    let reply = call.post("/v1/hidden_states", &body).await?;
    let url = call.endpoint.url("/v1/hidden_states");
    let rows = layer_ids.len() * call.request.input_ids.len();
    let limit = rows * served.hidden_size * served.dtype.size() + STREAM_OVERHEAD;
    let body = read_body(call, reply, limit, &url).await?;
    let states = decode_stream(body, &url).map_err(|error| match error {
        Error::BrokenStream { .. } => Failure::Transient(error),
        _ => Failure::Fatal(error),
    })?;
    check_shape(&states, call, &layer_ids, &url)?;
    states.check_rows(&url).map_err(Failure::Invalid)?;
    Ok(states)
}

/// Catches a server that was replaced by another while the trainer ran.
fn check_shape(
    states: &HiddenStates,
    call: &Call<'_>,
    wanted: &[u32],
    url: &str,
) -> Result<(), Failure> {
    let url = url.to_owned();
    if states.layer_ids != wanted {
        let (wanted, served) = (wanted.to_vec(), states.layer_ids.clone());
        return Err(Failure::Fatal(Error::LayerMismatch { url, wanted, served }));
    }
    if states.hidden_size != call.config.hidden_size {
        return Err(Failure::Fatal(Error::ModelMismatch {
            url,
            model: "a model".into(),
            key: "hidden_size",
            expected: call.config.hidden_size,
            got: states.hidden_size,
        }));
    }
    let expected = call.request.input_ids.len();
    if states.tokens != expected {
        let got = states.tokens;
        return Err(Failure::Invalid(Error::RowCount { origin: url, expected, got }));
    }
    Ok(())
}

/// The whole body in one buffer, allocated once if the server announces its length.
async fn read_body(
    call: &Call<'_>,
    mut reply: Response,
    limit: usize,
    url: &str,
) -> Result<Bytes, Failure> {
    let announced = usize::try_from(reply.content_length().unwrap_or(0)).unwrap_or(usize::MAX);
    let mut body = BytesMut::with_capacity(announced.min(limit));
    while let Some(chunk) = reply.chunk().await.map_err(|error| call.transport(url, error))? {
        body.extend_from_slice(&chunk);
        if body.len().max(announced) > limit {
            let found = format!("it sends more than {limit} bytes for this prompt");
            return Err(Failure::Fatal(Error::UnknownServer { url: url.to_owned(), found }));
        }
    }
    Ok(body.freeze())
}

/// What an error status means for the sample and the endpoint.
async fn refusal(url: String, reply: Response) -> Failure {
    let status = reply.status();
    let wait = |name: &str| reply.headers().get(name)?.to_str().ok()?.parse().ok();
    // Our server knows it to the millisecond.
    let after = wait("retry-after-ms").map(Duration::from_millis);
    let after = after.or_else(|| wait(RETRY_AFTER.as_str()).map(Duration::from_secs));
    let message = error_message(&reply.bytes().await.unwrap_or_default());
    let error = Error::Status { url, status: status.as_u16(), message };
    match status {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
            Failure::Busy { after, error }
        }
        StatusCode::REQUEST_TIMEOUT => Failure::Transient(error),
        StatusCode::UNAUTHORIZED
        | StatusCode::FORBIDDEN
        | StatusCode::NOT_FOUND
        | StatusCode::METHOD_NOT_ALLOWED => Failure::Fatal(error),
        status if status.is_client_error() => Failure::Rejected(error),
        _ => Failure::Transient(error),
    }
}
