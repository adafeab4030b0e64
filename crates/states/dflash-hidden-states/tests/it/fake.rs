//! Servers in this process, each on its own thread, and streams that use them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use axum::body::Body;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use dflash_hidden_states::{
    DIGEST_HEADER, Digest, Dtype, Error, Fetched, HiddenStates, Metadata, ModelCard, ModelList,
    Request, RetryPolicy, StatesRequest, Stream, StreamConfig, WantedRow, encode_stream,
    prompt_digest,
};
use tokio::sync::oneshot;

pub(crate) const HIDDEN: usize = 8;
pub(crate) const LAYERS: [u32; 2] = [2, 5];

/// A server on a free port of this machine; stopped when dropped.
pub(crate) struct Server {
    pub(crate) url: String,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub(crate) fn start(router: Router) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (stop, stopped) = oneshot::channel::<()>();
        let serve = move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                tokio::select! {
                    _ = axum::serve(listener, router) => {}
                    _ = stopped => {}
                }
            });
        };
        Self { url, stop: Some(stop), thread: Some(thread::spawn(serve)) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A server of our protocol whose answer to the n-th prompt (from 0) is `answer(n, request)`.
pub(crate) fn own_server<F, R>(answer: F) -> (Server, Arc<AtomicUsize>)
where
    F: Fn(usize, StatesRequest) -> R + Clone + Send + Sync + 'static,
    R: Future<Output = Response> + Send + 'static,
{
    let count = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&count);
    let states = post(move |Json(request): Json<StatesRequest>| {
        let number = counter.fetch_add(1, Ordering::SeqCst);
        answer(number, request)
    });
    let router = Router::new().route("/v1/models", get(async || list(&models())));
    (Server::start(router.route("/v1/hidden_states", states)), count)
}

pub(crate) fn models() -> ModelList {
    let metadata = Metadata {
        hidden_size: HIDDEN,
        num_hidden_layers: 8,
        vocab_size: 1000,
        layer_ids: LAYERS.to_vec(),
        dtype: Dtype::Bf16,
        target: None,
    };
    ModelList::of(ModelCard::new("tiny".into(), "/models/tiny".into(), 4096, metadata))
}

/// The states computed by all servers here: each value identifies layer, token and column.
pub(crate) fn states_of(input_ids: &[i64], layer_ids: &[u32]) -> HiddenStates {
    let layer = |&id: &u32| -> Bytes {
        let value = |token: i64, column: usize| {
            half::bf16::from_f32(id as f32 + (token % 32) as f32 / 4.0 + (column + 1) as f32 * 16.0)
        };
        let row = |&token: &i64| (0..HIDDEN).flat_map(move |c| value(token, c).to_le_bytes());
        input_ids.iter().flat_map(row).collect::<Vec<u8>>().into()
    };
    let layers = layer_ids.iter().map(layer).collect();
    HiddenStates::new(layer_ids.to_vec(), input_ids.len(), HIDDEN, Dtype::Bf16, layers).unwrap()
}

/// A list of models with its digest.
pub(crate) fn list(models: &ModelList) -> Response {
    let body = Bytes::from(serde_json::to_vec(models).unwrap());
    ([(DIGEST_HEADER, Digest::of(None, [&body]).to_string())], body).into_response()
}

/// A correct server's answer.
pub(crate) fn good(request: &StatesRequest) -> Response {
    let ids = request.input_ids.as_ref().unwrap();
    arrow(request, &states_of(ids, request.layer_ids.as_ref().unwrap()))
}

/// A reply to `request` with these states.
pub(crate) fn arrow(request: &StatesRequest, states: &HiddenStates) -> Response {
    let body = Bytes::from(encode_stream(states, "tiny").unwrap().concat());
    ([(DIGEST_HEADER, reply_digest(request, &body))], Body::from(body)).into_response()
}

pub(crate) fn reply_digest(request: &StatesRequest, body: &Bytes) -> String {
    let ids = request.input_ids.as_ref().unwrap();
    let prompt = prompt_digest(ids, request.layer_ids.as_deref());
    Digest::of(Some(prompt), [body]).to_string()
}

pub(crate) fn status(code: u16, message: &str) -> Response {
    let body = serde_json::json!({ "error": { "message": message } });
    (StatusCode::from_u16(code).unwrap(), Json(body)).into_response()
}

/// A stream's settings for tests: short retries and timeouts.
pub(crate) fn config(endpoints: &[&str]) -> StreamConfig {
    let endpoints = endpoints.iter().map(ToString::to_string).collect();
    let retry = RetryPolicy {
        request_timeout: Duration::from_secs(10),
        deadline: Duration::from_secs(10),
        startup: Duration::from_millis(200),
        first_pause: Duration::from_millis(5),
        longest_pause: Duration::from_millis(40),
        longest_wait: Duration::from_secs(1),
        ..RetryPolicy::default()
    };
    StreamConfig { retry, ..StreamConfig::new(endpoints, LAYERS.to_vec(), HIDDEN) }
}

pub(crate) fn prompt(sample: u64) -> Request {
    let length = 3 + (sample * 7 % 11) as i64;
    Request { sample, input_ids: (0..length).map(|t| sample as i64 + t).collect() }
}

pub(crate) fn single_rows(samples: std::ops::Range<u64>) -> Vec<Vec<Request>> {
    samples.map(|sample| vec![prompt(sample)]).collect()
}

/// A row that consists only of its samples.
pub(crate) fn wanted(requests: Vec<Request>) -> Result<WantedRow<()>, Error> {
    Ok(WantedRow { row: (), requests })
}

pub(crate) fn start(
    config: StreamConfig,
    rows: Vec<Vec<Request>>,
) -> Result<Stream<(), Error>, Error> {
    Stream::start(config, rows.into_iter().map(wanted))
}

/// All rows of a stream; panics on an error.
pub(crate) fn drain(stream: &mut Stream<(), Error>) -> Vec<Vec<Fetched>> {
    std::iter::from_fn(|| stream.next_row()).map(|row| row.expect("a row").samples).collect()
}

/// Asserts that `fetched` equals a correct server's result for its sample.
pub(crate) fn assert_right(fetched: &Fetched) {
    let expected = states_of(&prompt(fetched.sample).input_ids, &LAYERS);
    assert_eq!(fetched.states.as_ref(), Some(&expected), "sample {}", fetched.sample);
}

/// The message with its causes.
pub(crate) fn full_text(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Shared list in which servers record what they saw.
pub(crate) type Notes<T> = Arc<Mutex<Vec<T>>>;
