//! Answers in OpenAI's shapes, whole or piece by piece.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use dflash_decode::{Logprob, NewToken};
use dflash_text::ChatTokenizer;
use serde_json::{Map, Value, json};

use crate::queue::{Event, FinishReason};

/// Which endpoint answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Chat,
    Completion,
}

/// What all pieces of a reply have in common.
#[derive(Debug)]
pub(crate) struct Envelope {
    pub(crate) kind: Kind,
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<ChatTokenizer>,
    logprobs: bool,
}

/// How many tokens a request took.
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
    tokens: Vec<NewToken>,
    pub(crate) finish: Option<FinishReason>,
    /// Characters of the tokens so far, for offsets.
    offset: usize,
    /// Whether its first chunk has gone out.
    begun: bool,
    touched: bool,
}

impl Choice {
    /// Whether nothing has come of it yet.
    pub(crate) fn is_untouched(&self) -> bool {
        !self.touched
    }

    pub(crate) fn touch(&mut self) {
        self.touched = true;
    }

    pub(crate) fn add(&mut self, event: Event) {
        self.text += &event.text;
        self.tokens.extend(event.tokens);
        self.finish = event.finish;
    }
}

/// A number that nobody can foresee: the standard library seeds its hashers from the system.
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
        (tokenizer, logprobs): (&Arc<ChatTokenizer>, bool),
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

    /// The whole reply.
    pub(crate) fn whole(&self, choices: Vec<Choice>, usage: Usage) -> Value {
        let choices = choices.into_iter().enumerate().map(|(index, choice)| {
            let logprobs = self.logprobs(&choice.tokens, 0);
            let finish = choice.finish.map(FinishReason::name);
            match self.kind {
                Kind::Chat => json!({
                    "index": index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": null},
                    "logprobs": logprobs,
                    "finish_reason": finish,
                }),
                Kind::Completion => json!({
                    "index": index, "text": choice.text, "logprobs": logprobs,
                    "finish_reason": finish,
                }),
            }
        });
        let object = match self.kind {
            Kind::Chat => "chat.completion",
            Kind::Completion => "text_completion",
        };
        self.object(object, choices.collect(), Some(usage.json()))
    }

    fn chunk_object(&self) -> &'static str {
        match self.kind {
            Kind::Chat => "chat.completion.chunk",
            Kind::Completion => "text_completion",
        }
    }

    /// A piece of a choice; `usage` is null where it comes at the end. `None` where the step said
    /// nothing yet.
    pub(crate) fn chunk(
        &self,
        choice: &mut Choice,
        event: &Event,
        usage: Option<Value>,
    ) -> Option<Value> {
        let is_empty = event.text.is_empty() && (!self.logprobs || event.tokens.is_empty());
        if is_empty && event.finish.is_none() && choice.begun {
            return None;
        }
        let logprobs = self.logprobs(&event.tokens, choice.offset);
        let finish = event.finish.map(FinishReason::name);
        let mut piece = json!({"index": event.index});
        match self.kind {
            Kind::Chat => {
                let mut delta = Map::new();
                if !choice.begun {
                    delta.insert("role".into(), "assistant".into());
                }
                delta.insert("content".into(), event.text.as_str().into());
                piece["delta"] = delta.into();
            }
            Kind::Completion => piece["text"] = event.text.as_str().into(),
        }
        piece["logprobs"] = logprobs;
        piece["finish_reason"] = finish.into();
        choice.begun = true;
        choice.finish = event.finish;
        if self.logprobs {
            let characters = |token: &NewToken| self.text(token.id).chars().count();
            choice.offset += event.tokens.iter().map(characters).sum::<usize>();
        }
        Some(self.object(self.chunk_object(), vec![piece], usage))
    }

    /// The last piece, which tells the usage.
    pub(crate) fn usage_chunk(&self, usage: Usage) -> Value {
        self.object(self.chunk_object(), Vec::new(), Some(usage.json()))
    }

    fn text(&self, id: i64) -> String {
        self.tokenizer.decode(&[id], false).unwrap_or_default()
    }

    /// Null where none were asked for.
    fn logprobs(&self, tokens: &[NewToken], offset: usize) -> Value {
        if !self.logprobs {
            return Value::Null;
        }
        let known = tokens.iter().filter_map(|token| Some((token.id, token.logprob.as_ref()?)));
        match self.kind {
            Kind::Chat => {
                let content = known.map(|(id, logprob)| {
                    let mut entry = self.entry(id, logprob.chosen);
                    let top = logprob.top.iter().map(|&(id, share)| self.entry(id, share));
                    entry["top_logprobs"] = top.collect();
                    entry
                });
                json!({"content": content.collect::<Vec<_>>(), "refusal": null})
            }
            Kind::Completion => self.completion_logprobs(known, offset),
        }
    }

    /// OpenAI gives a token's bytes where its text alone may not be valid UTF-8; those of such tokens
    /// are not known here.
    fn entry(&self, id: i64, share: f64) -> Value {
        let text = self.text(id);
        let bytes = (!text.contains('\u{fffd}')).then(|| text.as_bytes().to_vec());
        json!({"token": text, "logprob": share, "bytes": bytes})
    }

    fn completion_logprobs<'a>(
        &self,
        known: impl Iterator<Item = (i64, &'a Logprob)>,
        mut offset: usize,
    ) -> Value {
        let (mut texts, mut shares, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
        for (id, logprob) in known {
            let text = self.text(id);
            offsets.push(offset);
            offset += text.chars().count();
            texts.push(text);
            shares.push(logprob.chosen);
            let top = logprob.top.iter().map(|&(id, share)| (self.text(id), share.into()));
            tops.push(Value::Object(top.collect()));
        }
        json!({
            "tokens": texts, "token_logprobs": shares, "top_logprobs": tops,
            "text_offset": offsets,
        })
    }
}
