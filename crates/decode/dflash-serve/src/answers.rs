//! The answers of a request as they are generated, returned whole or streamed.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use dflash_http::{Client, Note};
use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::queue::{Dropped, Event};
use crate::refusal::Refusal;
use crate::reply::{Choice, Envelope, Usage};

/// What the access log records about a request.
pub(crate) struct Noted {
    note: Note,
    since: Instant,
    first: Option<Duration>,
}

impl Noted {
    pub(crate) fn new(note: Note, since: Instant) -> Self {
        Self { note, since, first: None }
    }

    fn set(&mut self, usage: Usage) {
        let first = self.first.map_or_else(
            || "no token".into(),
            |first| format!("first token after {:.1} ms", first.as_secs_f64() * 1e3),
        );
        let Usage { prompt, cached, completion } = usage;
        let line = format!(
            "{prompt} prompt tokens ({cached} cached), {completion} answer tokens, {first}"
        );
        self.note.set(line);
    }
}

/// The answers of a request, in progress.
pub(crate) struct Answers {
    envelope: Envelope,
    events: UnboundedReceiver<Result<Event, Dropped>>,
    choices: Vec<Choice>,
    /// Answers per prompt.
    n: usize,
    usage: Usage,
    noted: Noted,
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.noted.set(self.usage);
    }
}

impl Answers {
    pub(crate) fn new(
        envelope: Envelope,
        events: UnboundedReceiver<Result<Event, Dropped>>,
        noted: Noted,
        choices: Vec<Choice>,
        n: usize,
        usage: Usage,
    ) -> Self {
        Self { envelope, events, choices, n, usage, noted }
    }

    /// The next event; `None` when all choices have ended.
    async fn next(&mut self) -> Result<Option<Event>, Refusal> {
        if self.choices.iter().all(|choice| choice.finish.is_some()) {
            return Ok(None);
        }
        let event = self.events.recv().await.ok_or(Refusal::ShuttingDown)??;
        self.usage.completion += event.count;
        self.noted.first.get_or_insert_with(|| self.noted.since.elapsed());
        // Once per prompt, with its first piece.
        let choice = &mut self.choices[event.index];
        if event.index % self.n == 0 && choice.is_untouched() {
            self.usage.cached += event.cached_tokens;
        }
        choice.touch();
        Ok(Some(event))
    }

    pub(crate) async fn whole(mut self) -> Result<Vec<u8>, Refusal> {
        let keeps_tokens = self.envelope.logprobs;
        while let Some(event) = self.next().await? {
            self.choices[event.index].add(event, keeps_tokens);
        }
        Ok(self.envelope.whole(&self.choices, self.usage))
    }

    /// Server-sent events.
    pub(crate) fn stream(self, include_usage: bool, client: Client) -> Response {
        let pieces = VecDeque::new();
        let has_asked = false;
        let streamed =
            Streamed { answers: self, include_usage, client, has_asked, pieces, ended: false };
        let lines = futures::stream::unfold(streamed, async |mut streamed| {
            let line = streamed.next_or_question().await?;
            Some((Ok::<_, Infallible>(line), streamed))
        });
        let headers =
            [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
        (headers, Body::from_stream(lines)).into_response()
    }
}

struct Streamed {
    answers: Answers,
    include_usage: bool,
    client: Client,
    /// Whether the server has probed a client that closed its sending side.
    has_asked: bool,
    /// Pieces to send before the next event.
    pieces: VecDeque<String>,
    ended: bool,
}

impl Streamed {
    /// The next event. If the client may have left, a comment, which clients ignore, is sent first
    /// to find out.
    async fn next_or_question(&mut self) -> Option<String> {
        let client = self.client.clone();
        let has_asked = self.has_asked;
        tokio::select! {
            biased;
            line = self.next() => line.map(|line| format!("data: {line}\n\n")),
            () = client.half_closed(), if !has_asked => {
                self.has_asked = true;
                Some(": still here?\n\n".into())
            }
        }
    }

    async fn next(&mut self) -> Option<String> {
        while self.pieces.is_empty() && !self.ended {
            let answers = &mut self.answers;
            match answers.next().await {
                Ok(Some(event)) => {
                    let usage = self.include_usage.then_some(Value::Null);
                    let choice = &mut answers.choices[event.index];
                    let chunks = answers.envelope.chunks(choice, &event, usage.as_ref());
                    self.pieces.extend(chunks.iter().map(Value::to_string));
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
