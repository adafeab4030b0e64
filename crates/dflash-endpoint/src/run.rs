//! All sets, ways and servers; a share of the questions for each of several workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use dflash_bench_sets::{PromptSet, Rows, SetRow, locate, open_turns};
use dflash_console::{Progress, Unit, say};
use dflash_evaluation::{
    Answer, DraftFacts, EvalReport, Facts, Measured, SetFacts, Way, Whole, check_outputs, write,
};
use dflash_hub::Hub;
use dflash_settings::{EvalSettings, NO_DRAFT, shown_endpoint};
use dflash_text::{Conversation, Message, Role, Row, parse_prompt_row};
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use crate::chat::{Manner, Reply, ask};
use crate::counters::Counters;
use crate::error::Error;
use crate::server::Server;

/// How often a run looks whether it should stop.
const STOP_POLL: Duration = Duration::from_millis(100);
/// What is asked before the clock runs: first requests allocate, and fill caches.
const WARM_UP: &str = "Count from one to ten.";
const WARM_UP_TOKENS: usize = 32;

/// How often a question is put to a server that fails, and the wait before the second time, which doubles.
const TRIES: u32 = 3;
const FIRST_WAIT: Duration = Duration::from_millis(500);
/// Questions in a row without an answer after which no more are put.
const GIVEN_UP: usize = 8;

/// A question and those that follow it.
#[derive(Debug, Clone)]
struct Dialogue {
    messages: Vec<Message>,
    later: Vec<Message>,
}

/// A set, and its questions.
struct Asked {
    set: PromptSet,
    rows: Rows,
    dialogues: Arc<Vec<Dialogue>>,
    skipped: usize,
    failed: usize,
}

/// Puts every question to the server of `--endpoint` and reports. Writes the files that are asked for.
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

/// Every mode of thinking, set in it, temperature and concurrency, on the plain server if there is one
/// and on the measured one.
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
             --enable-metrics): acceptance is what its replies tell, if they do",
            server.shown()
        ));
    }
    let mut results = Vec::new();
    for &thinking in &settings.thinking {
        for one in asked.iter_mut() {
            for &temperature in &settings.temperature {
                for &concurrency in &settings.concurrency {
                    let way = Way { temperature, thinking, concurrency };
                    results
                        .extend(both(settings, (&server, plain.as_ref()), (&mut *one, way)).await?);
                }
            }
        }
    }
    Ok((server, results))
}

async fn both(
    settings: &EvalSettings,
    (server, plain): (&Server, Option<&Server>),
    (asked, way): (&mut Asked, Way),
) -> Result<Vec<Measured>, Error> {
    let name = asked.set.name.clone();
    let mut results = Vec::new();
    if let Some(plain) = plain {
        let (answers, _) = answers(settings, plain, (&mut *asked, way)).await?;
        results.push(Measured::new((&name, way, NO_DRAFT), answers, None, None));
    }
    let (answers, kind) = answers(settings, server, (asked, way)).await?;
    let drafted = Measured::new((&name, way, &kind), answers, None, results.first());
    results.push(drafted);
    Ok(results)
}

/// The answers of one server to one set in one way, and the server's kind.
async fn answers(
    settings: &EvalSettings,
    server: &Server,
    (asked, way): (&mut Asked, Way),
) -> Result<((Vec<Answer>, Whole), String), Error> {
    let manner = Manner {
        max_tokens: settings.max_new_tokens,
        temperature: way.temperature,
        seed: settings.seed,
        thinking: way.thinking,
    };
    warm_up(server, manner, way.concurrency).await?;
    let title = format!("eval {} {way}", asked.set.name);
    let total = asked.dialogues.len() as u64;
    let work = Arc::new(Work {
        server: server.clone(),
        manner,
        alone: way.concurrency == 1 && server.counts,
        dialogues: Arc::clone(&asked.dialogues),
        next: AtomicUsize::new(0),
        skipped: AtomicUsize::new(0),
        failed: AtomicUsize::new(0),
        in_a_row: AtomicUsize::new(0),
        uncounted: AtomicUsize::new(0),
        last_fault: Mutex::default(),
        requests: AtomicUsize::new(0),
        made: Mutex::new((Vec::new(), Progress::new(title, Unit::Items, total))),
    });
    let before = if server.counts { server.settled().await.ok() } else { None };
    let began = Instant::now();
    let mut workers = JoinSet::new();
    for _ in 0..way.concurrency.min(work.dialogues.len()) {
        let work = Arc::clone(&work);
        workers.spawn(async move { work.run().await });
    }
    while let Some(ended) = workers.join_next().await {
        ended.expect("a worker does not panic")?;
    }
    let seconds = began.elapsed().as_secs_f64();
    let seconds = (way.concurrency > 1).then_some(seconds);
    let mut whole = Whole { seconds, ..Whole::default() };
    if let Some((before, after)) = before.zip(server.settled().await.ok()) {
        let counted = after.since(&before);
        if counted.is_none() || work.uncounted.load(Ordering::Relaxed) > 0 {
            say(format!(
                "the counters of {} started anew, or could not be read, in between: acceptance is of the \
                 other answers",
                server.shown()
            ));
        }
        whole.verification = counted.filter(|counted| way.concurrency > 1 && counted.steps > 0);
        let served = after.requests.zip(before.requests).map(|(after, before)| after - before);
        let own = work.requests.load(Ordering::Relaxed);
        if let Some(served) = served.filter(|&served| served as usize > own) {
            say(format!(
                "{} served {served} requests while {own} were asked here: its counters hold those \
                 of others too",
                server.shown()
            ));
        }
    }
    asked.skipped = work.skipped.load(Ordering::Relaxed);
    let mut answers = std::mem::take(&mut work.made.lock().await.0);
    let failed = work.failed.load(Ordering::Relaxed);
    asked.failed += failed;
    if let Some(fault) = work.last_fault.lock().await.take() {
        if answers.is_empty() {
            return Err(fault);
        }
        say(format!("{failed} rows of {} were not answered to their end: {fault}", asked.set.name));
    }
    if answers.is_empty() {
        return Err(Error::NoRoom { set: asked.set.name.clone() });
    }
    answers.sort_by_key(|answer| (answer.row, answer.turn));
    Ok(((answers, whole), server.kind.clone()))
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

/// What all workers share.
struct Work {
    server: Server,
    manner: Manner,
    /// Whether counters can be read after each answer.
    alone: bool,
    dialogues: Arc<Vec<Dialogue>>,
    next: AtomicUsize,
    skipped: AtomicUsize,
    /// Rows that were not answered to their end, those without an answer since the last one that was, and
    /// why the last one was not.
    failed: AtomicUsize,
    in_a_row: AtomicUsize,
    last_fault: Mutex<Option<Error>>,
    /// Answers whose steps the counters do not tell.
    uncounted: AtomicUsize,
    requests: AtomicUsize,
    made: Mutex<(Vec<Answer>, Progress)>,
}

impl Work {
    /// Takes one row after the other.
    async fn run(&self) -> Result<(), Error> {
        let mut counters = self.count().await;
        loop {
            let row = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(dialogue) = self.dialogues.get(row) else { return Ok(()) };
            if self.in_a_row.load(Ordering::Relaxed) >= GIVEN_UP {
                self.failed.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            match self.answer(row, dialogue.clone(), &mut counters).await {
                Err(fault) if is_the_servers(&fault) => {
                    self.failed.fetch_add(1, Ordering::Relaxed);
                    self.in_a_row.fetch_add(1, Ordering::Relaxed);
                    *self.last_fault.lock().await = Some(fault);
                    // What was counted for the answer that did not come is nobody's.
                    counters = self.count().await;
                }
                outcome => outcome?,
            }
            let mut made = self.made.lock().await;
            let done = self.next.load(Ordering::Relaxed).min(self.dialogues.len());
            let message = format!("{} answers", made.0.len());
            made.1.update(done as u64, message);
        }
    }

    /// The counters, where they are read after each answer.
    async fn count(&self) -> Option<Counters> {
        if self.alone { self.server.settled().await.ok() } else { None }
    }

    /// Asks, again where the server fails.
    async fn ask(
        &self,
        messages: &[Message],
        counters: &mut Option<Counters>,
    ) -> Result<Reply, Error> {
        let mut wait = FIRST_WAIT;
        for _ in 1..TRIES {
            match ask(&self.server, messages, self.manner).await {
                Err(fault) if is_the_servers(&fault) => {}
                outcome => return outcome,
            }
            tokio::time::sleep(wait).await;
            wait *= 2;
            *counters = self.count().await;
        }
        ask(&self.server, messages, self.manner).await
    }

    /// Answers a row, turn by turn; `counters` are those before it, and then those after it.
    async fn answer(
        &self,
        row: usize,
        mut dialogue: Dialogue,
        counters: &mut Option<Counters>,
    ) -> Result<(), Error> {
        let mut turns = dialogue.later.into_iter();
        for turn in 0.. {
            let reply = match self.ask(&dialogue.messages, counters).await {
                Ok(reply) => reply,
                Err(error) if is_too_long(&error) => {
                    self.skipped.fetch_add(usize::from(turn == 0), Ordering::Relaxed);
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
            self.requests.fetch_add(1, Ordering::Relaxed);
            self.in_a_row.store(0, Ordering::Relaxed);
            let mut counted = None;
            if self.alone {
                let after = self.count().await;
                counted = after.as_ref().zip(counters.as_ref()).and_then(|(a, b)| a.since(b));
                self.uncounted.fetch_add(usize::from(counted.is_none()), Ordering::Relaxed);
                *counters = after;
            }
            let text = reply.text.clone();
            self.made.lock().await.0.push(Answer {
                row,
                turn,
                prompt_tokens: reply.prompt_tokens,
                tokens: reply.tokens,
                first_token_s: reply.first_token_s,
                total_s: reply.total_s,
                verification: verification(&reply, counted),
            });
            let Some(next) = turns.next() else { return Ok(()) };
            dialogue.messages.push(Message::text(Role::Assistant, text));
            dialogue.messages.push(next);
        }
        Ok(())
    }
}

/// By the counters, or by the reply itself.
fn verification(
    reply: &Reply,
    counted: Option<dflash_evaluation::Verification>,
) -> Option<dflash_evaluation::Verification> {
    counted.or_else(|| reply.verification.clone()).filter(|counts| counts.steps > 0)
}

/// Whether asking again may help: the server, or the way to it, failed.
fn is_the_servers(error: &Error) -> bool {
    match error {
        Error::Refused { status, .. } => *status == 429 || *status >= 500,
        Error::Unreachable { .. } | Error::Strange { .. } | Error::Slow { .. } => true,
        _ => false,
    }
}

/// Whether a server says that prompt and answer exceed its context: vLLM, SGLang and llama.cpp do so
/// with this code and this word.
fn is_too_long(error: &Error) -> bool {
    matches!(error, Error::Refused { status: 400, text, .. } if text.contains("context"))
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
