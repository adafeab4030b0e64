//! Answers in OpenAI's format, whole or as stream chunks.

use std::cell::RefCell;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use dflash_chat::ChatTokenizer;
use dflash_decode::{Logprob, NewToken};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use crate::calls::{Call, CallReader, Piece};
use crate::queue::{Event, FinishReason};

/// The endpoint of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Chat,
    Completion,
}

/// Fields that all chunks of a reply share.
#[derive(Debug)]
pub(crate) struct Envelope {
    pub(crate) kind: Kind,
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<ChatTokenizer>,
    pub(crate) logprobs: bool,
}

/// Token counts of a request.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Usage {
    pub(crate) prompt: usize,
    pub(crate) cached: usize,
    pub(crate) completion: usize,
}

/// A choice while its pieces are collected.
#[derive(Debug, Default)]
pub(crate) struct Choice {
    text: String,
    /// Set if its text may contain tool calls.
    reader: Option<CallReader>,
    calls: Vec<Call>,
    tokens: Vec<NewToken>,
    pub(crate) finish: Option<FinishReason>,
    /// Characters of the tokens so far, for offsets.
    offset: usize,
    /// Whether its first chunk has been sent.
    begun: bool,
    touched: bool,
}

impl Choice {
    /// With tool calls if there is a `reader`.
    pub(crate) fn reading(reader: Option<CallReader>) -> Self {
        Self { reader, ..Self::default() }
    }

    /// The stream chunks of `pieces`: calls with their numbers, and text unless it is empty.
    fn deltas(&mut self, pieces: Vec<Piece>) -> Vec<Value> {
        let mut deltas = Vec::new();
        for piece in pieces {
            match piece {
                Piece::Text(text) if text.is_empty() => {}
                Piece::Text(text) => deltas.push(json!({"content": text})),
                Piece::Call(call) => {
                    let calls = call.deltas(self.calls.len());
                    deltas.extend(calls.map(|call| json!({"tool_calls": [call]})));
                    self.calls.push(call);
                }
            }
        }
        deltas
    }

    /// The text and calls that an event adds, and the finish reason if the choice ends with it.
    fn read(&mut self, event: &Event) -> (Vec<Piece>, Option<FinishReason>) {
        let Some(reader) = &mut self.reader else {
            return (vec![Piece::Text(event.text.clone())], event.finish);
        };
        let pieces = reader.push(&event.text, event.finish.is_some());
        let finish = match event.finish {
            Some(FinishReason::Stop) if reader.has_calls() => Some(FinishReason::ToolCalls),
            finish => finish,
        };
        (pieces, finish)
    }

    /// Whether nothing has been added yet.
    pub(crate) fn is_untouched(&self) -> bool {
        !self.touched
    }

    pub(crate) fn touch(&mut self) {
        self.touched = true;
    }

    /// Adds an event, with its tokens if their log-probabilities are returned.
    pub(crate) fn add(&mut self, event: Event, keeps_tokens: bool) {
        let (pieces, finish) = self.read(&event);
        for piece in pieces {
            match piece {
                Piece::Text(text) => self.text += &text,
                Piece::Call(call) => self.calls.push(call),
            }
        }
        if keeps_tokens {
            self.tokens.extend(event.tokens);
        }
        self.finish = finish;
    }
}

/// An unpredictable number: the standard library seeds its hashers from the system.
pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl Usage {
    pub(crate) fn json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        })
    }
}

impl Envelope {
    pub(crate) fn new(
        kind: Kind,
        model: &str,
        tokenizer: &Arc<ChatTokenizer>,
        logprobs: bool,
    ) -> Self {
        let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
        Self {
            kind,
            id: format!("{prefix}-{:016x}", random()),
            created: unix_seconds(),
            model: model.to_owned(),
            tokenizer: Arc::clone(tokenizer),
            logprobs,
        }
    }

    fn object(&self, object: &str, choices: Vec<Value>, usage: Option<Value>) -> Value {
        let mut reply = json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        });
        if let Some(usage) = usage {
            reply["usage"] = usage;
        }
        reply
    }

    /// The whole reply as JSON.
    pub(crate) fn whole(&self, choices: &[Choice], usage: Usage) -> Vec<u8> {
        let choices = choices.iter().enumerate().map(|(index, choice)| {
            let finish = choice.finish.map(FinishReason::name);
            let fields = match self.kind {
                Kind::Chat => json!({
                    "index": index,
                    "message": message(choice),
                    "logprobs": null,
                    "finish_reason": finish,
                }),
                Kind::Completion => json!({
                    "index": index, "text": choice.text, "logprobs": null, "finish_reason": finish,
                }),
            };
            let logprobs = Logprobs { envelope: self, tokens: &choice.tokens, offset: 0 };
            With { fields, key: "logprobs", value: logprobs }
        });
        let object = match self.kind {
            Kind::Chat => "chat.completion",
            Kind::Completion => "text_completion",
        };
        let fields = self.object(object, Vec::new(), Some(usage.json()));
        let reply = With { fields, key: "choices", value: choices.collect::<Vec<_>>() };
        serde_json::to_vec(&reply).expect("its keys are strings")
    }

    fn chunk_object(&self) -> &'static str {
        match self.kind {
            Kind::Chat => "chat.completion.chunk",
            Kind::Completion => "text_completion",
        }
    }

    /// The chunks of an event of a choice; `usage` is null if it comes at the end. None if the step
    /// produced no text yet.
    pub(crate) fn chunks(
        &self,
        choice: &mut Choice,
        event: &Event,
        usage: Option<&Value>,
    ) -> Vec<Value> {
        let (pieces, finish) = choice.read(event);
        let mut deltas = choice.deltas(pieces);
        let has_tokens = self.logprobs && !event.tokens.is_empty();
        if deltas.is_empty() {
            let has_block = event.block.is_some();
            if !has_tokens && !has_block && finish.is_none() && choice.begun {
                return Vec::new();
            }
            deltas.push(json!({"content": ""}));
        }
        let (index, last) = (event.index, deltas.len() - 1);
        let mut block = event.block.as_ref();
        let mut logprobs = self.logprobs(&event.tokens, choice.offset);
        let chunk = |(number, mut delta): (usize, Value)| {
            let mut piece = json!({"index": index});
            match self.kind {
                Kind::Chat => {
                    if !std::mem::replace(&mut choice.begun, true) {
                        delta["role"] = "assistant".into();
                    }
                    piece["delta"] = delta;
                }
                Kind::Completion => piece["text"] = delta["content"].take(),
            }
            piece["logprobs"] = logprobs.take();
            if let Some(block) = block.take() {
                piece["block"] = block.json();
            }
            let finish = finish.filter(|_| number == last);
            piece["finish_reason"] = finish.map(FinishReason::name).into();
            self.object(self.chunk_object(), vec![piece], usage.cloned())
        };
        let chunks = deltas.into_iter().enumerate().map(chunk).collect();
        choice.begun = true;
        choice.finish = finish;
        if self.logprobs {
            let characters = |token: &NewToken| self.text(token.id).chars().count();
            choice.offset += event.tokens.iter().map(characters).sum::<usize>();
        }
        chunks
    }

    /// The last chunk, which has the usage.
    pub(crate) fn usage_chunk(&self, usage: Usage) -> Value {
        self.object(self.chunk_object(), Vec::new(), Some(usage.json()))
    }

    fn text(&self, id: i64) -> String {
        self.tokenizer.decode(&[id], false).unwrap_or_default()
    }

    /// Null if none were requested.
    fn logprobs(&self, tokens: &[NewToken], offset: usize) -> Value {
        let logprobs = Logprobs { envelope: self, tokens, offset };
        serde_json::to_value(logprobs).expect("its keys are strings")
    }

    /// OpenAI returns a token's bytes because its text alone may not be valid UTF-8.
    fn entry(&self, id: i64, share: f64) -> Entry {
        let text = self.text(id);
        let bytes = match text.contains(char::REPLACEMENT_CHARACTER) {
            true => self.bytes_of_part(id, &text),
            false => Some(text.clone().into_bytes()),
        };
        Entry { token: text, logprob: share, bytes, top_logprobs: None }
    }

    /// The bytes of a token that is part of a character, from its spelling in the vocabulary.
    fn bytes_of_part(&self, id: i64, text: &str) -> Option<Vec<u8>> {
        let bytes = self.tokenizer.token_bytes(u32::try_from(id).ok()?)?;
        // Whatever the spelling: a reader must get the same text from the bytes.
        (String::from_utf8_lossy(&bytes) == text).then_some(bytes)
    }
}

/// A whole answer; an answer of calls only has no content.
fn message(choice: &Choice) -> Value {
    let mut message = json!({"role": "assistant", "content": choice.text, "refusal": null});
    if !choice.calls.is_empty() {
        message["tool_calls"] = choice.calls.iter().map(Call::json).collect();
        if choice.text.is_empty() {
            message["content"] = Value::Null;
        }
    }
    message
}

/// A JSON object with one field serialized on the fly: a long list never becomes a tree of JSON
/// values, which would take five times the memory.
struct With<T> {
    fields: Value,
    key: &'static str,
    value: T,
}

impl<T: Serialize> Serialize for With<T> {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        let Self { fields, key, value } = self;
        let mut map = out.serialize_map(None)?;
        for (name, field) in fields.as_object().into_iter().flatten() {
            if name == key {
                map.serialize_entry(name, value)?;
            } else {
                map.serialize_entry(name, field)?;
            }
        }
        map.end()
    }
}

/// A token with its log-probability, and alternatives with theirs.
#[derive(Serialize)]
struct Entry {
    token: String,
    logprob: f64,
    bytes: Option<Vec<u8>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<Self>>,
}

/// The log-probabilities of tokens, computed while they are written.
struct Logprobs<'a> {
    envelope: &'a Envelope,
    tokens: &'a [NewToken],
    /// Characters before them.
    offset: usize,
}

impl<'a> Logprobs<'a> {
    /// A prompt's first token has no log-probability.
    fn each(&self) -> impl Iterator<Item = (i64, Option<&'a Logprob>)> {
        self.tokens.iter().map(|token| (token.id, token.logprob.as_ref()))
    }
}

impl Serialize for Logprobs<'_> {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        let envelope = self.envelope;
        if !envelope.logprobs {
            return out.serialize_none();
        }
        let mut map = out.serialize_map(None)?;
        match envelope.kind {
            Kind::Chat => {
                let known = self.each().filter_map(|(id, logprob)| Some((id, logprob?)));
                let content = known.map(|(id, logprob)| {
                    let top = logprob.top.iter().map(|&(id, share)| envelope.entry(id, share));
                    Entry {
                        top_logprobs: Some(top.collect()),
                        ..envelope.entry(id, logprob.chosen)
                    }
                });
                map.serialize_entry("content", &Each::new(content))?;
                map.serialize_entry("refusal", &())?;
            }
            Kind::Completion => {
                let texts = || self.each().map(|(id, _)| envelope.text(id));
                map.serialize_entry("tokens", &Each::new(texts()))?;
                let shares = self.each().map(|(_, logprob)| Some(logprob?.chosen));
                map.serialize_entry("token_logprobs", &Each::new(shares))?;
                let tops = self.each().map(|(_, logprob)| {
                    let top = logprob?.top.iter();
                    let top = top.map(|&(id, share)| (envelope.text(id), share.into()));
                    Some(Value::Object(top.collect()))
                });
                map.serialize_entry("top_logprobs", &Each::new(tops))?;
                let offsets = texts().scan(self.offset, |offset, text| {
                    let start = *offset;
                    *offset += text.chars().count();
                    Some(start)
                });
                map.serialize_entry("text_offset", &Each::new(offsets))?;
            }
        }
        map.end()
    }
}

/// A list that is generated while it is written, once.
struct Each<I>(RefCell<Option<I>>);

impl<I> Each<I> {
    fn new(items: I) -> Self {
        Self(RefCell::new(Some(items)))
    }
}

impl<I: Iterator<Item: Serialize>> Serialize for Each<I> {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        out.collect_seq(self.0.take().into_iter().flatten())
    }
}
