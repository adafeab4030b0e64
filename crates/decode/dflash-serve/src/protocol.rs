//! Parses and checks OpenAI's request fields for the engine.

use std::sync::Arc;

use dflash_chat::{ChatTokenizer, Conversation, Message, Row, parse_prompt_row};
use dflash_decode::{LogitAdjustments, Sampling};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::fields::{Fields, Prompt};
use crate::format::{self, Format};
use crate::refusal::Refusal;
use crate::tool_form::ToolForm;
use crate::tools::{self, Tools};

/// Maximum number of choices of a request, over all its prompts.
const MOST_CHOICES: u64 = 128;
/// As OpenAI's.
const MOST_LOGPROBS: u64 = 20;
/// Maximum number of log-probabilities of a request, over all choices, tokens and alternatives: a
/// reply of 100 MB.
const MOST_SHARES: usize = 1 << 20;
/// Maximum number of stop strings, and of stop tokens, of a request.
const MOST_STOPS: usize = 16;
/// Maximum number of tokens in `logit_bias`.
const MOST_BIASES: usize = 1024;
/// OpenAI's and vLLM's default for completions.
const DEFAULT_COMPLETION_TOKENS: usize = 16;

/// Fields that identify the caller, and have no effect.
const PASSED_OVER: [&str; 7] = [
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
    "service_tier",
    "verbosity",
];

/// Fields of OpenAI and vLLM that this server does not support, with the value that requests
/// nothing.
const UNSUPPORTED: [(&str, &str); 13] = [
    ("best_of", "1"),
    ("echo", "false"),
    ("suffix", "null"),
    ("tools", "[]"),
    ("tool_choice", "\"none\""),
    ("functions", "[]"),
    ("function_call", "\"none\""),
    ("modalities", "[\"text\"]"),
    ("audio", "null"),
    ("prediction", "null"),
    ("reasoning_effort", "null"),
    ("web_search_options", "null"),
    ("store", "false"),
];

/// The requested form of the answers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Asked {
    pub(crate) model: Option<String>,
    /// Answers per prompt.
    pub(crate) n: usize,
    pub(crate) sampling: Sampling,
    pub(crate) adjustments: LogitAdjustments,
    /// Tokens that end an answer in addition to the target's own, and whether those do not.
    pub(crate) stop_ids: Vec<i64>,
    pub(crate) ignore_eos: bool,
    /// The required format of the text.
    pub(crate) format: Option<Format>,
    /// The tools that it may call.
    pub(crate) tools: Option<Arc<Tools>>,
    pub(crate) seed: Option<u64>,
    pub(crate) stops: Vec<String>,
    /// `None` for as many as fit.
    pub(crate) max_tokens: Option<usize>,
    pub(crate) logprobs: Option<usize>,
    /// Whether the prompt is returned before the answer.
    pub(crate) echo: bool,
    pub(crate) speculative: bool,
    pub(crate) stream: Option<Streaming>,
}

/// Settings of a streamed reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Streaming {
    #[serde(default)]
    pub(crate) include_usage: bool,
    /// Whether each chunk reports the block that its text comes from.
    #[serde(default)]
    pub(crate) include_blocks: bool,
}

/// A request to /v1/chat/completions.
#[derive(Debug)]
pub(crate) struct ChatRequest {
    pub(crate) asked: Asked,
    messages: Vec<Message>,
    template: Map<String, Value>,
}

/// A request to /v1/completions.
#[derive(Debug)]
pub(crate) struct CompletionRequest {
    pub(crate) asked: Asked,
    prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore<T> {
    One(T),
    More(Vec<T>),
}

impl<T> OneOrMore<T> {
    fn into_vec(self) -> Vec<T> {
        match self {
            Self::One(one) => vec![one],
            Self::More(more) => more,
        }
    }
}

impl Asked {
    /// Log-probabilities for `choices` of at most `tokens` tokens each, including the prompt's if
    /// it is returned.
    ///
    /// # Errors
    /// More than a request may have.
    pub(crate) fn shares(&self, choices: usize, tokens: usize) -> Result<usize, Refusal> {
        let Some(top) = self.logprobs else { return Ok(0) };
        let shares = choices.saturating_mul(tokens).saturating_mul(1 + top);
        if shares > MOST_SHARES {
            let reason = format!(
                "of {choices} choices of {tokens} tokens with {top} alternatives are {shares} numbers, but a \
                 request may have {MOST_SHARES}; ask for fewer, or pass a smaller max_tokens (with echo the \
                 prompt's tokens count)"
            );
            return Err(bad("logprobs", &reason));
        }
        Ok(shares)
    }

    /// Whether the chunks of a stream report blocks.
    pub(crate) fn reports_blocks(&self) -> bool {
        self.stream.is_some_and(|options| options.include_blocks)
    }

    /// A block's tokens are the text of its chunk, which is not so with these fields.
    ///
    /// # Errors
    /// Blocks are requested.
    fn refuse_blocks_with(&self, other: &str) -> Result<(), Refusal> {
        match self.reports_blocks() {
            true => Err(bad("stream_options.include_blocks", &format!("does not go with {other}"))),
            false => Ok(()),
        }
    }

    /// # Errors
    /// A token outside the target's vocabulary.
    pub(crate) fn check_ids(&self, vocab_size: i64) -> Result<(), Refusal> {
        let stops = self.stop_ids.iter().map(|id| ("stop_token_ids", id));
        let biases = self.adjustments.logit_bias.iter().map(|(id, _)| ("logit_bias", id));
        match stops.chain(biases).find(|(_, id)| !(0..vocab_size).contains(*id)) {
            Some((param, id)) => {
                let reason =
                    format!("names token {id}, but the vocabulary has 0 to {}", vocab_size - 1);
                Err(bad(param, &reason))
            }
            None => Ok(()),
        }
    }
}

impl ChatRequest {
    /// Constrains the answer to calls if calls are required.
    ///
    /// # Errors
    /// A target without a known call format, or without one that can be required.
    pub(crate) fn ask_for_calls(
        &mut self,
        form: Option<ToolForm>,
        tokenizer: &ChatTokenizer,
    ) -> Result<(), Refusal> {
        let Some(tools) = &self.asked.tools else { return Ok(()) };
        let unknown =
            "cannot be used: this target's chat template writes no calls in a form known here";
        let form = form.ok_or_else(|| bad("tools", unknown))?;
        if tools.are_required() && self.asked.ignore_eos {
            let reason = "does not go with tool_choice, which says where an answer ends";
            return Err(bad("ignore_eos", reason));
        }
        self.asked.format = tools.format(form, tokenizer)?;
        Ok(())
    }

    pub(crate) fn parse(body: &[u8]) -> Result<Self, Refusal> {
        let mut fields = Fields::parse(body, 0)?;
        let logprobs: Option<bool> = fields.take("logprobs")?;
        let top = fields.count("top_logprobs", 0..=MOST_LOGPROBS)?;
        let newer = fields.count("max_completion_tokens", 1..=u32::MAX.into())?;
        let template = fields.take("chat_template_kwargs")?.unwrap_or_default();
        let messages: Vec<Value> =
            fields.take("messages")?.ok_or(Refusal::Missing { param: "messages" })?;
        let tools = tools::read(&mut fields)?;
        let mut asked = common(&mut fields)?;
        fields.end()?;
        if tools.is_some() && asked.format.is_some() {
            let reason = "does not go with tools; leave one of them out, or send tool_choice none";
            return Err(bad("response_format", reason));
        }
        asked.tools = tools.map(Arc::new);
        if asked.tools.is_some() {
            asked.refuse_blocks_with("tools")?;
        }
        asked.max_tokens = newer.or(asked.max_tokens);
        check_least(&asked)?;
        if asked.max_tokens == Some(0) {
            return Err(bad("max_tokens", "is 0, but it must be 1 or more"));
        }
        asked.logprobs = match (logprobs.unwrap_or(false), top) {
            (true, top) => Some(top.unwrap_or(0)),
            (false, None | Some(0)) => None,
            (false, Some(_)) => return Err(bad("top_logprobs", "needs logprobs to be true")),
        };
        let mut messages = read_messages(messages)?;
        tools::open_arguments(&mut messages)?;
        Ok(Self { asked, messages, template })
    }

    /// The tokens of the prompt, at most `most`; of a longer one only that it is too long.
    pub(crate) fn prompts(
        &self,
        tokenizer: &ChatTokenizer,
        most: usize,
    ) -> Result<Vec<Vec<i64>>, Refusal> {
        let tools = self.asked.tools.as_ref().map(|tools| &tools.list);
        let text = tokenizer
            .render_with(&self.messages, tools, true, &self.template)
            .map_err(Refusal::BadMessages)?;
        Ok(vec![encode(tokenizer, &text, most)?])
    }
}

impl CompletionRequest {
    /// Prompts have at most `most` tokens, or are too long.
    pub(crate) fn parse(body: &[u8], most: usize) -> Result<Self, Refusal> {
        let mut fields = Fields::parse(body, most)?;
        let logprobs = fields.count("logprobs", 0..=MOST_LOGPROBS)?;
        let echo: Option<bool> = fields.take("echo")?;
        let prompts = fields.take_prompts().ok_or(Refusal::Missing { param: "prompt" })?;
        let mut asked = common(&mut fields)?;
        fields.end()?;
        asked.logprobs = logprobs;
        asked.max_tokens = asked.max_tokens.or(Some(DEFAULT_COMPLETION_TOKENS));
        check_least(&asked)?;
        asked.echo = echo.unwrap_or(false);
        if asked.echo {
            asked.refuse_blocks_with("echo")?;
        }
        if asked.max_tokens == Some(0) && !asked.echo {
            return Err(bad("max_tokens", "is 0, but without echo it must be 1 or more"));
        }
        if prompts.contains(&Prompt::Wrong) {
            let reason = "must be a string, a list of token ids, or a list of these";
            return Err(bad("prompt", reason));
        }
        if prompts.len() as u64 * asked.n as u64 > MOST_CHOICES {
            let reason = format!("times n must give at most {MOST_CHOICES} choices");
            return Err(bad("prompt", &reason));
        }
        Ok(Self { asked, prompts })
    }

    /// The tokens of each prompt, at most `most`; of a longer one only that it is too long.
    pub(crate) fn prompts(
        &self,
        tokenizer: &ChatTokenizer,
        most: usize,
        vocab_size: i64,
    ) -> Result<Vec<Vec<i64>>, Refusal> {
        let ids = |prompt: &Prompt| match prompt {
            Prompt::Text(text) => encode(tokenizer, text, most),
            Prompt::Tokens(ids) => match ids.iter().position(|id| !(0..vocab_size).contains(id)) {
                Some(position) => {
                    let id = ids[position];
                    Err(Refusal::TokenOutOfRange { position, id, vocab_size })
                }
                None => Ok(ids.clone()),
            },
            Prompt::Wrong => unreachable!("it was refused"),
        };
        let all: Vec<Vec<i64>> = self.prompts.iter().map(ids).collect::<Result<_, _>>()?;
        match all.iter().any(Vec::is_empty) {
            true => Err(bad("prompt", "is empty; it must have at least one token")),
            false => Ok(all),
        }
    }
}

/// # Errors
/// An answer whose minimum length exceeds its maximum.
fn check_least(asked: &Asked) -> Result<(), Refusal> {
    match asked.max_tokens {
        Some(most) if asked.adjustments.min_tokens > most => {
            Err(bad("min_tokens", &format!("is above the {most} tokens that the answer may have")))
        }
        _ => Ok(()),
    }
}

/// Fields of both kinds of requests.
fn common(fields: &mut Fields) -> Result<Asked, Refusal> {
    let stream: Option<bool> = fields.take("stream")?;
    let options: Option<Streaming> = fields.take("stream_options")?;
    let stream = match (stream.unwrap_or(false), options) {
        (true, options) => Some(options.unwrap_or_default()),
        (false, None) => None,
        (false, Some(_)) => return Err(bad("stream_options", "needs stream to be true")),
    };
    let stops: Option<OneOrMore<String>> = fields.take("stop")?;
    let stops = stops.map(OneOrMore::into_vec).unwrap_or_default();
    if stops.len() > MOST_STOPS || stops.iter().any(String::is_empty) {
        let reason = format!("must be at most {MOST_STOPS} strings, none of them empty");
        return Err(bad("stop", &reason));
    }
    let seed: Option<i64> = fields.take("seed")?;
    // In vLLM -1 and 0 mean all.
    let top_k: Option<i64> = fields.take("top_k")?;
    if top_k.is_some_and(|top_k| top_k < -1) {
        return Err(bad("top_k", "must be 1 or more, or -1 for all"));
    }
    let top_p = fields.number("top_p", 0.0..=1.0)?.unwrap_or(1.0);
    if top_p == 0.0 {
        return Err(bad("top_p", "is 0, but it must be above 0 and at most 1"));
    }
    let stop_ids: Vec<i64> = fields.take("stop_token_ids")?.unwrap_or_default();
    if stop_ids.len() > MOST_STOPS {
        return Err(bad("stop_token_ids", &format!("must be at most {MOST_STOPS} tokens")));
    }
    let asked = Asked {
        model: fields.take("model")?,
        n: fields.count("n", 1..=MOST_CHOICES)?.unwrap_or(1),
        sampling: Sampling {
            temperature: fields.number("temperature", 0.0..=2.0)?.unwrap_or(1.0),
            top_p,
            top_k: top_k.filter(|&top_k| top_k > 0).map(|top_k| top_k as usize),
            min_p: fields.number("min_p", 0.0..=1.0)?.unwrap_or(0.0),
        },
        adjustments: adjustments(fields)?,
        stop_ids,
        ignore_eos: fields.take("ignore_eos")?.unwrap_or(false),
        format: format::read(fields)?,
        tools: None,
        seed: seed.map(|seed| seed as u64),
        stops,
        max_tokens: fields.count("max_tokens", 0..=u32::MAX.into())?,
        logprobs: None,
        echo: false,
        speculative: fields.take("speculative")?.unwrap_or(true),
        stream,
    };
    fields.pass_over(&PASSED_OVER);
    if asked.ignore_eos && asked.format.is_some() {
        let reason = "does not go with response_format, which says where an answer ends";
        return Err(bad("ignore_eos", reason));
    }
    UNSUPPORTED.into_iter().try_for_each(|(param, instead)| fields.unsupported(param, instead))?;
    Ok(asked)
}

/// Changes to the logits, within OpenAI's ranges, or vLLM's if it has none.
fn adjustments(fields: &mut Fields) -> Result<LogitAdjustments, Refusal> {
    let repetition_penalty = fields.number("repetition_penalty", 0.0..=10.0)?.unwrap_or(1.0);
    if repetition_penalty == 0.0 {
        return Err(bad("repetition_penalty", "is 0, but it must be above 0 and at most 10"));
    }
    let biases: Map<String, Value> = fields.take("logit_bias")?.unwrap_or_default();
    if biases.len() > MOST_BIASES {
        return Err(bad("logit_bias", &format!("must name at most {MOST_BIASES} tokens")));
    }
    let bias = |(id, bias): (String, Value)| {
        let wrong = || bad("logit_bias", "must map token ids to numbers from -100 to 100");
        let id = id.parse::<i64>().map_err(|_| wrong())?;
        let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
        Ok((id, bias.ok_or_else(wrong)?))
    };
    Ok(LogitAdjustments {
        logit_bias: biases.into_iter().map(bias).collect::<Result<_, Refusal>>()?,
        repetition_penalty,
        frequency_penalty: fields.number("frequency_penalty", -2.0..=2.0)?.unwrap_or(0.0),
        presence_penalty: fields.number("presence_penalty", -2.0..=2.0)?.unwrap_or(0.0),
        min_tokens: fields.count("min_tokens", 0..=u32::MAX.into())?.unwrap_or(0),
    })
}

/// The turns of a conversation, with their text parts joined: templates take strings.
fn read_messages(messages: Vec<Value>) -> Result<Vec<Message>, Refusal> {
    if messages.is_empty() {
        return Err(bad("messages", "is empty; it must have at least one message"));
    }
    let row = parse_prompt_row(&json!({ "messages": messages })).map_err(Refusal::BadMessages)?;
    let Row::Conversation(Conversation { mut messages, .. }) = row else {
        return Err(bad("messages", "is not a conversation"));
    };
    for (at, message) in messages.iter_mut().enumerate() {
        let known = ["refusal", "annotations", "audio", "function_call"];
        let param = || format!("messages[{at}]");
        if let Some(key) = message.unknown_keys.iter().find(|key| !known.contains(&key.as_str())) {
            return Err(Refusal::Unknown { param: format!("{}.{key}", param()) });
        }
        if message.content.is_null() && message.tool_calls.is_none() {
            let reason = "has no content; send a string, or a list of parts of text".into();
            return Err(Refusal::BadField { param: param(), reason });
        }
        if let Value::Array(parts) = &message.content {
            let texts: Option<Vec<&str>> = parts.iter().map(text_of).collect();
            let reason = "has a content part that is not text; this server takes text only".into();
            let texts = texts.ok_or_else(|| Refusal::BadField { param: param(), reason })?;
            message.content = Value::String(texts.join("\n"));
        }
    }
    Ok(messages)
}

fn text_of(part: &Value) -> Option<&str> {
    part["text"].as_str().filter(|_| part["type"] == "text")
}

/// Returns at most one token more than `most`: enough to see that a text is too long.
fn encode(tokenizer: &ChatTokenizer, text: &str, most: usize) -> Result<Vec<i64>, Refusal> {
    let start = tokenizer.encode_start(text, most.saturating_add(1), &mut Default::default());
    Ok(start.map_err(|_| Refusal::Tokenizer)?.ids)
}

fn bad(param: &str, reason: &str) -> Refusal {
    Refusal::BadField { param: param.into(), reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(more: &str) -> Result<ChatRequest, Refusal> {
        ChatRequest::parse(
            format!(r#"{{"messages": [{{"role": "user", "content": "hi"}}]{more}}}"#).as_bytes(),
        )
    }

    #[test]
    fn a_plain_request_has_openais_defaults() {
        let asked = chat("").unwrap().asked;
        assert_eq!((asked.n, asked.sampling, asked.max_tokens), (1, Sampling::at(1.0), None));
        assert!(asked.speculative && asked.stream.is_none() && asked.logprobs.is_none());
        let completion = CompletionRequest::parse(br#"{"prompt": "a"}"#, 9).unwrap();
        assert_eq!(completion.asked.max_tokens, Some(16));
    }

    #[test]
    fn what_cannot_be_done_is_refused_by_name() {
        let check = |more: &str, expect: &str| {
            let refusal = chat(more).err().map(|refusal| refusal.to_string());
            assert_eq!(refusal.as_deref().unwrap_or_default(), expect, "{more}");
        };
        check(r#", "foo": 1"#, "foo is not a parameter of this endpoint; leave it out");
        let unsupported = "is not supported by this server; leave it out, or send";
        check(r#", "best_of": 2"#, &format!("best_of {unsupported} 1"));
        check(r#", "presence_penalty": 3"#, "presence_penalty is 3, but it must be -2 to 2");
        let penalty = "repetition_penalty is 0, but it must be above 0 and at most 10";
        check(r#", "repetition_penalty": 0"#, penalty);
        let bias = "logit_bias must map token ids to numbers from -100 to 100";
        check(r#", "logit_bias": {"x": 1}"#, bias);
        check(r#", "logit_bias": {"1": 101}"#, bias);
        let longer = "min_tokens is above the 3 tokens that the answer may have";
        check(r#", "max_tokens": 3, "min_tokens": 4"#, longer);
        check(r#", "max_completion_tokens": 3, "min_tokens": 4"#, longer);
        check(r#", "tools": [{"type": "function"}]"#, "tools[0].function must be an object");
        check(
            r#", "tools": [{"type": "function", "function": {"name": "a"}}],
                 "response_format": {"type": "json_object"}"#,
            "response_format does not go with tools; leave one of them out, or send tool_choice none",
        );
        check(
            r#", "response_format": {"type": "json_object"}, "ignore_eos": true"#,
            "ignore_eos does not go with response_format, which says where an answer ends",
        );
        for fine in [
            r#", "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "tools": []"#,
            r#", "response_format": {"type": "text"}, "tool_choice": "none", "user": "me""#,
            r#", "top_k": -1, "stop": "x", "store": false, "repetition_penalty": 1.0, "n": null"#,
        ] {
            check(fine, "");
        }
        check(r#", "temperature": 3"#, "temperature is 3, but it must be 0 to 2");
        check(r#", "top_p": 0"#, "top_p is 0, but it must be above 0 and at most 1");
        check(r#", "n": 0"#, "n is 0, but it must be 1 to 128");
        check(r#", "stop": [""]"#, "stop must be at most 16 strings, none of them empty");
        check(
            r#", "stream_options": {"include_usage": true}"#,
            "stream_options needs stream to be true",
        );
        check(r#", "top_logprobs": 2"#, "top_logprobs needs logprobs to be true");
        let text = chat(r#", "max_tokens": "many""#).unwrap_err().to_string();
        assert!(text.starts_with("max_tokens is not usable: invalid type: string"), "{text}");
    }

    #[test]
    fn what_changes_the_choice_of_tokens_is_read() {
        let asked = chat(
            r#", "min_p": 0.1, "logit_bias": {"7": -5}, "frequency_penalty": 0.5, "min_tokens": 3,
               "presence_penalty": -1, "repetition_penalty": 1.2, "stop_token_ids": [9], "ignore_eos": true"#,
        );
        let asked = asked.unwrap().asked;
        let expect = LogitAdjustments {
            logit_bias: vec![(7, -5.0)],
            repetition_penalty: 1.2,
            frequency_penalty: 0.5,
            presence_penalty: -1.0,
            min_tokens: 3,
        };
        assert_eq!((&asked.adjustments, asked.sampling.min_p), (&expect, 0.1));
        assert!(asked.ignore_eos && asked.stop_ids == [9]);
        assert!(asked.check_ids(10).is_ok());
        let refusal = asked.check_ids(9).unwrap_err().to_string();
        assert!(refusal.contains("stop_token_ids names token 9"), "{refusal}");
        assert!(chat("").unwrap().asked.adjustments == LogitAdjustments::default());
    }

    #[test]
    fn a_request_is_told_a_bounded_number_of_log_probabilities() {
        let check = |more: &str, (choices, tokens): (usize, usize), expect: Option<usize>| {
            let asked = chat(more).unwrap().asked;
            assert_eq!(asked.shares(choices, tokens).ok(), expect, "{more} {choices} {tokens}");
        };
        let top = r#", "logprobs": true, "top_logprobs": 20"#;
        check("", (128, 1 << 20), Some(0));
        check(top, (1, 40_960), Some(21 * 40_960));
        check(top, (32, 1900), None);
        check(r#", "logprobs": true"#, (32, 1900), Some(32 * 1900));
        check(r#", "logprobs": true"#, (usize::MAX, usize::MAX), None);
    }

    #[test]
    fn prompts_come_in_four_forms() {
        let check = |prompt: &str, expect: Option<usize>| {
            let body = format!(r#"{{"prompt": {prompt}}}"#);
            let found = CompletionRequest::parse(body.as_bytes(), 9).ok();
            assert_eq!(found.map(|request| request.prompts.len()), expect, "{prompt}");
        };
        check(r#""text""#, Some(1));
        check("[1, 2, 3]", Some(1));
        check(r#"["a", "b"]"#, Some(2));
        check("[[1], [2, 3], [4]]", Some(3));
        check("{}", None);
        check("[1, \"a\"]", None);
    }

    #[test]
    fn parts_of_text_are_joined_and_pictures_refused() {
        let messages =
            |content: Value| read_messages(vec![json!({"role": "user", "content": content})]);
        let text = |text: &str| json!({"type": "text", "text": text});
        let read = messages(json!([text("a"), text("b")])).unwrap();
        assert_eq!(read[0].content, "a\nb");
        let refused = messages(json!([{"type": "image_url", "image_url": {"url": "x"}}]));
        assert!(refused.unwrap_err().to_string().contains("text only"));
        assert!(
            read_messages(vec![json!({"role": "user", "content": "a", "contents": 1})]).is_err()
        );
        for without in [json!({"role": "user"}), json!({"role": "user", "content": null})] {
            let refusal = read_messages(vec![without]).unwrap_err().to_string();
            assert!(refusal.contains("no content"), "{refusal}");
        }
    }
}
