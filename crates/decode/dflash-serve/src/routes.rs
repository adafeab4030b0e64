//! The HTTP routes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::extract::{ConnectInfo, Path, Request, State};
use axum::http::{HeaderMap, Method, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use dflash_chat::ChatTokenizer;
use dflash_decode::{Grammar, Request as EngineRequest};
use dflash_http::{
    AccessLog, Admission, Bodies, BodyFault, Client, Connections, Guard, LONGEST_LINE, NoSlot,
    Note, Received, Slot, announced_length, drain, guard, says_json, watch,
};
use dflash_settings::ServeSettings;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::answers::{Answers, Noted};
use crate::calls::CallReader;
use crate::grammars::Grammars;
use crate::metrics::{Metrics, TEXT_FORMAT};
use crate::page;
use crate::protocol::{Asked, ChatRequest, CompletionRequest};
use crate::queue::{Dropped, Event, Job, Party, Queue};
use crate::refusal::Refusal;
use crate::reply::{Choice, Envelope, Kind, Usage, random, unix_seconds};
use crate::shares::{NoShares, Shares};
use crate::tool_form::ToolForm;

/// Number of requests parsed at a time, which bounds the memory for JSON, templates and tokenizers.
const READERS: usize = 2;
/// Tokens of all prompts in flight, 8 bytes each, or of one of maximum length.
const ALL_TOKENS: usize = 16 << 20;

/// State that is known once the models are loaded.
#[derive(Debug)]
pub(crate) struct Loaded {
    /// The model name for clients.
    pub(crate) name: String,
    /// Whether any name is accepted, because none was configured.
    pub(crate) any_name: bool,
    /// The target's directory.
    pub(crate) root: String,
    pub(crate) max_model_len: usize,
    /// Most tokens that are proposed at a time; 0 without a drafter.
    pub(crate) proposals: usize,
    pub(crate) vocab_size: i64,
    pub(crate) stop_ids: Vec<i64>,
    pub(crate) tokenizer: Arc<ChatTokenizer>,
    pub(crate) grammars: Grammars,
    /// The target's format for tool calls.
    pub(crate) tool_form: Option<ToolForm>,
    pub(crate) metrics: Metrics,
}

/// State shared between the HTTP side and the models' thread.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) loaded: OnceLock<Loaded>,
    pub(crate) queue: Queue,
    pub(crate) admission: Admission,
    pub(crate) connections: Arc<Connections>,
    pub(crate) guard: Arc<Guard>,
    /// Digest of the API key.
    key: Option<[u8; 32]>,
    max_body: usize,
    bodies: Bodies,
    readers: Semaphore,
    tokens: Arc<Semaphore>,
    shares: Shares,
    /// Requests so far.
    requests: AtomicU64,
    since: u64,
}

impl Shared {
    pub(crate) fn new(settings: &ServeSettings) -> Self {
        // Room for requests in the queue and in line, and for as many others.
        let most = settings.max_queue + 3 * LONGEST_LINE;
        let client_timeout = Duration::from_secs_f64(settings.client_timeout);
        let patience = Duration::from_secs_f64(settings.max_wait);
        Self {
            loaded: OnceLock::new(),
            queue: Queue::default(),
            admission: Admission::new(settings.max_queue, patience),
            connections: Connections::new(most, client_timeout),
            key: settings.api_key.as_ref().map(|key| digest(key.as_bytes())),
            guard: Arc::new(Guard {
                allowed_origins: settings.allowed_origins.clone(),
                has_key: settings.api_key.is_some(),
                host: settings.host.clone(),
                has_page: true,
                ..Guard::default()
            }),
            max_body: (settings.max_body_mib << 20) as usize,
            bodies: Bodies::new((settings.max_body_mib << 20) as usize),
            readers: Semaphore::new(READERS),
            tokens: Arc::new(Semaphore::new(ALL_TOKENS)),
            shares: Shares::new(patience),
            requests: AtomicU64::new(0),
            since: unix_seconds(),
        }
    }

    /// The refusal if there is no memory for a request now.
    fn no_room(&self) -> Refusal {
        let after = match self.admission.full() {
            NoSlot::Full { after, .. } => after,
            NoSlot::Closed => Duration::ZERO,
        };
        Refusal::NoRoom { after }
    }

    fn loaded(&self) -> Result<&Loaded, Refusal> {
        self.loaded.get().ok_or(Refusal::Loading)
    }
}

/// Digests of keys are compared, so that timing reveals neither content nor length.
fn digest(key: &[u8]) -> [u8; 32] {
    Sha256::digest(key).into()
}

pub(crate) fn router(shared: Arc<Shared>) -> Router {
    let guarded = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route_layer(from_fn_with_state(Arc::clone(&shared), authorize));
    Router::new()
        .route("/", get(page))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .merge(guarded)
        .fallback(async |uri: Uri| Refusal::NoSuchPath { path: uri.path().into() })
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(Arc::clone(&shared.guard), guard))
        .layer(from_fn_with_state(Arc::clone(&shared), count_refusals))
        .layer(from_fn_with_state(AccessLog::Info, watch))
        .with_state(shared)
}

/// The chat page, which asks for the key itself.
async fn page(State(shared): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    match shared.guard.check_page(&headers) {
        Ok(()) => page::response(),
        Err(refusal) => refusal.into_response(),
    }
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
        let sent = bearer(request.headers());
        let is_right: bool = digest(sent.unwrap_or_default()).ct_eq(key).into();
        if !is_right {
            return Err(Refusal::Unauthorized);
        }
    }
    Ok(next.run(request).await)
}

/// The key of a request. The scheme's name may be in any case.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let sent = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, key) = sent.split_at_checked(b"bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii_start())
}

/// 200 once requests are accepted, 503 while the models load.
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
    let card = card(&shared, shared.loaded()?);
    Ok(Json(json!({"object": "list", "data": [card]})))
}

/// Names of models may contain a slash.
async fn model(
    State(shared): State<Arc<Shared>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, Refusal> {
    let loaded = shared.loaded()?;
    if id != loaded.name {
        return Err(Refusal::OtherModel { asked: id, served: loaded.name.clone() });
    }
    Ok(Json(card(&shared, loaded)))
}

fn card(shared: &Shared, loaded: &Loaded) -> Value {
    json!({
        "id": loaded.name,
        "object": "model",
        "created": shared.since,
        "owned_by": "dflash",
        // The name instead of the directory, which clients need not know.
        "root": loaded.name,
        "max_model_len": loaded.max_model_len,
        "max_draft_tokens": loaded.proposals,
    })
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
    let owner = bearer(request.headers()).map_or(0, |key| {
        let digest = digest(key);
        u64::from_le_bytes(digest[..8].try_into().expect("eight bytes"))
    });
    let (body, slot) = receive(&shared, &client, request).await?;
    let reader = Arc::clone(&shared);
    let turn = shared.readers.acquire().await.map_err(|_| Refusal::ShuttingDown)?;
    // Rendering and tokenizing a long prompt takes a while.
    let read = tokio::task::spawn_blocking(move || read(&reader, kind, &body.bytes));
    let (mut asked, prompts) = read.await.map_err(|_| Refusal::Tokenizer)??;
    drop(turn);
    hold_room(&shared, &slot, &asked, &prompts).await?;
    let loaded = shared.loaded()?;
    let grammar = match asked.format.take() {
        Some(format) => Some(loaded.grammars.make(format, &slot).await?),
        None => None,
    };
    let usage = Usage { prompt: prompts.iter().map(Vec::len).sum(), ..Usage::default() };
    let party = Party { request: shared.requests.fetch_add(1, Ordering::Relaxed), owner };
    let (jobs, events) = jobs(&asked, grammar, prompts, loaded, since, party);
    let choices = jobs.len();
    if !shared.queue.push(jobs) {
        return Err(Refusal::ShuttingDown);
    }
    let logprobs = asked.logprobs.is_some();
    let envelope = Envelope::new(kind, &loaded.name, &loaded.tokenizer, logprobs);
    let note = Note::default();
    let noted = Noted::new(note.clone(), since);
    let calls = asked.tools.as_ref().zip(loaded.tool_form);
    let calls = calls.map(|(tools, form)| CallReader::new(form, Arc::clone(tools)));
    let choices = (0..choices).map(|_| Choice::reading(calls.clone())).collect();
    let answers = Answers::new(envelope, events, noted, choices, asked.n, usage);
    let reply = match asked.stream {
        Some(options) => answers.stream(options.include_usage, client),
        None => {
            let whole = answers.whole().await?;
            ([(header::CONTENT_TYPE, "application/json")], whole).into_response()
        }
    };
    Ok((Extension(slot), Extension(note), reply).into_response())
}

/// Attaches to the slot the memory for a request's prompts, if there is enough, and for its
/// log-probabilities, once there is enough; a request waits for that no longer than in line.
async fn hold_room(
    shared: &Shared,
    slot: &Slot,
    asked: &Asked,
    prompts: &[Vec<i64>],
) -> Result<(), Refusal> {
    let lengths = || prompts.iter().map(Vec::len);
    let tokens = lengths().sum::<usize>().min(ALL_TOKENS);
    let room = Arc::clone(&shared.tokens).try_acquire_many_owned(tokens as u32);
    slot.keep(room.map_err(|_| shared.no_room())?);
    let most = shared.loaded()?.max_model_len;
    let longest = asked.max_tokens.unwrap_or(most - lengths().min().unwrap_or(0));
    let echoed = lengths().max().filter(|_| asked.echo).unwrap_or(0);
    let shares = asked.shares(prompts.len() * asked.n, longest + echoed)?;
    if shares > 0 {
        slot.keep(shared.shares.acquire(shares).await.map_err(|no_shares| match no_shares {
            NoShares::Taken => shared.no_room(),
            NoShares::Closed => Refusal::ShuttingDown,
        })?);
    }
    Ok(())
}

/// The request's body, and the place in the queue that it holds.
async fn receive(
    shared: &Shared,
    client: &Client,
    request: Request,
) -> Result<(Received, Slot), Refusal> {
    let limit = shared.max_body;
    let headers = request.headers();
    let refusal = if !says_json(headers) {
        let found = headers.get(header::CONTENT_TYPE).map_or("no content type".into(), |kind| {
            let kind = String::from_utf8_lossy(kind.as_bytes());
            format!("content type {:?}", kind.chars().take(100).collect::<String>())
        });
        Some(Refusal::NotJson { found })
    } else if announced_length(headers).is_some_and(|length| length > limit) {
        Some(Refusal::BodyTooLarge { limit })
    } else {
        None
    };
    if let Some(refusal) = refusal {
        client.receiving();
        drain(request).await;
        return Err(refusal);
    }
    client.served();
    // The slot first, then the body, so that uploads count against the queue.
    let slot = match shared.admission.enter().await {
        Ok(slot) => slot,
        Err(no_slot) => {
            client.receiving();
            drain(request).await;
            return Err(no_slot.into());
        }
    };
    client.receiving();
    let body = shared.bodies.read(request).await.map_err(|fault| match fault {
        BodyFault::Broken(error) => Refusal::BadBody(error),
        BodyFault::TooLarge => Refusal::BodyTooLarge { limit },
        BodyFault::NoRoom => shared.no_room(),
    })?;
    client.served();
    Ok((body, slot))
}

/// The parsed request, and the tokens of its prompts.
fn read(shared: &Shared, kind: Kind, body: &[u8]) -> Result<(Asked, Vec<Vec<i64>>), Refusal> {
    let loaded = shared.loaded()?;
    let most = loaded.max_model_len;
    let (asked, prompts) = match kind {
        Kind::Chat => {
            let mut request = ChatRequest::parse(body)?;
            check_model(&request.asked, loaded)?;
            request.ask_for_calls(loaded.tool_form, &loaded.tokenizer)?;
            let prompts = request.prompts(&loaded.tokenizer, most)?;
            (request.asked, prompts)
        }
        Kind::Completion => {
            let request = CompletionRequest::parse(body, most)?;
            check_model(&request.asked, loaded)?;
            let prompts = request.prompts(&loaded.tokenizer, most, loaded.vocab_size)?;
            (request.asked, prompts)
        }
    };
    asked.check_ids(loaded.vocab_size)?;
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

/// A job per choice: those of the first prompt, then those of the second, and so on.
fn jobs(
    asked: &Asked,
    grammar: Option<Grammar>,
    prompts: Vec<Vec<i64>>,
    loaded: &Loaded,
    since: Instant,
    party: Party,
) -> (Vec<Job>, UnboundedReceiver<Result<Event, Dropped>>) {
    let (events, receiver) = unbounded_channel();
    let seed = asked.seed.unwrap_or_else(random);
    let mut stop_ids = if asked.ignore_eos { Vec::new() } else { loaded.stop_ids.clone() };
    stop_ids.extend(&asked.stop_ids);
    let form = loaded.tool_form.filter(|_| asked.tools.is_some());
    let shown = form.map_or_else(Vec::new, |form| form.shown(&loaded.tokenizer));
    let job = |index: usize, prompt: &Arc<[i64]>| Job {
        party,
        index,
        request: EngineRequest {
            prompt: Vec::new(),
            max_new_tokens: asked.max_tokens.unwrap_or(loaded.max_model_len - prompt.len()),
            stop_ids: stop_ids.clone(),
            sampling: asked.sampling,
            adjustments: asked.adjustments.clone(),
            grammar: grammar.clone(),
            // Each choice has its own seed.
            seed: seed.wrapping_add((index % asked.n) as u64),
            logprobs: asked.logprobs,
            prompt_logprobs: asked.echo && asked.logprobs.is_some(),
            speculative: asked.speculative,
        },
        prompt: Arc::clone(prompt),
        stops: asked.stops.clone(),
        echo: asked.echo,
        reports_blocks: asked.reports_blocks(),
        shown: shown.clone(),
        events: events.clone(),
        since,
    };
    let prompts: Vec<Arc<[i64]>> = prompts.into_iter().map(Arc::from).collect();
    let each = prompts.iter().flat_map(|prompt| std::iter::repeat_n(prompt, asked.n));
    (each.enumerate().map(|(index, prompt)| job(index, prompt)).collect(), receiver)
}
