//! What each path answers.

use std::convert::Infallible;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use dflash_hidden::{
    ARROW_STREAM, DIGEST_HEADER, Digest, Metadata, ModelCard, ModelList, StatesRequest,
    TARGET_HEADER, encode_stream, prompt_digest,
};
use futures::StreamExt;
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use crate::featurizer::ModelFacts;
use crate::metrics::Metrics;
use crate::queue::{Job, Queue};
use crate::refusal::Refusal;

/// Room for prompts of some four million tokens, far beyond any context.
const LARGEST_BODY: usize = 32 << 20;

/// What the HTTP side and the model's thread share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Set when the model has been loaded.
    pub(crate) facts: OnceLock<ModelFacts>,
    pub(crate) queue: Queue,
    pub(crate) metrics: Metrics,
    start: Instant,
    /// One permit per request, from its admission until its last byte has gone out. So the bound
    /// covers waiting prompts and finished rows that a slow client has not taken.
    slots: Arc<Semaphore>,
    max_queue: usize,
}

impl Shared {
    pub(crate) fn new(max_queue: usize) -> Self {
        Self {
            facts: OnceLock::new(),
            queue: Queue::default(),
            metrics: Metrics::default(),
            start: Instant::now(),
            slots: Arc::new(Semaphore::new(max_queue)),
            max_queue,
        }
    }

    fn in_use(&self) -> usize {
        self.max_queue - self.slots.available_permits()
    }

    fn loaded(&self) -> Result<&ModelFacts, Refusal> {
        self.facts.get().ok_or(Refusal::Loading)
    }
}

/// All routes.
pub(crate) fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models))
        .route("/v1/hidden_states", post(hidden_states))
        .fallback(async |uri: Uri| Refusal::NoSuchPath { path: uri.path().into() })
        .method_not_allowed_fallback(wrong_method)
        .with_state(shared)
}

async fn wrong_method(uri: Uri, method: Method) -> Refusal {
    Refusal::WrongMethod { path: uri.path().into(), method: method.to_string() }
}

/// 200 once prompts can be taken, 503 while the model loads.
async fn health(State(shared): State<Arc<Shared>>) -> Result<Json<Value>, Refusal> {
    let facts = shared.loaded()?;
    let metrics = &shared.metrics;
    Ok(Json(json!({
        "status": "ok",
        "model": facts.name,
        "layer_ids": facts.metadata.layer_ids,
        "in_use": shared.in_use(),
        "waiting": shared.queue.waiting(),
        "max_queue": shared.max_queue,
        "prompts": metrics.prompts.get(),
        "tokens": metrics.tokens.get(),
        "batches": metrics.batches.get(),
        "invalid": metrics.invalid.get(),
        "put_off": metrics.put_off.get(),
        "cancelled": metrics.cancelled.get(),
        "failed": metrics.failed.get(),
        "uptime_s": shared.start.elapsed().as_secs(),
    })))
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let (in_use, waiting) = (shared.in_use(), shared.queue.waiting());
    let text = shared.metrics.prometheus(in_use, waiting, shared.start.elapsed());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

async fn models(State(shared): State<Arc<Shared>>) -> Result<Response, Refusal> {
    let facts = shared.loaded()?;
    let (id, root) = (facts.name.clone(), facts.root.clone());
    let card = ModelCard::new(id, root, facts.max_model_len, facts.metadata.clone());
    let body = Bytes::from(serde_json::to_vec(&ModelList::of(card))?);
    let digest = Digest::of(None, [&body]).to_string();
    let headers = [(header::CONTENT_TYPE.as_str(), "application/json"), (DIGEST_HEADER, &digest)];
    Ok((headers, body).into_response())
}

async fn hidden_states(
    State(shared): State<Arc<Shared>>,
    request: Request,
) -> Result<Response, Refusal> {
    let reply = serve_prompt(&shared, request).await;
    match &reply {
        Err(Refusal::Full { .. }) => shared.metrics.put_off.add(1),
        Err(refusal) if refusal.is_invalid_request() => shared.metrics.invalid.add(1),
        _ => {}
    }
    reply
}

async fn serve_prompt(shared: &Arc<Shared>, request: Request) -> Result<Response, Refusal> {
    let facts = shared.loaded()?;
    let body = read_body(request).await?;
    let request: StatesRequest = serde_json::from_slice(&body)?;
    let asked = request.layer_ids.clone();
    let (input_ids, layer_ids) = validate(request, facts)?;
    let prompt = prompt_digest(&input_ids, asked.as_deref());
    let slot = Arc::clone(&shared.slots)
        .try_acquire_owned()
        .map_err(|_| Refusal::Full { slots: shared.max_queue })?;
    let (reply, answer) = oneshot::channel();
    let job = Job { input_ids, layer_ids, reply };
    shared.queue.push(job).map_err(|_| Refusal::ShuttingDown)?;
    let states = answer.await.map_err(|_| Refusal::ShuttingDown)?;
    let states = states.map_err(Refusal::ModelFailed)?;
    let chunks =
        encode_stream(&states, &facts.name).map_err(|error| Refusal::ModelFailed(error.into()))?;
    let mut reply = stream(chunks, prompt, slot);
    let digests = facts.metadata.target.as_ref().map(|target| target.digests().parse());
    if let Some(Ok(digests)) = digests {
        reply.headers_mut().insert(TARGET_HEADER, digests);
    }
    Ok(reply)
}

/// The whole body. One that announces itself as too large is refused before it arrives.
async fn read_body(request: Request) -> Result<Bytes, Refusal> {
    let (parts, body) = request.into_parts();
    if announced_length(&parts.headers).is_some_and(|length| length > LARGEST_BODY) {
        return Err(Refusal::BodyTooLarge { limit: LARGEST_BODY });
    }
    let body = to_bytes(body, LARGEST_BODY).await.map_err(Refusal::BadBody)?;
    check_digest(&parts.headers, &body)?;
    Ok(body)
}

fn announced_length(headers: &HeaderMap) -> Option<usize> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Refuses a body that does not have the digest that came with it.
fn check_digest(headers: &HeaderMap, body: &Bytes) -> Result<(), Refusal> {
    let Some(sent) = headers.get(DIGEST_HEADER) else { return Ok(()) };
    let own = Digest::of(None, [body]).to_string();
    if sent.as_bytes() == own.as_bytes() { Ok(()) } else { Err(Refusal::Damaged) }
}

/// Sends `chunks` as they are; the slot goes back with the last of them, or when the client
/// leaves.
fn stream(chunks: Vec<Bytes>, prompt: String, slot: OwnedSemaphorePermit) -> Response {
    let digest = Digest::of(Some(prompt), &chunks);
    let chunks = futures::stream::iter(chunks).map(move |chunk| {
        let _held = &slot;
        Ok::<_, Infallible>(chunk)
    });
    let headers = [
        (header::CONTENT_TYPE.as_str(), ARROW_STREAM.to_owned()),
        // With its length announced, a client notices a reply that was cut short.
        (header::CONTENT_LENGTH.as_str(), digest.bytes.to_string()),
        (DIGEST_HEADER, digest.to_string()),
    ];
    (headers, Body::from_stream(chunks)).into_response()
}

/// The prompt and the layers of a request, both as the model takes them.
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
            Err(Refusal::LayerNotCaptured { id, served, last })
        }
        None => Ok(ids),
    }
}
