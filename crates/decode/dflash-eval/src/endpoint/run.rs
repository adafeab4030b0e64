//! Runs all sets, modes and servers, with several workers per server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::sets::{PromptSet, SetRow, SetRows, locate, open_turns};
use crate::{
    DraftFacts, EvalMode, EvalReport, Facts, Measured, SetFacts, check_outputs, turns, write,
};
use dflash_chat::{Conversation, Row, parse_prompt_row};
use dflash_hub::Hub;
use dflash_io::{Progress, Unit, say};
use dflash_settings::{EvalSettings, NO_DRAFT, shown_endpoint};
use tokio::sync::Mutex;

use super::chat::Manner;
use super::round::{Dialogue, Outcome, Round, Shown};
use super::server::Server;
use crate::Error;

/// How often a run checks the stop flag.
const STOP_POLL: Duration = Duration::from_millis(100);

/// A set, and its questions.
struct Asked {
    set: PromptSet,
    rows: SetRows,
    dialogues: Arc<Vec<Dialogue>>,
    skipped: usize,
    failed: usize,
}

/// Sends every question to the server of `--endpoint`, makes the report, and writes the requested
/// files.
///
/// # Errors
/// Prompts that cannot be read, a server that answers nothing at all; [`Error::Interrupted`].
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
    // The report is written even if the baseline has nothing in common with it.
    let compared = settings.baseline.as_ref().map_or(Ok(()), |baseline| report.compare(baseline));
    write(&report, settings)?;
    compared?;
    Ok(report)
}

fn read(settings: &EvalSettings, stop: &AtomicBool) -> Result<Vec<Asked>, Error> {
    let hub = Hub::from_env();
    let mut asked = Vec::new();
    for set in locate(&settings.prompts)? {
        let rows = set.rows(&hub, settings.limit, stop)?;
        rows.say_unread_columns(&set.title);
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
/// one and on the measured one. What was not answered is part of the results.
///
/// # Errors
/// A server that cannot be reached, or answers nothing at all.
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
    let (mut results, mut last_fault) = (Vec::new(), None);
    for &thinking in &settings.thinking {
        for one in asked.iter_mut() {
            for &temperature in &settings.temperature {
                for &concurrency in &settings.concurrency {
                    let mode = EvalMode { temperature, thinking, concurrency };
                    let (measured, fault) =
                        both(settings, &server, plain.as_ref(), &mut *one, mode).await;
                    results.extend(measured);
                    last_fault = fault.or(last_fault);
                }
            }
        }
    }
    let is_answered = |measured: &Measured| measured.responses > 0;
    match (results.iter().any(is_answered), last_fault) {
        (true, _) => Ok((server, results)),
        (false, Some(fault)) => Err(fault),
        (false, None) => {
            let sets: Vec<&str> = asked.iter().map(|one| one.set.name.as_str()).collect();
            Err(Error::NoRoom { set: sets.join(", ") })
        }
    }
}

/// The plain server, if there is one, and the measured one, part by part in turns, so that warm-up
/// or other load slows both alike; and why a row failed, if one did.
async fn both(
    settings: &EvalSettings,
    server: &Server,
    plain: Option<&Server>,
    asked: &mut Asked,
    mode: EvalMode,
) -> (Vec<Measured>, Option<Error>) {
    let manner = Manner {
        max_tokens: settings.max_new_tokens,
        temperature: mode.temperature,
        seed: settings.seed,
        thinking: mode.thinking,
    };
    let servers: Vec<&Server> = plain.into_iter().chain([server]).collect();
    let title = format!("eval {} {mode}", asked.set.name);
    let total = asked.dialogues.len() * servers.len();
    let shown = Arc::new(Mutex::new(Shown::new(Progress::new(title, Unit::Items, total as u64))));
    let mut rounds = Vec::new();
    for &server in &servers {
        let (dialogues, shown) = (Arc::clone(&asked.dialogues), Arc::clone(&shown));
        let round = Round::new(server, manner, mode.concurrency, dialogues, shown);
        round.warm_up().await;
        rounds.push(round);
    }
    let rows = asked.dialogues.len();
    // A single server takes no turns, and is kept busy from the first to the last row.
    let parts = match servers.len() {
        1 => std::iter::once(0..rows).collect(),
        _ => turns::parts(rows, mode.concurrency),
    };
    for (number, rows) in parts.into_iter().enumerate() {
        for at in turns::order(number, servers.len(), 0) {
            rounds[at].answer(rows.clone()).await;
        }
    }
    let name = asked.set.name.clone();
    let drafts = plain.map(|_| NO_DRAFT).into_iter().chain([server.kind.as_str()]);
    let (mut results, mut last_fault) = (Vec::<Measured>::new(), None);
    for (round, draft) in rounds.into_iter().zip(drafts) {
        let Outcome { answers, whole, skipped, failed, fault } = round.finish(&name).await;
        asked.skipped = asked.skipped.max(skipped);
        asked.failed += failed;
        last_fault = fault.or(last_fault);
        let measured = Measured::new(&name, mode, draft, answers, whole, None, results.first());
        results.push(Measured { failed, ..measured });
    }
    (results, last_fault)
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
