//! One question and its streamed answer.

use std::time::{Duration, Instant};

use crate::Verification;
use dflash_chat::Message;
use dflash_settings::Thinking;
use serde::Deserialize;
use serde_json::{Value, json};

use super::server::Server;
use crate::Error;

/// Settings of the answers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Manner {
    pub(crate) max_tokens: usize,
    pub(crate) temperature: f64,
    pub(crate) seed: u64,
    pub(crate) thinking: Thinking,
}

#[derive(Debug, Default)]
pub(crate) struct Reply {
    /// The answer's text, without reasoning.
    pub(crate) text: String,
    pub(crate) prompt_tokens: usize,
    pub(crate) tokens: usize,
    pub(crate) first_token_s: f64,
    pub(crate) total_s: f64,
    /// Whether it ended at the length limit.
    pub(crate) cut: bool,
    /// The verify steps, if the reply reports them (llama.cpp).
    pub(crate) verification: Option<Verification>,
}

/// The fields of a stream chunk that are read.
#[derive(Debug, Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    timings: Option<Timings>,
    /// An error after the answer had begun.
    error: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    #[serde(default)]
    delta: Delta,
    finish_reason: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
struct Delta {
    content: Option<String>,
    #[serde(alias = "reasoning")]
    reasoning_content: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
}

/// llama.cpp's own counts.
#[derive(Debug, Deserialize)]
struct Timings {
    #[serde(default)]
    cache_n: usize,
    prompt_n: usize,
    predicted_n: usize,
    draft_n: Option<u64>,
    draft_n_accepted: Option<u64>,
}

impl Timings {
    /// Every token after the first comes from a step or from the draft.
    fn verification(&self) -> Option<Verification> {
        self.draft_n?;
        let accepted = self.draft_n_accepted.unwrap_or_default();
        let steps = (self.predicted_n as u64).saturating_sub(1 + accepted);
        Some(Verification { steps, accepted, accepted_by_slot: Vec::new() })
    }
}

/// Sends `messages` to the server and reads the complete answer.
///
/// # Errors
/// Why the answer is not complete.
pub(crate) async fn ask(
    server: &Server,
    messages: &[Message],
    manner: Manner,
) -> Result<Reply, Error> {
    let limit = Duration::from_secs(server.timeout);
    match tokio::time::timeout(limit, read(server, &body(server, messages, manner))).await {
        Ok(outcome) => outcome,
        Err(_) => Err(Error::Slow { url: server.shown(), seconds: server.timeout }),
    }
}

fn body(server: &Server, messages: &[Message], manner: Manner) -> Value {
    let mut body = json!({
        "model": server.model,
        "messages": messages,
        "max_tokens": manner.max_tokens,
        "temperature": manner.temperature,
        "stream": true,
        "stream_options": { "include_usage": true },
    });
    if manner.temperature > 0.0 {
        // The distribution must not be truncated, whatever a model's own generation_config.json
        // says.
        body["seed"] = manner.seed.into();
        body["top_p"] = 1.0.into();
        body["top_k"] = (-1).into();
    }
    if let Some(enabled) = manner.thinking.template_variable() {
        body["chat_template_kwargs"] = json!({ "enable_thinking": enabled });
    }
    body
}

async fn read(server: &Server, body: &Value) -> Result<Reply, Error> {
    let began = Instant::now();
    let mut response = server.chat(body).await?;
    let (mut lines, mut stream) = (Lines::default(), Stream::default());
    while let Some(bytes) = response.chunk().await.map_err(|error| server.failed(&error))? {
        let at = began.elapsed().as_secs_f64();
        for line in lines.push(&bytes) {
            stream.take(&line, at).map_err(|reason| server.strange(reason))?;
        }
    }
    stream.finish().map_err(|reason| server.strange(reason))
}

/// Assembles whole lines from chunks of bytes.
#[derive(Debug, Default)]
struct Lines {
    rest: Vec<u8>,
}

impl Lines {
    fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        self.rest.extend_from_slice(bytes);
        let Some(end) = self.rest.iter().rposition(|&byte| byte == b'\n') else {
            return Vec::new();
        };
        let whole: Vec<u8> = self.rest.drain(..=end).collect();
        String::from_utf8_lossy(&whole).lines().map(str::to_owned).collect()
    }
}

/// The answer so far.
#[derive(Debug, Default)]
struct Stream {
    reply: Reply,
    first: Option<f64>,
    usage: Option<Usage>,
    timings: Option<Timings>,
    ended: bool,
}

impl Stream {
    /// A line of server-sent events that arrived `at` seconds after the question.
    fn take(&mut self, line: &str, at: f64) -> Result<(), String> {
        let Some(data) = line.strip_prefix("data:").map(str::trim) else { return Ok(()) };
        if data == "[DONE]" {
            return Ok(());
        }
        let chunk: Chunk = serde_json::from_str(data)
            .map_err(|error| format!("a piece that is {error}: {data}"))?;
        if let Some(error) = chunk.error {
            return Err(format!("an error in the middle of the answer: {error}"));
        }
        for choice in chunk.choices {
            let said = choice.delta.content.unwrap_or_default();
            let thought = choice.delta.reasoning_content.unwrap_or_default();
            if !said.is_empty() || !thought.is_empty() {
                self.first.get_or_insert(at);
                self.reply.total_s = at;
            }
            if let Some(reason) = choice.finish_reason {
                self.reply.cut = reason == "length";
                self.reply.total_s = at;
                self.ended = true;
            }
            self.reply.text += &said;
        }
        self.usage = chunk.usage.or(self.usage.take());
        self.timings = chunk.timings.or(self.timings.take());
        Ok(())
    }

    fn finish(mut self) -> Result<Reply, String> {
        if !self.ended {
            return Err("the answer broke off before its end".into());
        }
        let (prompt_tokens, tokens) = match (&self.usage, &self.timings) {
            (Some(usage), _) => (usage.prompt_tokens, usage.completion_tokens),
            (None, Some(timings)) => (timings.cache_n + timings.prompt_n, timings.predicted_n),
            (None, None) => return Err("the answer came without its number of tokens".into()),
        };
        self.reply.first_token_s = self.first.unwrap_or(self.reply.total_s);
        self.reply.verification = self.timings.as_ref().and_then(Timings::verification);
        Ok(Reply { prompt_tokens, tokens, ..self.reply })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(lines: &[(&str, f64)]) -> Result<Reply, String> {
        let mut stream = Stream::default();
        lines.iter().try_for_each(|(line, at)| stream.take(line, *at))?;
        stream.finish()
    }

    #[test]
    fn a_stream_of_vllm_gives_text_times_and_tokens() {
        let reply = reply(&[
            (r#"data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}"#, 0.1),
            (": ping", 0.15),
            (r#"data: {"choices":[{"delta":{"reasoning":"hm"},"finish_reason":null}]}"#, 0.2),
            (r#"data: {"choices":[{"delta":{"content":"4"},"finish_reason":null}]}"#, 0.3),
            (r#"data: {"choices":[{"delta":{"content":"2"},"finish_reason":"stop"}]}"#, 0.5),
            (r#"data: {"choices":[],"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3}}"#, 0.6),
            ("data: [DONE]", 0.7),
        ])
        .unwrap();
        assert_eq!(reply.text, "42");
        assert_eq!((reply.first_token_s, reply.total_s), (0.2, 0.5));
        assert_eq!((reply.prompt_tokens, reply.tokens), (9, 3));
        assert_eq!(reply.verification, None);
    }

    #[test]
    fn timings_of_llama_cpp_tell_the_steps() {
        let timings = r#"data: {"choices":[{"delta":{},"finish_reason":"length"}],"timings":{"cache_n":5,
            "prompt_n":4,"prompt_ms":2.0,"predicted_n":25,"predicted_ms":9.5,"draft_n":30,
            "draft_n_accepted":14}}"#;
        let reply = reply(&[
            (r#"data: {"choices":[{"delta":{"content":"x"},"finish_reason":null}]}"#, 0.2),
            (&timings.replace('\n', ""), 0.5),
        ])
        .unwrap();
        // 25 tokens: the first, 14 accepted, and one each of 10 steps.
        let expect = Verification { steps: 10, accepted: 14, accepted_by_slot: Vec::new() };
        assert_eq!((reply.prompt_tokens, reply.tokens), (9, 25));
        assert_eq!(reply.verification, Some(expect));
    }

    #[test]
    fn broken_streams_are_told_apart() {
        let cut = r#"data: {"choices":[{"delta":{"content":"x"},"finish_reason":null}]}"#;
        assert!(reply(&[(cut, 0.1)]).unwrap_err().contains("broke off"));
        let end = r#"data: {"choices":[{"delta":{},"finish_reason":"stop"}]}"#;
        assert!(reply(&[(end, 0.1)]).unwrap_err().contains("number of tokens"));
        let error = r#"data: {"error":{"message":"out of memory"}}"#;
        assert!(reply(&[(error, 0.1)]).unwrap_err().contains("out of memory"));
        assert!(reply(&[("data: {", 0.1)]).unwrap_err().contains("EOF"));
    }

    #[test]
    fn lines_may_come_in_pieces() {
        let mut lines = Lines::default();
        assert!(lines.push("data: \u{e4}".as_bytes()[..7].as_ref()).is_empty());
        assert_eq!(lines.push(b"\xa4\r\n\r\nda"), ["data: \u{e4}", ""]);
        assert_eq!(lines.push(b"ta\n"), ["data"]);
    }
}
