//! Runs all sets, modes and servers, with several workers per server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::sets::{PromptSet, Rows, SetRow, locate, open_turns};
use crate::{DraftFacts, EvalReport, Facts, Measured, SetFacts, Way, check_outputs, turns, write};
use dflash_chat::{Conversation, Message, Role, Row, parse_prompt_row};
use dflash_hub::Hub;
use dflash_io::{Progress, Unit, say};
use dflash_settings::{EvalSettings, NO_DRAFT, shown_endpoint};
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use super::chat::{Manner, ask};
use super::round::{Dialogue, Round, Shown};
use super::server::Server;
use crate::Error;

/// How often a run checks the stop flag.
const STOP_POLL: Duration = Duration::from_millis(100);
/// Sent before the measurement: first requests allocate memory and fill caches.
const WARM_UP: &str = "Count from one to ten.";
const WARM_UP_TOKENS: usize = 32;

/// A set, and its questions.
struct Asked {
    set: PromptSet,
    rows: Rows,
    dialogues: Arc<Vec<Dialogue>>,
    skipped: usize,
    failed: usize,
}

/// Sends every question to the server of `--endpoint`, makes the report, and writes the requested
/// files.
///
/// # Errors
/// Prompts that cannot be read, a server that does not answer; [`Error::Interrupted`].
pub fn evaluate(settings: &EvalSettings, stop: &AtomicBool) -> Result<EvalReport, Error> {
    check_outputs(settings)?;
    let mut asked = read(settings, stop)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(Error::Runtime)?;
    let outcome = runtime.block_on(async {
        let stopped = async {
            while !stop.load(Ordering::Relaxed) {
                tokio::time::sleep(STOP_POLL).await;
            }
        };
        tokio::select! {
            done = measure(settings, &mut asked) => done,
            () = stopped => Err(Error::Interrupted),
        }
    });
    runtime.shutdown_background();
    let (server, results) = outcome?;
    let mut report = EvalReport::new(facts(settings, &server, &asked), results);
    if let Some(baseline) = &settings.baseline {
        report.compare(baseline)?;
    }
    write(&report, settings)?;
    Ok(report)
}

fn read(settings: &EvalSettings, stop: &AtomicBool) -> Result<Vec<Asked>, Error> {
    let hub = Hub::from_env();
    let mut asked = Vec::new();
    for set in locate(&settings.prompts)? {
        let rows = set.rows(&hub, settings.limit, stop)?;
        let dialogue = |row: &SetRow| Dialogue::read(row, settings.first_turn);
        let dialogues = rows.rows.iter().map(dialogue).collect::<Result<Vec<_>, _>>()?;
        if dialogues.is_empty() {
            return Err(Error::NoRoom { set: set.name });
        }
        asked.push(Asked { set, rows, dialogues: Arc::new(dialogues), skipped: 0, failed: 0 });
    }
    Ok(asked)
}

impl Dialogue {
    fn read(row: &SetRow, first_turn: bool) -> Result<Self, Error> {
        let (path, line) = (row.path.clone(), row.line);
        let parsed = parse_prompt_row(&row.row).map_err(|source| Error::Row {
            path: path.clone(),
            line,
            source,
        })?;
        let Row::Conversation(Conversation { mut messages, .. }) = parsed else {
            return Err(Error::TokenIds { path, line });
        };
        let (first, end) = open_turns(&messages).ok_or(Error::NoQuestion { path, line })?;
        let later = messages.drain(first..).take(end - first).collect();
        Ok(Self { messages, later: if first_turn { Vec::new() } else { later } })
    }
}

/// Every combination of thinking, set, temperature and concurrency, on the plain server if there is
/// one and on the measured one.
async fn measure(
    settings: &EvalSettings,
    asked: &mut [Asked],
) -> Result<(Server, Vec<Measured>), Error> {
    let model = settings.endpoint_model.as_deref();
    let url = settings.endpoint.as_deref().unwrap_or_default();
    let server = Server::connect(url, model, settings.request_timeout).await?;
    let plain = match &settings.plain_endpoint {
        Some(url) => Some(Server::connect(url, model, settings.request_timeout).await?),
        None => None,
    };
    if !server.counts {
        say(format!(
            "{} counts no speculative decoding on /metrics (llama.cpp needs --metrics, SGLang \
             --enable-metrics): acceptance is what its replies report, if anything",
            server.shown()
        ));
    }
    let mut results = Vec::new();
    for &thinking in &settings.thinking {
        for one in asked.iter_mut() {
            for &temperature in &settings.temperature {
                for &concurrency in &settings.concurrency {
                    let way = Way { temperature, thinking, concurrency };
                    results.extend(both(settings, &server, plain.as_ref(), &mut *one, way).await?);
                }
            }
        }
    }
    Ok((server, results))
}

/// The plain server, if there is one, and the measured one, part by part in turns, so that warm-up
/// or other load slows both alike.
async fn both(
    settings: &EvalSettings,
    server: &Server,
    plain: Option<&Server>,
    asked: &mut Asked,
    way: Way,
) -> Result<Vec<Measured>, Error> {
    let manner = Manner {
        max_tokens: settings.max_new_tokens,
        temperature: way.temperature,
        seed: settings.seed,
        thinking: way.thinking,
    };
    let servers: Vec<&Server> = plain.into_iter().chain([server]).collect();
    let title = format!("eval {} {way}", asked.set.name);
    let total = asked.dialogues.len() * servers.len();
    let shown = Arc::new(Mutex::new(Shown::new(Progress::new(title, Unit::Items, total as u64))));
    let mut rounds = Vec::new();
    for &server in &servers {
        warm_up(server, manner, way.concurrency).await?;
        let (dialogues, shown) = (Arc::clone(&asked.dialogues), Arc::clone(&shown));
        rounds.push(Round::new(server, manner, way.concurrency, dialogues, shown));
    }
    let rows = asked.dialogues.len();
    // A single server takes no turns, and is kept busy from the first to the last row.
    let parts = match servers.len() {
        1 => std::iter::once(0..rows).collect(),
        _ => turns::parts(rows, way.concurrency),
    };
    for (number, rows) in parts.into_iter().enumerate() {
        for at in turns::order(number, servers.len(), 0) {
            rounds[at].answer(rows.clone()).await?;
        }
    }
    let name = asked.set.name.clone();
    let drafts = plain.map(|_| NO_DRAFT).into_iter().chain([server.kind.as_str()]);
    let mut results: Vec<Measured> = Vec::new();
    for (round, draft) in rounds.into_iter().zip(drafts) {
        let ((answers, whole), left_out) = round.finish(&name).await?;
        asked.skipped = left_out.skipped;
        asked.failed += left_out.failed;
        results.push(Measured::new(&name, way, draft, answers, whole, None, results.first()));
    }
    Ok(results)
}

async fn warm_up(server: &Server, manner: Manner, concurrency: usize) -> Result<(), Error> {
    let manner = Manner { max_tokens: WARM_UP_TOKENS.min(manner.max_tokens), ..manner };
    let mut requests = JoinSet::new();
    for _ in 0..concurrency {
        let server = server.clone();
        requests.spawn(async move {
            ask(&server, &[Message::text(Role::User, WARM_UP)], manner).await.map(|_| ())
        });
    }
    while let Some(ended) = requests.join_next().await {
        ended.expect("a request does not panic")?;
    }
    Ok(())
}

fn facts(settings: &EvalSettings, server: &Server, asked: &[Asked]) -> Facts {
    let plain = settings.plain_endpoint.as_deref().map(shown_endpoint);
    let plain = plain.map_or_else(String::new, |url| format!(", plain decoding at {url}"));
    Facts {
        target: server.model.clone(),
        endpoint: Some(format!("{} ({}){plain}", server.shown(), server.kind)),
        drafts: vec![DraftFacts {
            label: server.kind.clone(),
            name: format!("whatever {} uses", server.shown()),
            ..DraftFacts::default()
        }],
        sets: asked
            .iter()
            .map(|asked| SetFacts {
                name: asked.set.name.clone(),
                title: asked.set.title.clone(),
                source: asked.rows.source.clone(),
                revision: asked.rows.revision.clone(),
                rows: asked.rows.rows.len(),
                skipped: asked.skipped,
                failed: asked.failed,
            })
            .collect(),
        max_new_tokens: settings.max_new_tokens,
        seed: settings.seed,
        ..Facts::default()
    }
}
