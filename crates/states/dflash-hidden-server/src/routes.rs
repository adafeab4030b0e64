//! The HTTP routes.

use std::convert::Infallible;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderValue, Method, Uri, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use bytes::Bytes;
use dflash_hidden_states::{
    ARROW_STREAM, DIGEST_HEADER, Digest, Metadata, ModelCard, ModelList, StatesRequest,
    TARGET_HEADER, encode_stream, prompt_digest,
};
use dflash_http::{
    AccessLog, Admission, Client, Connections, Guard, LONGEST_LINE, Slot, announced_length, drain,
    guard, read_body, watch,
};
use dflash_settings::HiddenServerSettings;
use futures::StreamExt;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, oneshot};

use crate::featurizer::ModelFacts;
use crate::metrics::Metrics;
use crate::queue::{Job, Queue};
use crate::refusal::Refusal;

/// Bytes of a body for other fields and generous spacing, and for prompts that are slightly too
/// long, so that the error can say by how much.
const BODY_ROOM: usize = 1 << 20;
/// Bytes per token in a body: its digits, a comma, and the indentation of pretty printers.
const TOKEN_ROOM: usize = 16;
/// Memory of all bodies in flight together, or of one of the largest.
const BODIES: usize = 64 << 20;

/// State shared between the HTTP side and the model's thread.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Set when the model has been loaded.
    pub(crate) facts: OnceLock<ModelFacts>,
    pub(crate) queue: Queue,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) admission: Admission,
    pub(crate) connections: Arc<Connections>,
    pub(crate) guard: Arc<Guard>,
    start: Instant,
    /// Bytes of bodies in flight.
    bodies: Semaphore,
}

impl Shared {
    pub(crate) fn new(settings: &HiddenServerSettings) -> Self {
        let metrics = Arc::<Metrics>::default();
        // Room for requests in the queue and in line, and for as many others.
        let most = settings.max_queue + 3 * LONGEST_LINE;
        let client_timeout = Duration::from_secs_f64(settings.client_timeout);
        Self {
            facts: OnceLock::new(),
            queue: Queue::default(),
            metrics,
            admission: Admission::new(
                settings.max_queue,
                Duration::from_secs_f64(settings.max_wait),
            ),
            connections: Connections::new(most, client_timeout),
            guard: Arc::new(Guard { host: settings.host.clone(), ..Guard::default() }),
            start: Instant::now(),
            bodies: Semaphore::new(BODIES),
        }
    }

    /// Refuses all waiting requests.
    pub(crate) fn close(&self) {
        self.admission.close();
        self.queue.close();
    }

    fn loaded(&self) -> Result<&ModelFacts, Refusal> {
        self.facts.get().ok_or(Refusal::Loading)
    }
}

pub(crate) fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models))
        .route("/v1/hidden_states", post(hidden_states))
        .fallback(async |uri: Uri| Refusal::NoSuchPath { path: uri.path().into() })
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(Arc::clone(&shared.guard), guard))
        .layer(from_fn_with_state(AccessLog::Debug, watch))
        .with_state(shared)
}

async fn wrong_method(uri: Uri, method: Method) -> Refusal {
    Refusal::WrongMethod { path: uri.path().into(), method: method.to_string() }
}

/// 200 once prompts are accepted, 503 while the model loads.
async fn health(State(shared): State<Arc<Shared>>) -> Result<Json<Value>, Refusal> {
    let facts = shared.loaded()?;
    let metrics = &shared.metrics;
    Ok(Json(json!({
        "status": "ok",
        "model": facts.name,
        "layer_ids": facts.metadata.layer_ids,
        "in_use": shared.admission.in_use(),
        "in_line": shared.admission.in_line(),
        "waiting": shared.queue.waiting(),
        "max_queue": shared.admission.max_queue(),
        "connections": shared.connections.count(),
        "prompts": metrics.prompts.get(),
        "tokens": metrics.tokens.get(),
        "batches": metrics.batches.get(),
        "invalid": metrics.invalid.get(),
        "put_off": metrics.put_off.get(),
        "cancelled": metrics.cancelled.get(),
        "failed": metrics.failed.get(),
        "out_of_memory": metrics.out_of_memory.get(),
        "cut": shared.connections.cut_so_far(),
        "uptime_s": shared.start.elapsed().as_secs(),
    })))
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let (in_use, waiting) = (shared.admission.in_use(), shared.queue.waiting());
    let text = shared.metrics.prometheus(
        in_use,
        waiting,
        shared.connections.cut_so_far(),
        shared.start.elapsed(),
    );
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

async fn models(State(shared): State<Arc<Shared>>) -> Result<Response, Refusal> {
    let facts = shared.loaded()?;
    // The name instead of the directory, which clients need not know.
    let (id, root) = (facts.name.clone(), facts.name.clone());
    let card = ModelCard::new(id, root, facts.max_model_len, facts.metadata.clone());
    let body = Bytes::from(serde_json::to_vec(&ModelList::of(card))?);
    let digest = Digest::of(None, [&body]).to_string();
    let headers = [(header::CONTENT_TYPE.as_str(), "application/json"), (DIGEST_HEADER, &digest)];
    Ok((headers, body).into_response())
}

async fn hidden_states(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(client): ConnectInfo<Client>,
    request: Request,
) -> Result<Response, Refusal> {
    let reply = serve_prompt(&shared, &client, request).await;
    match &reply {
        Err(Refusal::Full { .. }) => shared.metrics.put_off.add(1),
        Err(refusal) if refusal.is_invalid_request() => shared.metrics.invalid.add(1),
        _ => {}
    }
    reply
}

async fn serve_prompt(
    shared: &Shared,
    client: &Client,
    request: Request,
) -> Result<Response, Refusal> {
    let facts = shared.loaded()?;
    let limit = BODY_ROOM + TOKEN_ROOM * facts.max_model_len;
    let length = announced_length(request.headers()).unwrap_or(limit);
    if length > limit {
        return Err(put_off(Refusal::BodyTooLarge { limit }, client, request).await);
    }
    client.served();
    // The slot first, then the body, so that uploads count against the queue.
    let slot = match shared.admission.enter().await {
        Ok(slot) => slot,
        Err(no_slot) => return Err(put_off(no_slot.into(), client, request).await),
    };
    client.receiving();
    let Ok(room) = shared.bodies.try_acquire_many(length.min(BODIES) as u32) else {
        return Err(put_off(shared.admission.full().into(), client, request).await);
    };
    let digest = request.headers().get(DIGEST_HEADER).cloned();
    let body = read_body(request, limit).await.map_err(Refusal::BadBody)?;
    let body = body.ok_or(Refusal::BodyTooLarge { limit })?;
    drop(room);
    client.served();
    check_digest(digest.as_ref(), &body)?;
    let request: StatesRequest = serde_json::from_slice(&body)?;
    drop(body);
    let asked = request.layer_ids.clone();
    let (input_ids, layer_ids) = validate(request, facts)?;
    let prompt = prompt_digest(&input_ids, asked.as_deref());
    let (reply, answer) = oneshot::channel();
    let job = Job { input_ids, layer_ids, reply };
    shared.queue.push(job).map_err(|_| Refusal::ShuttingDown)?;
    let states = answer.await.map_err(|_| Refusal::ShuttingDown)?;
    let states = states.map_err(Refusal::of_model)?;
    let chunks =
        encode_stream(&states, &facts.name).map_err(|error| Refusal::ModelFailed(error.into()))?;
    let mut reply = stream(chunks, prompt, slot);
    let digests = facts.metadata.target.as_ref().map(|target| target.digests().parse());
    if let Some(Ok(digests)) = digests {
        reply.headers_mut().insert(TARGET_HEADER, digests);
    }
    Ok(reply)
}

/// Reads and drops the body of a request that gets `refusal`.
async fn put_off(refusal: Refusal, client: &Client, request: Request) -> Refusal {
    client.receiving();
    drain(request).await;
    refusal
}

/// Refuses a body that does not match its digest.
fn check_digest(sent: Option<&HeaderValue>, body: &Bytes) -> Result<(), Refusal> {
    let Some(sent) = sent else { return Ok(()) };
    let own = Digest::of(None, [body]).to_string();
    if sent.as_bytes() == own.as_bytes() { Ok(()) } else { Err(Refusal::Damaged) }
}

/// Sends `chunks` unchanged; the slot is kept until the socket has taken the last of them or the
/// client has left.
fn stream(chunks: Vec<Bytes>, prompt: String, slot: Slot) -> Response {
    let digest = Digest::of(Some(prompt), &chunks);
    let chunks = futures::stream::iter(chunks).map(Ok::<_, Infallible>);
    let headers = [
        (header::CONTENT_TYPE.as_str(), ARROW_STREAM.to_owned()),
        // With its length announced, a client notices a reply that was cut short.
        (header::CONTENT_LENGTH.as_str(), digest.bytes.to_string()),
        (DIGEST_HEADER, digest.to_string()),
    ];
    (headers, Extension(slot), Body::from_stream(chunks)).into_response()
}

/// The prompt and the layers of a request, both in the model's types.
fn validate(request: StatesRequest, facts: &ModelFacts) -> Result<(Vec<i64>, Vec<u32>), Refusal> {
    let StatesRequest { model, input_ids, prompt, layer_ids } = request;
    if let Some(asked) = model.filter(|asked| *asked != facts.name && *asked != facts.root) {
        return Err(Refusal::OtherModel { asked, served: facts.name.clone() });
    }
    let (field, input_ids) = match (input_ids, prompt) {
        (Some(ids), None) => ("input_ids", ids),
        (None, Some(ids)) => ("prompt", ids),
        (None, None) => return Err(Refusal::NoPrompt),
        (Some(_), Some(_)) => return Err(Refusal::TwoPrompts),
    };
    check_prompt(field, &input_ids, facts)?;
    Ok((input_ids, check_layers(layer_ids, facts)?))
}

fn check_prompt(field: &'static str, ids: &[i64], facts: &ModelFacts) -> Result<(), Refusal> {
    let (tokens, limit, vocab_size) = (ids.len(), facts.max_model_len, facts.metadata.vocab_size);
    if tokens == 0 {
        return Err(Refusal::EmptyPrompt { field });
    }
    if tokens > limit {
        return Err(Refusal::PromptTooLong { field, tokens, limit });
    }
    let outside = |&id: &i64| usize::try_from(id).map_or(true, |id| id >= vocab_size);
    match ids.iter().position(outside) {
        Some(position) => {
            let id = ids[position];
            Err(Refusal::TokenOutOfRange { field, position, id, vocab_size })
        }
        None => Ok(()),
    }
}

fn check_layers(asked: Option<Vec<u32>>, facts: &ModelFacts) -> Result<Vec<u32>, Refusal> {
    let Metadata { layer_ids, num_hidden_layers, .. } = &facts.metadata;
    let Some(mut ids) = asked else { return Ok(layer_ids.clone()) };
    ids.sort_unstable();
    ids.dedup();
    if ids.is_empty() {
        return Err(Refusal::NoLayers);
    }
    match ids.iter().find(|&&id| !facts.serves(id)) {
        Some(&id) => {
            let (served, last) = (layer_ids.clone(), *num_hidden_layers);
            Err(Refusal::LayerNotServed { id, served, last })
        }
        None => Ok(ids),
    }
}
