//! Serves a run's page, and what changes on it.
//!
//! A thread reads the run's files again when they change and renders the parts of the page; requests
//! only get what it has. The page asks for `state.json` every two seconds and names the state that
//! it has, so an unchanged run costs an empty reply. Nothing is written to the run's directory.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use dflash_http::{AccessLog, Connections, Guard, Listening, Refusal, Server, guard, watch};
use dflash_run::{Line, MetricLine, RunDir, ValidationLine};
use serde_json::{Map, Value, json};
use tokio::sync::oneshot;

use crate::Error;
use crate::page::{Part, live_html, parts};
use crate::run::Run;
use crate::standing::Standing;

/// Between two looks at the files.
const LOOK: Duration = Duration::from_millis(500);
/// The files are read again at least this often: some of what is shown depends on the time.
const REFRESH: Duration = Duration::from_secs(10);
/// The share of one core that reading may take is one in this many: the machine is there to train.
const IDLE: u32 = 20;
/// How many browsers may be connected.
const CONNECTIONS: usize = 128;
const CLIENT_TIMEOUT: Duration = Duration::from_secs(30);
/// How long replies that are being sent may take after Ctrl-C.
const REPLY_GRACE: Duration = Duration::from_secs(1);

/// The run to follow, and where to serve its page.
#[derive(Debug, Clone, Copy)]
pub struct Follow<'a> {
    /// The run's directory; the run may begin later.
    pub run_dir: &'a Path,
    /// Interface to listen on.
    pub host: &'a str,
    /// Port to listen on; 0 for any free one.
    pub port: u16,
    /// File to write the port to.
    pub port_file: Option<&'a Path>,
}

/// Serves the page until `stop` is set. `ready` is called once, when requests are accepted.
///
/// # Errors
/// An address that cannot be listened on, files that cannot be read at the start, a port file that
/// cannot be written.
pub fn follow(
    asked: &Follow<'_>,
    stop: &Arc<AtomicBool>,
    ready: impl FnOnce(SocketAddr),
) -> Result<(), Error> {
    let listening = Listening::on(asked.host, asked.port)?;
    let address = listening.address;
    let guard = Arc::new(Guard {
        only_own_names: true,
        host: asked.host.to_owned(),
        listens_on: address.into(),
        ..Guard::default()
    });
    let shown = Arc::new(RwLock::new(Shown::read(asked.run_dir)?));
    let connections = Connections::new(CONNECTIONS, CLIENT_TIMEOUT);
    let (loaded, when_loaded) = oneshot::channel();
    let _ = loaded.send(Ok(()));
    let server = Server {
        router: router(&shown, guard),
        connections,
        stop: Arc::clone(stop),
        model: start_reader(asked.run_dir.to_owned(), shown, Arc::clone(stop))?,
        reply_grace: REPLY_GRACE,
    };
    let is_ready = || {
        if let Some(path) = asked.port_file {
            Listening::write_port(address, path)?;
        }
        ready(address);
        Ok(())
    };
    server.run(listening, when_loaded, is_ready, || (), || ())
}

/// What requests get.
#[derive(Debug)]
struct Shown {
    page: String,
    policy: String,
    state: String,
    /// Identifies the state: an ETag.
    tag: String,
}

impl Shown {
    fn read(dir: &Path) -> Result<Self, Error> {
        let now = seconds_since_1970();
        let run = Run::read_so_far(dir)?;
        let parts = parts(&run, now);
        let (page, policy) = live_html(dir, &parts);
        let state = state(&run, &parts, now).to_string();
        let mut hasher = DefaultHasher::new();
        state.hash(&mut hasher);
        Ok(Self { page, policy, state, tag: format!("\"{:016x}\"", hasher.finish()) })
    }
}

/// The run in figures, and the parts of its page as HTML.
fn state(run: &Run, parts: &[Part], now: f64) -> Value {
    let standing = Standing::of(run, now);
    let line = run.metrics.last();
    let (word, _) = standing.phase.badge();
    let html: Map<String, Value> =
        parts.iter().map(|part| (part.id.to_owned(), Value::from(part.html.as_str()))).collect();
    let name = run.dir.file_name().unwrap_or_default().to_string_lossy();
    let title = match (line, run.total_steps()) {
        (Some(line), Some(total)) => format!("{word} {}/{total} \u{b7} {name}", line.step),
        _ => format!("{word} \u{b7} {name}"),
    };
    let faults: Vec<&str> = standing
        .remarks
        .iter()
        .filter(|remark| remark.is_fault)
        .map(|remark| remark.text.as_str())
        .collect();
    json!({
        "title": title,
        "state": word,
        "sentence": standing.sentence(run),
        "step": line.map(|line| line.step),
        "total_steps": run.total_steps(),
        "seconds": run.seconds(),
        "seconds_left": line.and_then(|line| line.eta_s),
        "acceptance_length": standing.acceptance.as_ref().map(|it| it.tokens),
        "speed_up": standing.evaluation.as_ref().map(|it| it.tokens_per_second.speed_up),
        "faults": faults,
        "parts": html,
    })
}

/// Reads the run's files again until `stop` is set.
fn start_reader(
    dir: PathBuf,
    shown: Arc<RwLock<Shown>>,
    stop: Arc<AtomicBool>,
) -> Result<JoinHandle<()>, Error> {
    let work = move || {
        let (mut seen, mut read_at, mut pause) = (None, Instant::now(), LOOK);
        while !stop.load(Ordering::Relaxed) {
            thread::sleep(pause.min(LOOK));
            if read_at.elapsed() < pause {
                continue;
            }
            let found = signature(&dir);
            if seen.as_ref() == Some(&found) && read_at.elapsed() < REFRESH {
                continue;
            }
            let begun = Instant::now();
            match Shown::read(&dir) {
                Ok(new) => *shown.write().unwrap_or_else(PoisonError::into_inner) = new,
                Err(error) => tracing::warn!("showing the last state of the run: {error}"),
            }
            (seen, read_at, pause) =
                (Some(found), Instant::now(), LOOK.max(IDLE * begun.elapsed()));
        }
    };
    let spawned = thread::Builder::new().name("reader".into()).spawn(work);
    Ok(spawned.map_err(dflash_http::Error::Runtime)?)
}

/// Sizes and times of the files that change during a run.
fn signature(dir: &Path) -> Vec<Option<(u64, SystemTime)>> {
    let names = ["", MetricLine::FILE, ValidationLine::FILE, RunDir::PROVENANCE, RunDir::BEST];
    let of = |name: &str| {
        let path = if name.is_empty() { dir.to_owned() } else { dir.join(name) };
        let facts = path.metadata().ok()?;
        Some((facts.len(), facts.modified().ok()?))
    };
    names.into_iter().map(of).collect()
}

fn router(shown: &Arc<RwLock<Shown>>, own: Arc<Guard>) -> Router {
    Router::new()
        .route("/", get(page))
        .route("/state.json", get(state_json))
        .fallback(async |uri: Uri| {
            let message = format!("there is no {}; the page is at /", uri.path());
            Refusal::new(StatusCode::NOT_FOUND, message)
        })
        .method_not_allowed_fallback(async |method: Method| {
            let message = format!("{method} is not allowed: the page can only be read");
            Refusal::new(StatusCode::METHOD_NOT_ALLOWED, message)
        })
        .layer(from_fn(keep_apart))
        .layer(from_fn_with_state(own, guard))
        .layer(from_fn_with_state(AccessLog::Debug, watch))
        .with_state(Arc::clone(shown))
}

/// Whether another site's page makes the request; a link from there may be followed.
fn is_foreign(headers: &HeaderMap) -> bool {
    let said = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let site = said("sec-fetch-site");
    let is_elsewhere = site.is_some_and(|site| !["same-origin", "none"].contains(&site));
    is_elsewhere && said("sec-fetch-dest") != Some("document")
}

/// Refuses requests that other sites' pages make, and tells the browser to keep the page from them.
async fn keep_apart(request: Request, next: Next) -> Response {
    let mut response = if is_foreign(request.headers()) {
        let message = "pages of other sites may not read this one";
        Refusal::new(StatusCode::FORBIDDEN, message).into_response()
    } else {
        next.run(request).await
    };
    for (name, value) in [
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

async fn page(State(shown): State<Arc<RwLock<Shown>>>) -> Response {
    let shown = shown.read().unwrap_or_else(PoisonError::into_inner);
    let policy = format!("{}; frame-ancestors 'none'", shown.policy);
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8".to_owned()),
        (header::CONTENT_SECURITY_POLICY, policy),
    ];
    (headers, shown.page.clone()).into_response()
}

async fn state_json(State(shown): State<Arc<RwLock<Shown>>>, asked: HeaderMap) -> Response {
    let shown = shown.read().unwrap_or_else(PoisonError::into_inner);
    let tag = [(header::ETAG, shown.tag.clone())];
    let has_it = asked.get(header::IF_NONE_MATCH).is_some_and(|known| *known == *shown.tag);
    if has_it {
        return (StatusCode::NOT_MODIFIED, tag).into_response();
    }
    let kind = [(header::CONTENT_TYPE, "application/json")];
    (tag, kind, shown.state.clone()).into_response()
}

fn seconds_since_1970() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
