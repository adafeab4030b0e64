//! Servers on a port of this machine that answer like vLLM, SGLang and llama.cpp, with a fixed
//! number of accepted proposals per step.
//!
//! The pages follow vLLM 0.32 (`v1/spec_decode/metrics.py`), SGLang
//! (`srt/observability/metrics_collector.py`) and llama.cpp (`tools/server/server-task.cpp`). Other
//! crates' tests include this file by its path.

#![allow(dead_code, reason = "each of them needs a part of it")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Proposals accepted in the steps of every answer; blocks of four slots.
pub(crate) const ACCEPTED: [usize; 4] = [3, 0, 1, 2];
/// The first token, plus the accepted tokens and one more for each step.
pub(crate) const TOKENS: usize = 1 + 4 + 6;
/// Delay between an answer and the counting of its last step: servers count after sending.
const COUNTED_AFTER: Duration = Duration::from_millis(20);

/// The server to imitate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Manners {
    Vllm,
    /// vLLM without a drafter.
    Plain,
    Sglang,
    LlamaCpp,
    /// Without `--metrics`.
    LlamaCppWithoutMetrics,
}

/// Counts and requests of a server.
#[derive(Debug, Default)]
struct State {
    answers: usize,
    counted: usize,
    at_once: usize,
    most_at_once: usize,
    bodies: Vec<Value>,
    arrivals: Vec<Instant>,
    /// How many times the question with this text gets a 500 instead of an answer.
    stumbles: Option<(&'static str, usize)>,
    /// How many times each of these paths gets a 500.
    failing_paths: Vec<(&'static str, usize)>,
    /// Number of answers after which every connection is closed unanswered.
    dies_after: Option<usize>,
    /// Number of answers after which the counters restart at 0.
    restarts_after: Option<usize>,
}

/// A running server; it serves until the test's process ends.
pub(crate) struct FakeServer {
    pub(crate) url: String,
    state: Arc<Mutex<State>>,
}

impl FakeServer {
    /// A server that takes `pace` per step.
    pub(crate) fn start(manners: Manners, pace: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let state = Arc::<Mutex<State>>::default();
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&shared);
                thread::spawn(move || serve(stream, (manners, pace), &state));
            }
        });
        Self { url, state }
    }

    /// Answers the question with `text` with a 500 this many times.
    pub(crate) fn stumble(&self, text: &'static str, times: usize) {
        self.state.lock().unwrap().stumbles = Some((text, times));
    }

    /// Answers requests of `path` with a 500 this many times.
    pub(crate) fn stumble_at(&self, path: &'static str, times: usize) {
        self.state.lock().unwrap().failing_paths.push((path, times));
    }

    /// Closes every connection unanswered after this many answers, including warm-up.
    pub(crate) fn die_after(&self, answers: usize) {
        self.state.lock().unwrap().dies_after = Some(answers);
    }

    /// Restarts the counters after this many answers, like a restarted server.
    pub(crate) fn restart_after(&self, answers: usize) {
        self.state.lock().unwrap().restarts_after = Some(answers);
    }

    /// The bodies of all questions, warm-up included.
    pub(crate) fn bodies(&self) -> Vec<Value> {
        self.state.lock().unwrap().bodies.clone()
    }

    /// When each of these questions came.
    pub(crate) fn arrivals(&self) -> Vec<Instant> {
        self.state.lock().unwrap().arrivals.clone()
    }

    /// How many questions were answered at the same time.
    pub(crate) fn most_at_once(&self) -> usize {
        self.state.lock().unwrap().most_at_once
    }

    /// Counts an answer to another client.
    pub(crate) fn serve_another(&self) {
        self.state.lock().unwrap().counted += 1;
    }
}

fn serve(mut stream: TcpStream, (manners, pace): (Manners, Duration), state: &Mutex<State>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let Some((path, body)) = read_request(&mut reader) else { return };
    if is_dead(state) {
        return;
    }
    if path_fails(&path, state) {
        return respond(&mut stream, 500, "{\"error\":{\"message\":\"oops\"}}");
    }
    match path.as_str() {
        "/v1/models" => {
            let owner = match manners {
                Manners::Vllm | Manners::Plain => "vllm",
                Manners::Sglang => "sglang",
                Manners::LlamaCpp | Manners::LlamaCppWithoutMetrics => "llamacpp",
            };
            let models = json!({"object": "list", "data": [{"id": "tiny", "owned_by": owner}]});
            respond(&mut stream, 200, &models.to_string());
        }
        "/metrics" if manners == Manners::LlamaCppWithoutMetrics => {
            respond(
                &mut stream,
                501,
                "{\"error\":{\"message\":\"This server does not support metrics\"}}",
            );
        }
        "/metrics" => {
            let counted = state.lock().unwrap().counted;
            respond(&mut stream, 200, &page(manners, counted));
        }
        "/v1/chat/completions" => {
            let body: Value = serde_json::from_slice(&body).unwrap();
            if body["messages"].to_string().contains("too long") {
                let text = "{\"error\":{\"message\":\"This model's maximum context length is 9\"}}";
                return respond(&mut stream, 400, text);
            }
            if body["messages"].to_string().contains("break off") {
                let head = "HTTP/1.1 200 x\r\nconnection: close\r\n\r\n";
                let _ = stream.write_all(head.as_bytes());
                return;
            }
            if stumbles(&body, state) {
                return respond(&mut stream, 500, "{\"error\":{\"message\":\"oops\"}}");
            }
            answer(&mut stream, (manners, pace), body, state);
        }
        _ => respond(&mut stream, 404, "{}"),
    }
}

fn is_dead(state: &Mutex<State>) -> bool {
    let state = state.lock().unwrap();
    state.dies_after.is_some_and(|most| state.answers >= most)
}

fn path_fails(path: &str, state: &Mutex<State>) -> bool {
    let mut state = state.lock().unwrap();
    let failing = state.failing_paths.iter_mut().find(|(failing, _)| *failing == path);
    let Some((_, times)) = failing.filter(|(_, times)| *times > 0) else { return false };
    *times -= 1;
    true
}

fn stumbles(body: &Value, state: &Mutex<State>) -> bool {
    let mut state = state.lock().unwrap();
    let Some((text, times)) = &mut state.stumbles else { return false };
    let is_it = *times > 0 && body["messages"].to_string().contains(*text);
    *times -= usize::from(is_it);
    is_it
}

fn answer(
    stream: &mut TcpStream,
    (manners, pace): (Manners, Duration),
    body: Value,
    state: &Mutex<State>,
) {
    {
        let mut state = state.lock().unwrap();
        state.bodies.push(body);
        state.arrivals.push(Instant::now());
        state.answers += 1;
        state.at_once += 1;
        state.most_at_once = state.most_at_once.max(state.at_once);
    }
    let head = "HTTP/1.1 200 x\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    let mut send =
        |event: Value| stream.write_all(format!("data: {event}\n\n").as_bytes()).unwrap();
    let piece = |text: &str| json!({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": null}]});
    thread::sleep(pace);
    send(piece("first "));
    let steps = if manners == Manners::Plain { TOKENS - 1 } else { ACCEPTED.len() };
    for _ in 0..steps {
        thread::sleep(pace);
        send(piece("more "));
    }
    let mut last = json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]});
    if matches!(manners, Manners::LlamaCpp | Manners::LlamaCppWithoutMetrics) {
        last["timings"] = json!({"cache_n": 0, "prompt_n": 7, "prompt_ms": 1.0, "predicted_n": TOKENS,
            "predicted_ms": 4.0, "draft_n": 12, "draft_n_accepted": 6});
    }
    send(last);
    let usage =
        json!({"prompt_tokens": 7, "completion_tokens": TOKENS, "total_tokens": 7 + TOKENS});
    send(json!({"choices": [], "usage": usage}));
    let _ = stream.write_all(b"data: [DONE]\n\n");
    let _ = stream.shutdown(std::net::Shutdown::Both);
    state.lock().unwrap().at_once -= 1;
    thread::sleep(COUNTED_AFTER);
    let mut state = state.lock().unwrap();
    state.counted += 1;
    if state.restarts_after == Some(state.counted) {
        (state.counted, state.restarts_after) = (0, None);
    }
}

/// The Prometheus page after this many answers.
fn page(manners: Manners, answers: usize) -> String {
    let steps = answers * ACCEPTED.len();
    let accepted: usize = answers * ACCEPTED.iter().sum::<usize>();
    let by_slot = (0..3).map(|slot| {
        let count = answers * ACCEPTED.iter().filter(|&&accepted| accepted > slot).count();
        format!(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine=\"0\",model_name=\"tiny\",\
             position=\"{slot}\"}} {count}.0\n"
        )
    });
    let finished = format!(
        "# TYPE vllm:request_success_total counter\n\
         vllm:request_success_total{{engine=\"0\",finished_reason=\"length\"}} {answers}.0\n"
    );
    match manners {
        Manners::Plain => finished,
        Manners::Vllm => {
            finished
                + &format!(
                    "vllm:spec_decode_num_drafts_total{{engine=\"0\",model_name=\"tiny\"}} {steps}.0\n\
                     vllm:spec_decode_num_accepted_tokens_total{{engine=\"0\"}} {accepted}.0\n"
                )
                + &by_slot.collect::<String>()
        }
        Manners::Sglang => format!(
            "sglang:generation_tokens_total{{model_name=\"tiny\"}} {}.0\n\
             sglang:num_requests_total{{model_name=\"tiny\"}} {answers}.0\n\
             sglang:spec_verify_calls_total{{model_name=\"tiny\"}} {steps}.0\n",
            answers * TOKENS
        ),
        Manners::LlamaCpp | Manners::LlamaCppWithoutMetrics => format!(
            "# TYPE llamacpp:spec_decode_num_drafts_total counter\n\
             llamacpp:spec_decode_num_drafts_total {steps}\n\
             llamacpp:spec_decode_num_accepted_tokens_total {accepted}\n"
        ),
    }
}

fn read_request(reader: &mut BufReader<TcpStream>) -> Option<(String, Vec<u8>)> {
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let path = line.split(' ').nth(1)?.to_owned();
    let mut length = 0;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        let header = header.trim().to_lowercase();
        if header.is_empty() {
            break;
        }
        if let Some(value) = header.strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((path, body))
}

fn respond(stream: &mut TcpStream, status: u16, body: &str) {
    let head = format!(
        "HTTP/1.1 {status} x\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    let _ = stream.write_all((head + body).as_bytes());
}
