//! What each path answers.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::{Method, Uri, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use dflash_decode::Request as EngineRequest;
use dflash_http::{
    Admission, Client, Connections, LONGEST_LINE, Slot, announced_length, drain, read_body, watch,
};
use dflash_settings::ServeSettings;
use dflash_text::ChatTokenizer;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::metrics::{Metrics, TEXT_FORMAT};
use crate::protocol::{Asked, ChatRequest, CompletionRequest};
use crate::queue::{Event, Job, OutOfMemory, Queue};
use crate::refusal::Refusal;
use crate::reply::{Choice, Envelope, Kind, Usage, random, unix_seconds};

/// What is known once the models are loaded.
#[derive(Debug)]
pub(crate) struct Loaded {
    /// What clients call the model.
    pub(crate) name: String,
    /// Whether they may call it anything: nobody has named it.
    pub(crate) any_name: bool,
    /// The target's directory.
    pub(crate) root: String,
    pub(crate) max_model_len: usize,
    pub(crate) vocab_size: i64,
    pub(crate) stop_ids: Vec<i64>,
    pub(crate) tokenizer: Arc<ChatTokenizer>,
    pub(crate) metrics: Metrics,
}

/// What the HTTP side and the models' thread share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) loaded: OnceLock<Loaded>,
    pub(crate) queue: Queue,
    pub(crate) admission: Admission,
    pub(crate) connections: Arc<Connections>,
    /// Digest of the key that requests must bear.
    key: Option<[u8; 32]>,
    max_body: usize,
    since: u64,
}

impl Shared {
    pub(crate) fn new(settings: &ServeSettings) -> Self {
        // Room for those in the queue and in line, and as many again for others.
        let most = settings.max_queue + 3 * LONGEST_LINE;
        let client_timeout = Duration::from_secs_f64(settings.client_timeout);
        let patience = Duration::from_secs_f64(settings.max_wait);
        Self {
            loaded: OnceLock::new(),
            queue: Queue::default(),
            admission: Admission::new(settings.max_queue, patience),
            connections: Connections::new(most, client_timeout),
            key: settings.api_key.as_ref().map(|key| digest(key.as_bytes())),
            max_body: (settings.max_body_mib << 20) as usize,
            since: unix_seconds(),
        }
    }

    fn loaded(&self) -> Result<&Loaded, Refusal> {
        self.loaded.get().ok_or(Refusal::Loading)
    }
}

/// Of keys their digests are compared, so that neither content nor length shows in the time it takes.
fn digest(key: &[u8]) -> [u8; 32] {
    Sha256::digest(key).into()
}

/// All routes.
pub(crate) fn router(shared: Arc<Shared>) -> Router {
    let guarded = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route_layer(from_fn_with_state(Arc::clone(&shared), authorize));
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .merge(guarded)
        .fallback(async |uri: Uri| Refusal::NoSuchPath { path: uri.path().into() })
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(Arc::clone(&shared), count_refusals))
        .layer(from_fn(watch))
        .with_state(shared)
}

async fn wrong_method(uri: Uri, method: Method) -> Refusal {
    Refusal::WrongMethod { path: uri.path().into(), method: method.to_string() }
}

async fn count_refusals(
    State(shared): State<Arc<Shared>>,
    request: Request,
    next: Next,
) -> Response {
    let response = next.run(request).await;
    let status = response.status();
    if let Some(loaded) = shared.loaded.get().filter(|_| !status.is_success()) {
        loaded.metrics.refused(status.as_u16());
    }
    response
}

async fn authorize(
    State(shared): State<Arc<Shared>>,
    request: Request,
    next: Next,
) -> Result<Response, Refusal> {
    if let Some(key) = &shared.key {
        let sent = request.headers().get(header::AUTHORIZATION);
        let sent = sent.and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        let is_right: bool = digest(sent.unwrap_or_default()).ct_eq(key).into();
        if !is_right {
            return Err(Refusal::Unauthorized);
        }
    }
    Ok(next.run(request).await)
}

/// 200 once requests can be taken, 503 while the models load.
async fn health(State(shared): State<Arc<Shared>>) -> Result<Json<Value>, Refusal> {
    let loaded = shared.loaded()?;
    Ok(Json(json!({
        "status": "ok",
        "model": loaded.name,
        "in_use": shared.admission.in_use(),
        "in_line": shared.admission.in_line(),
        "waiting": shared.queue.waiting(),
        "connections": shared.connections.count(),
    })))
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Result<Response, Refusal> {
    let cut = shared.connections.cut_so_far();
    let page = shared.loaded()?.metrics.page(shared.queue.waiting(), cut);
    Ok(([(header::CONTENT_TYPE, TEXT_FORMAT)], page).into_response())
}

async fn models(State(shared): State<Arc<Shared>>) -> Result<Json<Value>, Refusal> {
    let loaded = shared.loaded()?;
    Ok(Json(json!({"object": "list", "data": [{
        "id": loaded.name,
        "object": "model",
        "created": shared.since,
        "owned_by": "dflash",
        "root": loaded.root,
        "max_model_len": loaded.max_model_len,
    }]})))
}

async fn chat(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(client): ConnectInfo<Client>,
    request: Request,
) -> Result<Response, Refusal> {
    answer(shared, client, request, Kind::Chat).await
}

async fn completions(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(client): ConnectInfo<Client>,
    request: Request,
) -> Result<Response, Refusal> {
    answer(shared, client, request, Kind::Completion).await
}

async fn answer(
    shared: Arc<Shared>,
    client: Client,
    request: Request,
    kind: Kind,
) -> Result<Response, Refusal> {
    let since = Instant::now();
    shared.loaded()?;
    let (body, slot) = receive(&shared, &client, request).await?;
    let reader = Arc::clone(&shared);
    // Rendering and tokenizing a long prompt take a while.
    let read = tokio::task::spawn_blocking(move || read(&reader, kind, &body));
    let (asked, prompts) = read.await.map_err(|_| Refusal::Tokenizer)??;
    let loaded = shared.loaded()?;
    let usage = Usage { prompt: prompts.iter().map(Vec::len).sum(), ..Usage::default() };
    let (jobs, events) = jobs(&asked, prompts, (loaded, since));
    let choices = jobs.len();
    if !shared.queue.push(jobs) {
        return Err(Refusal::ShuttingDown);
    }
    let logprobs = asked.logprobs.is_some();
    let envelope = Envelope::new(kind, &loaded.name, (&loaded.tokenizer, logprobs));
    let answers = Answers::new(envelope, events, (choices, asked.n), usage);
    let reply = match asked.stream {
        Some(options) => answers.stream(options.include_usage),
        None => Json(answers.whole().await?).into_response(),
    };
    Ok((Extension(slot), reply).into_response())
}

/// The request's body, and the place in the queue that it holds.
async fn receive(
    shared: &Shared,
    client: &Client,
    request: Request,
) -> Result<(axum::body::Bytes, Slot), Refusal> {
    let limit = shared.max_body;
    if announced_length(request.headers()).is_some_and(|length| length > limit) {
        client.receiving();
        drain(request).await;
        return Err(Refusal::BodyTooLarge { limit });
    }
    client.served();
    // First the place, then the body, so that uploads count against the queue.
    let slot = match shared.admission.enter().await {
        Ok(slot) => slot,
        Err(no_slot) => {
            client.receiving();
            drain(request).await;
            return Err(no_slot.into());
        }
    };
    client.receiving();
    let body = read_body(request, limit).await.map_err(Refusal::BadBody)?;
    client.served();
    Ok((body.ok_or(Refusal::BodyTooLarge { limit })?, slot))
}

/// What is asked, and the tokens of the prompts.
fn read(shared: &Shared, kind: Kind, body: &[u8]) -> Result<(Asked, Vec<Vec<i64>>), Refusal> {
    let loaded = shared.loaded()?;
    let most = loaded.max_model_len;
    let (asked, prompts) = match kind {
        Kind::Chat => {
            let request = ChatRequest::parse(body)?;
            check_model(&request.asked, loaded)?;
            let prompts = request.prompts(&loaded.tokenizer, most)?;
            (request.asked, prompts)
        }
        Kind::Completion => {
            let request = CompletionRequest::parse(body)?;
            check_model(&request.asked, loaded)?;
            let prompts = request.prompts(&loaded.tokenizer, (most, loaded.vocab_size))?;
            (request.asked, prompts)
        }
    };
    let asked_for = asked.max_tokens.unwrap_or(1);
    match prompts.iter().map(Vec::len).find(|prompt| prompt + asked_for > most) {
        Some(prompt) => Err(Refusal::TooLong { prompt, asked: asked_for, limit: most }),
        None => Ok((asked, prompts)),
    }
}

fn check_model(asked: &Asked, loaded: &Loaded) -> Result<(), Refusal> {
    let is_ours = |model: &&String| **model == loaded.name || **model == loaded.root;
    match &asked.model {
        Some(model) if !loaded.any_name && !is_ours(&model) => {
            Err(Refusal::OtherModel { asked: model.clone(), served: loaded.name.clone() })
        }
        _ => Ok(()),
    }
}

/// A job for every choice: those of the first prompt, then those of the second, and so on.
fn jobs(
    asked: &Asked,
    prompts: Vec<Vec<i64>>,
    (loaded, since): (&Loaded, Instant),
) -> (Vec<Job>, UnboundedReceiver<Result<Event, OutOfMemory>>) {
    let (events, receiver) = unbounded_channel();
    let seed = asked.seed.unwrap_or_else(random);
    let job = |index: usize, prompt: &[i64]| Job {
        index,
        request: EngineRequest {
            prompt: prompt.to_vec(),
            max_new_tokens: asked.max_tokens.unwrap_or(loaded.max_model_len - prompt.len()),
            stop_ids: loaded.stop_ids.clone(),
            sampling: asked.sampling,
            // A choice of its own for each.
            seed: seed.wrapping_add((index % asked.n) as u64),
            logprobs: asked.logprobs,
            speculative: asked.speculative,
        },
        stops: asked.stops.clone(),
        events: events.clone(),
        since,
    };
    let each = prompts.iter().flat_map(|prompt| std::iter::repeat_n(prompt, asked.n));
    (each.enumerate().map(|(index, prompt)| job(index, prompt)).collect(), receiver)
}

/// The answers to a request while they come.
struct Answers {
    envelope: Envelope,
    events: UnboundedReceiver<Result<Event, OutOfMemory>>,
    choices: Vec<Choice>,
    /// Answers to each prompt.
    n: usize,
    usage: Usage,
}

impl Answers {
    fn new(
        envelope: Envelope,
        events: UnboundedReceiver<Result<Event, OutOfMemory>>,
        (choices, n): (usize, usize),
        usage: Usage,
    ) -> Self {
        let choices = (0..choices).map(|_| Choice::default()).collect();
        Self { envelope, events, choices, n, usage }
    }

    /// The next event; `None` when all choices have ended.
    async fn next(&mut self) -> Result<Option<Event>, Refusal> {
        if self.choices.iter().all(|choice| choice.finish.is_some()) {
            return Ok(None);
        }
        let event = self.events.recv().await.ok_or(Refusal::ShuttingDown)??;
        self.usage.completion += event.count;
        // Once for each prompt, with its first piece.
        let choice = &mut self.choices[event.index];
        if event.index % self.n == 0 && choice.is_untouched() {
            self.usage.cached += event.cached_tokens;
        }
        choice.touch();
        Ok(Some(event))
    }

    async fn whole(mut self) -> Result<Value, Refusal> {
        while let Some(event) = self.next().await? {
            self.choices[event.index].add(event);
        }
        Ok(self.envelope.whole(self.choices, self.usage))
    }

    /// Server-sent events.
    fn stream(self, include_usage: bool) -> Response {
        let pieces = VecDeque::new();
        let streamed = Streamed { answers: self, include_usage, pieces, ended: false };
        let lines = futures::stream::unfold(streamed, async |mut streamed| {
            let line = streamed.next().await?;
            Some((Ok::<_, Infallible>(format!("data: {line}\n\n")), streamed))
        });
        let headers =
            [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
        (headers, Body::from_stream(lines)).into_response()
    }
}

struct Streamed {
    answers: Answers,
    include_usage: bool,
    /// What is to be sent before anything else comes.
    pieces: VecDeque<String>,
    ended: bool,
}

impl Streamed {
    async fn next(&mut self) -> Option<String> {
        while self.pieces.is_empty() && !self.ended {
            let answers = &mut self.answers;
            match answers.next().await {
                Ok(Some(event)) => {
                    let usage = self.include_usage.then_some(Value::Null);
                    let choice = &mut answers.choices[event.index];
                    let chunk = answers.envelope.chunk(choice, &event, usage);
                    self.pieces.extend(chunk.map(|chunk| chunk.to_string()));
                }
                Ok(None) => {
                    if self.include_usage {
                        let usage = answers.envelope.usage_chunk(answers.usage);
                        self.pieces.push_back(usage.to_string());
                    }
                    self.end();
                }
                Err(refusal) => {
                    let error = json!({"message": refusal.to_string(), "type": "server_error"});
                    self.pieces.push_back(json!({ "error": error }).to_string());
                    self.end();
                }
            }
        }
        self.pieces.pop_front()
    }

    fn end(&mut self) {
        self.pieces.push_back("[DONE]".into());
        self.ended = true;
    }
}
