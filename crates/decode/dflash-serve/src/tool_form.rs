//! A target's format for tool calls, derived from what its own template writes for a call.

use std::fmt;

use dflash_chat::{ChatTokenizer, Message, Role, TokenUse};
use serde_json::{Deserializer, Map, Value, json};

use crate::tools::Tools;

/// The known formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ToolForm {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen.
    Hermes,
    /// `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`: Qwen3-Coder.
    Tags,
    /// `{"name": ..., "parameters": {...}}` instead of text: Llama 3.
    Llama,
    /// `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`: Mistral.
    Mistral,
}

/// The text around a call in JSON, and the key of its arguments.
pub(crate) struct Frame {
    pub(crate) open: &'static [&'static str],
    /// The separator of calls, if an answer may have several.
    pub(crate) between: Option<&'static [&'static str]>,
    pub(crate) close: &'static [&'static str],
    pub(crate) arguments: &'static str,
}

/// Where a call begins in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Opening {
    At(usize),
    /// Not before this offset; the text after it may be the start of one.
    NotBefore(usize),
}

/// How a text that begins like a call reads.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Reading {
    /// Incomplete.
    More,
    /// Names and arguments, in this many bytes.
    Calls(usize, Vec<(String, Map<String, Value>)>),
    /// This many bytes that are not a call.
    Text(usize),
}

const TOOL_CALL: &str = "<tool_call>";
const TOOL_CALL_END: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
const PYTHON_TAG: &str = "<|python_tag|>";
const TOOL_CALLS: &str = "[TOOL_CALLS]";

impl ToolForm {
    /// The template's format; `None` if it writes no calls, or in an unknown format.
    pub(crate) fn of(tokenizer: &ChatTokenizer) -> Option<Self> {
        let parameters = json!({"type": "object", "properties": {"probe_key": {"type": "string"}}});
        let function = json!({"name": "probe_name", "description": "d", "parameters": parameters});
        let tools = json!([{"type": "function", "function": function}]);
        let arguments = json!({"probe_key": "probe_value"});
        let function = json!({"name": "probe_name", "arguments": arguments});
        let call = json!({"id": "probe0001", "type": "function", "function": function});
        let answer = Message {
            content: Value::Null,
            tool_calls: Some(json!([call])),
            ..Message::text(Role::Assistant, "")
        };
        let messages = [Message::text(Role::User, "probe_question"), answer];
        let text = tokenizer.render(&messages, Some(&tools), false).ok()?;
        // Before the question the template describes the tools.
        Self::of_text(text.rsplit("probe_question").next()?)
    }

    fn of_text(text: &str) -> Option<Self> {
        let has = |words: &str| text.contains(words);
        let is_json = has("\"probe_name\"") && has("\"probe_key\"");
        if has("<function=probe_name>") && has("<parameter=probe_key>") {
            Some(Self::Tags)
        } else if has(TOOL_CALL) && has("\"arguments\"") && is_json {
            Some(Self::Hermes)
        } else if has(TOOL_CALLS) && has("\"arguments\"") && is_json {
            Some(Self::Mistral)
        } else if has("\"parameters\"") && is_json {
            Some(Self::Llama)
        } else {
            None
        }
    }

    /// Special tokens that mark calls: they must be kept in a text that may contain calls.
    pub(crate) fn shown(self, tokenizer: &ChatTokenizer) -> Vec<i64> {
        let marks: &[&str] = match self {
            Self::Hermes | Self::Tags => &[TOOL_CALL, TOOL_CALL_END],
            Self::Llama => &[PYTHON_TAG],
            Self::Mistral => &[TOOL_CALLS],
        };
        marks.iter().filter_map(|mark| special_id(tokenizer, mark)).collect()
    }

    /// `None` for calls that are not JSON.
    pub(crate) fn frame(self) -> Option<Frame> {
        Some(match self {
            Self::Hermes => Frame {
                open: &[TOOL_CALL, "\n"],
                between: Some(&["\n", TOOL_CALL_END, "\n", TOOL_CALL, "\n"]),
                close: &["\n", TOOL_CALL_END],
                arguments: "arguments",
            },
            Self::Mistral => Frame {
                open: &[TOOL_CALLS, "["],
                between: Some(&[", "]),
                close: &["]"],
                arguments: "arguments",
            },
            Self::Llama => Frame { open: &[], between: None, close: &[], arguments: "parameters" },
            Self::Tags => return None,
        })
    }

    /// The first possible start of a call in `text`. Llama's calls start only at the beginning of
    /// an answer, or after another call.
    pub(crate) fn opening(self, text: &str, is_start: bool, is_behind: bool) -> Opening {
        match self {
            Self::Hermes => first_mark(text, &[TOOL_CALL]),
            Self::Tags => first_mark(text, &[TOOL_CALL, FUNCTION]),
            Self::Mistral => first_mark(text, &[TOOL_CALLS]),
            Self::Llama if !is_start => Opening::NotBefore(text.len()),
            Self::Llama => {
                let is_between = |c: char| c.is_whitespace() || (is_behind && c == ';');
                let rest = text.trim_start_matches(is_between);
                if rest.starts_with('{') || rest.starts_with(PYTHON_TAG) {
                    Opening::At(text.len() - rest.len())
                } else if PYTHON_TAG.starts_with(rest) {
                    Opening::NotBefore(0)
                } else {
                    Opening::NotBefore(text.len())
                }
            }
        }
    }

    /// Interprets `text`, which begins like a call; `is_end` means that nothing follows.
    pub(crate) fn read(self, text: &str, is_end: bool, tools: &Tools) -> Reading {
        match self {
            Self::Hermes => read_hermes(text, is_end),
            Self::Tags => read_tags(text, is_end, tools),
            Self::Mistral => read_mistral(text, is_end),
            Self::Llama => read_llama(text, is_end, tools),
        }
    }
}

impl fmt::Display for ToolForm {
    /// A description of the format.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Hermes => "as <tool_call>{json}",
            Self::Tags => "as <function=...><parameter=...>",
            Self::Llama => "as {\"name\": ..., \"parameters\": ...}",
            Self::Mistral => "as [TOOL_CALLS][{json}]",
        })
    }
}

/// The id of a marker that is a special token of the vocabulary.
pub(crate) fn special_id(tokenizer: &ChatTokenizer, mark: &str) -> Option<i64> {
    let (id, _) = tokenizer.added().into_iter().find(|(_, content)| content == mark)?;
    let (_, kind) = tokenizer.token(u32::try_from(id).ok()?)?;
    (kind == TokenUse::Special).then_some(id)
}

fn first_mark(text: &str, marks: &[&str]) -> Opening {
    if let Some(at) = marks.iter().filter_map(|mark| text.find(mark)).min() {
        return Opening::At(at);
    }
    let may_begin = |&at: &usize| marks.iter().any(|mark| mark.starts_with(&text[at..]));
    let from = text.char_indices().map(|(at, _)| at).find(may_begin);
    Opening::NotBefore(from.unwrap_or(text.len()))
}

/// Name and arguments of a call in JSON.
fn call_of(call: &Value) -> Option<(String, Map<String, Value>)> {
    let name = call["name"].as_str().filter(|name| !name.is_empty())?;
    let arguments = call.get("arguments").or_else(|| call.get("parameters"));
    let arguments = match arguments {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(arguments)) => arguments.clone(),
        // Encoded as a string, as in OpenAI's API.
        Some(Value::String(text)) => serde_json::from_str(text).ok()?,
        Some(_) => return None,
    };
    Some((name.to_owned(), arguments))
}

fn read_hermes(text: &str, is_end: bool) -> Reading {
    let body = &text[TOOL_CALL.len()..];
    for (at, _) in body.match_indices(TOOL_CALL_END) {
        let whole = TOOL_CALL.len() + at + TOOL_CALL_END.len();
        match serde_json::from_str::<Value>(&body[..at]) {
            Ok(call) => {
                return call_of(&call)
                    .map_or(Reading::Text(whole), |call| Reading::Calls(whole, vec![call]));
            }
            // The marker is inside a string.
            Err(error) if error.is_eof() && !body[..at].trim().is_empty() => {}
            Err(_) => return Reading::Text(whole),
        }
    }
    if !is_end {
        return Reading::More;
    }
    // The end of the answer replaces the marker.
    let call = serde_json::from_str(body).ok().and_then(|call| call_of(&call));
    call.map_or(Reading::Text(text.len()), |call| Reading::Calls(text.len(), vec![call]))
}

fn read_mistral(text: &str, is_end: bool) -> Reading {
    let body = &text[TOOL_CALLS.len()..];
    match first_value(body) {
        FirstJson::Incomplete if !is_end => Reading::More,
        FirstJson::Value(Value::Array(calls), bytes) => {
            let calls: Option<Vec<_>> = calls.iter().map(call_of).collect();
            let whole = TOOL_CALLS.len() + bytes;
            let calls = calls.filter(|calls| !calls.is_empty());
            calls.map_or(Reading::Text(whole), |calls| Reading::Calls(whole, calls))
        }
        _ => Reading::Text(text.len()),
    }
}

fn read_llama(text: &str, is_end: bool, tools: &Tools) -> Reading {
    let body = text.strip_prefix(PYTHON_TAG).unwrap_or(text);
    match first_value(body) {
        FirstJson::Incomplete if !is_end => Reading::More,
        FirstJson::Value(call, bytes) => {
            // Any JSON may be an answer: it is a call only if it names a tool.
            let call = call_of(&call).filter(|(name, _)| tools.has(name));
            let whole = text.len() - body.len() + bytes;
            call.map_or(Reading::Text(text.len()), |call| Reading::Calls(whole, vec![call]))
        }
        _ => Reading::Text(text.len()),
    }
}

/// The JSON at the start of a text.
enum FirstJson {
    Value(Value, usize),
    Incomplete,
    Other,
}

fn first_value(text: &str) -> FirstJson {
    let mut values = Deserializer::from_str(text).into_iter::<Value>();
    match values.next() {
        Some(Ok(value)) => FirstJson::Value(value, values.byte_offset()),
        None => FirstJson::Incomplete,
        Some(Err(error)) if error.is_eof() => FirstJson::Incomplete,
        Some(Err(_)) => FirstJson::Other,
    }
}

fn read_tags(text: &str, is_end: bool, tools: &Tools) -> Reading {
    let (open, close) = match text.starts_with(TOOL_CALL) {
        true => (TOOL_CALL, TOOL_CALL_END),
        false => ("", FUNCTION_END),
    };
    let body = &text[open.len()..];
    // A value may contain the marker: then the text before it is not a complete call.
    for (at, _) in body.match_indices(close) {
        let whole = open.len() + at + close.len();
        let inner = if open.is_empty() { &body[..whole] } else { &body[..at] };
        if let Some(calls) = functions_of(inner, tools) {
            return Reading::Calls(whole, calls);
        }
    }
    match (is_end, functions_of(body, tools)) {
        (false, _) => Reading::More,
        (true, Some(calls)) => Reading::Calls(text.len(), calls),
        (true, None) => Reading::Text(text.len()),
    }
}

/// The calls of a text that contains nothing else; `None` for other texts.
fn functions_of(text: &str, tools: &Tools) -> Option<Vec<(String, Map<String, Value>)>> {
    let (mut rest, mut calls) = (text.trim(), Vec::new());
    while !rest.is_empty() {
        let (name, mut inner) = rest.strip_prefix(FUNCTION)?.split_once('>')?;
        let mut arguments = Map::new();
        loop {
            inner = inner.trim_start();
            if let Some(behind) = inner.strip_prefix(FUNCTION_END) {
                rest = behind.trim_start();
                break;
            }
            let (key, behind) = inner.strip_prefix(PARAMETER)?.split_once('>')?;
            let (value, behind) = behind.split_once(PARAMETER_END)?;
            // Each marker is on its own line.
            let value = value.strip_prefix('\n').unwrap_or(value);
            let value = value.strip_suffix('\n').unwrap_or(value);
            let as_text = || Value::from(value);
            let value = match tools.is_text(name, key) {
                true => as_text(),
                false => serde_json::from_str(value).unwrap_or_else(|_| as_text()),
            };
            arguments.insert(key.to_owned(), value);
            inner = behind;
        }
        if name.is_empty() {
            return None;
        }
        calls.push((name.to_owned(), arguments));
    }
    (!calls.is_empty()).then_some(calls)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_follows_from_what_a_template_writes() {
        let check = |text: &str, expect: Option<ToolForm>| {
            assert_eq!(ToolForm::of_text(text), expect, "{text}");
        };
        let json = r#"{"name": "probe_name", "arguments": {"probe_key": "probe_value"}}"#;
        check(&format!("<tool_call>\n{json}\n</tool_call>"), Some(ToolForm::Hermes));
        check(&format!("[TOOL_CALLS][{json}]</s>"), Some(ToolForm::Mistral));
        check(&json.replace("arguments", "parameters"), Some(ToolForm::Llama));
        let tags = "<tool_call>\n<function=probe_name>\n<parameter=probe_key>\nprobe_value\n";
        check(tags, Some(ToolForm::Tags));
        check("", None);
        check("[TOOL_CALLS]probe_name[ARGS]{\"probe_key\": \"probe_value\"}", None);
        check("probe_name(probe_key=probe_value)", None);
    }
}
