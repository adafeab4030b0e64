//! Row layouts, recognised by their field names.
//!
//! Order matters: pre-tokenized columns win over a conversation in the same row, because they are
//! what the target really produced, and a list of turns wins over a prompt column in the same row
//! (UltraChat has both).

use serde_json::{Map, Value};

use crate::error::{Error, json_type};
use crate::message::{Conversation, Message, Role};

/// A data row after its layout is recognised.
#[derive(Debug, Clone, PartialEq)]
pub enum Row {
    /// Turns still to be rendered.
    Conversation(Conversation),
    /// Token ids with their supervision.
    Tokenized {
        /// Token ids of the whole sequence.
        input_ids: Vec<i64>,
        /// Whether the token at each position is supervised.
        loss_mask: Vec<bool>,
    },
}

/// Column pairs of single-turn layouts: the user's text, the model's answer.
const PAIRS: [(&str, &[&str]); 6] = [
    ("question", &["answer", "response"]),
    ("instruction", &["output", "response"]),
    ("prompt", &["completion", "response"]),
    ("query", &["response", "answer"]),
    ("problem", &["solution", "answer"]),
    // Nemotron's post-training set: `input` is the list of turns before the answer.
    ("input", &["output"]),
];

/// Columns that hold a list of turns; the first one present is used.
const TURN_LISTS: [&str; 3] = ["conversations", "conversation", "messages"];

/// Columns that hold the system prompt: OpenOrca and Nemotron have the second.
const SYSTEM: [&str; 2] = ["system", "system_prompt"];

/// Columns of a single turn that belong to its instruction: Alpaca's and Dolly's. With other
/// question columns they mean something else.
const INPUTS: [&str; 2] = ["input", "context"];

/// Where a row's turns are.
enum Layout<'a> {
    /// Its list of turns.
    Turns(&'static str, &'a Value),
    /// A question and an answer.
    Pair((&'static str, &'a Value), (&'static str, &'a Value)),
    /// The user's turns.
    Benchmark(&'a Value),
    /// A question alone.
    Question(&'static str, &'a Value),
}

impl Layout<'_> {
    /// Whether its turns begin with a system prompt that is not this `text`.
    fn begins_with_other_system(&self, text: &str) -> bool {
        let turns = match self {
            Self::Turns(_, turns) | Self::Pair((_, turns), _) | Self::Question(_, turns) => turns,
            // All of them are the user's.
            Self::Benchmark(_) => return false,
        };
        let first = || parse_turn(turns.as_array()?.first()?, "").ok();
        first().is_some_and(|first| first.role == Role::System && first.content != text)
    }
}

/// Whether a column of this `name` is read in any layout.
pub fn is_row_column(name: &str) -> bool {
    let fixed = ["turns", "tools", "input_ids", "loss_mask"];
    let lists = [&TURN_LISTS[..], &SYSTEM, &INPUTS, &fixed];
    let is_in_pair = |(asked, answers): &(&str, &[&str])| *asked == name || answers.contains(&name);
    lists.concat().contains(&name) || PAIRS.iter().any(is_in_pair)
}

/// Columns of a conversation row that have a value but that [`parse_row`] does not read, so their
/// contents are not in the prompt. None for pre-tokenized rows, which have their prompt, and for
/// rows of no known layout.
///
/// A column of the system prompt is one of them if the turns begin with another system prompt.
pub fn unread_columns(value: &Value) -> Vec<&str> {
    unread(value, Answer::Needed)
}

/// [`unread_columns`] of [`parse_prompt_row`].
pub fn unread_prompt_columns(value: &Value) -> Vec<&str> {
    unread(value, Answer::Optional)
}

fn unread(value: &Value, answer: Answer) -> Vec<&str> {
    let Some(row) = value.as_object() else { return Vec::new() };
    if tokens_of(row).is_some() {
        return Vec::new();
    }
    let Some(layout) = layout(row, answer) else { return Vec::new() };
    let mut read = vec!["tools"];
    let system = system_of(row).filter(|(_, text)| !layout.begins_with_other_system(text));
    read.extend(system.map(|(name, _)| name));
    match layout {
        Layout::Turns(field, _) => read.push(field),
        Layout::Benchmark(_) => read.push("turns"),
        Layout::Question(asked, _) => read.push(asked),
        Layout::Pair((asked, question), (answered, _)) => {
            read.extend([asked, answered]);
            read.extend(inputs_of(row, asked, question).map(|(name, _)| name));
        }
    }
    let is_empty = |value: &Value| match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    };
    let unread =
        row.iter().filter(|(name, value)| !read.contains(&name.as_str()) && !is_empty(value));
    unread.map(|(name, _)| name.as_str()).collect()
}

/// Recognises a row: pre-tokenized, ShareGPT (`conversations`), OpenAI (`messages`), a
/// prompt/response pair, or a benchmark's `turns` (user turns only).
///
/// # Errors
/// [`Error::RowNotObject`], [`Error::UnknownLayout`], [`Error::FieldType`],
/// [`Error::UnknownRole`], [`Error::MaskLength`]. None of them names the file and line.
pub fn parse_row(value: &Value) -> Result<Row, Error> {
    parse(value, Answer::Needed)
}

/// [`parse_row`] for rows to answer: a question alone (`question`, `instruction`, `prompt`,
/// `query`, `problem` or `input`) is a row too.
///
/// # Errors
/// As [`parse_row`].
pub fn parse_prompt_row(value: &Value) -> Result<Row, Error> {
    parse(value, Answer::Optional)
}

/// Whether a question needs an answer in the same row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Needed,
    Optional,
}

fn parse(value: &Value, answer: Answer) -> Result<Row, Error> {
    let row = value.as_object().ok_or(Error::RowNotObject { found: json_type(value) })?;
    if let Some((ids, mask)) = tokens_of(row) {
        return tokenized(ids, mask);
    }
    let mut messages = messages_of(row, answer)?;
    if let Some((_, system)) = system_of(row)
        && messages.first().is_none_or(|first| first.role != Role::System)
    {
        messages.insert(0, Message::text(Role::System, system));
    }
    Ok(Row::Conversation(Conversation { messages, tools: list_of(row, "tools", "tools")? }))
}

fn present<'a>(row: &'a Map<String, Value>, field: &str) -> Option<&'a Value> {
    row.get(field).filter(|value| !value.is_null())
}

/// The columns of a pre-tokenized row.
fn tokens_of(row: &Map<String, Value>) -> Option<(&Value, &Value)> {
    Some((present(row, "input_ids")?, present(row, "loss_mask")?))
}

/// The system prompt in a column of its own, and that column.
fn system_of(row: &Map<String, Value>) -> Option<(&'static str, &str)> {
    let texts = SYSTEM.iter().filter_map(|&name| Some((name, present(row, name)?.as_str()?)));
    texts.into_iter().find(|(_, text)| !text.is_empty())
}

fn layout(row: &Map<String, Value>, needed: Answer) -> Option<Layout<'_>> {
    let named = |name: &'static str| Some((name, present(row, name)?));
    if let Some((field, turns)) = TURN_LISTS.iter().find_map(|field| named(field)) {
        return Some(Layout::Turns(field, turns));
    }
    let pair = |(asked, answers): &(&'static str, &'static [&'static str])| {
        Some((named(asked)?, answers.iter().find_map(|answer| named(answer))?))
    };
    if let Some((question, answer)) = PAIRS.iter().find_map(pair) {
        return Some(Layout::Pair(question, answer));
    }
    if let Some((_, turns)) = named("turns") {
        return Some(Layout::Benchmark(turns));
    }
    let question = || PAIRS.iter().find_map(|(asked, _)| named(asked));
    let (asked, question) = (needed == Answer::Optional).then(question)??;
    Some(Layout::Question(asked, question))
}

fn messages_of(row: &Map<String, Value>, needed: Answer) -> Result<Vec<Message>, Error> {
    match layout(row, needed) {
        Some(Layout::Turns(field, turns)) => turn_list(turns, field),
        Some(Layout::Pair((asked, question), (answered, answer))) => {
            pair(row, asked, question, answered, answer)
        }
        Some(Layout::Benchmark(turns)) => benchmark_turns(turns),
        Some(Layout::Question(asked, question)) => question_turns(row, asked, question),
        None => {
            let fields = row.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            Err(Error::UnknownLayout { fields })
        }
    }
}

/// A prompt/response pair. Either side may itself be a list of turns, as TRL writes them.
fn pair(
    row: &Map<String, Value>,
    asked: &str,
    question: &Value,
    answered: &str,
    answer: &Value,
) -> Result<Vec<Message>, Error> {
    let mut messages = question_turns(row, asked, question)?;
    match answer {
        Value::Array(_) => messages.extend(turn_list(answer, answered)?),
        _ => messages.push(Message::text(Role::Assistant, string(answer, answered)?)),
    }
    Ok(messages)
}

/// The question, a text or a list of turns.
fn question_turns(
    row: &Map<String, Value>,
    asked: &str,
    question: &Value,
) -> Result<Vec<Message>, Error> {
    match question {
        Value::Array(_) => turn_list(question, asked),
        _ => {
            let mut text = string(question, asked)?.to_owned();
            for (_, input) in inputs_of(row, asked, question) {
                text = format!("{text}\n{input}");
            }
            Ok(vec![Message::text(Role::User, text)])
        }
    }
}

/// Text that belongs to an instruction and is appended to it, with its columns.
fn inputs_of<'a>(
    row: &'a Map<String, Value>,
    asked: &str,
    question: &Value,
) -> impl Iterator<Item = (&'static str, &'a str)> {
    let takes = asked == "instruction" && question.is_string();
    let texts = INPUTS.iter().filter_map(|&name| Some((name, present(row, name)?.as_str()?)));
    texts.filter(move |(_, text)| takes && !text.is_empty())
}

/// `turns` of MT-Bench and similar: the user's turns in order, without answers.
fn benchmark_turns(turns: &Value) -> Result<Vec<Message>, Error> {
    array(turns, "turns")?
        .iter()
        .map(|turn| Ok(Message::text(Role::User, string(turn, "turns[]")?)))
        .collect()
}

/// A list of turns, or a JSON string that contains one, as in some Parquet files.
fn turn_list(turns: &Value, field: &str) -> Result<Vec<Message>, Error> {
    let parsed = turns.as_str().and_then(|text| serde_json::from_str(text).ok());
    array(parsed.as_ref().unwrap_or(turns), field)?
        .iter()
        .map(|turn| parse_turn(turn, field))
        .collect()
}

/// Keys of a turn that are read.
const TURN_KEYS: [&str; 11] = [
    "role",
    "from",
    "content",
    "value",
    "reasoning_content",
    "thinking",
    "reasoning",
    "tool_calls",
    "tool_call_id",
    "name",
    "weight",
];

fn parse_turn(turn: &Value, field: &str) -> Result<Message, Error> {
    let Some(turn) = turn.as_object() else {
        return Err(field_type(&format!("{field}[]"), "an object", turn));
    };
    let either = |name, other| present(turn, name).or_else(|| present(turn, other));
    let role = either("role", "from").unwrap_or(&Value::Null);
    let role = Role::parse(string(role, &format!("{field}[].role"))?)?;
    let content = match either("content", "value") {
        None => Value::Null,
        Some(content @ (Value::String(_) | Value::Array(_))) => content.clone(),
        Some(other) => return Err(field_type(&format!("{field}[].content"), "a string", other)),
    };
    // Columns of Arrow files are null if a turn has no such key.
    let is_unknown = |key: &&String| !TURN_KEYS.contains(&key.as_str()) && !turn[*key].is_null();
    Ok(Message {
        role,
        content,
        reasoning_content: reasoning_of(turn, field)?,
        tool_calls: list_of(turn, "tool_calls", &format!("{field}[].tool_calls"))?,
        tool_call_id: word(turn, "tool_call_id", field)?,
        name: word(turn, "name", field)?,
        context_only: weight(turn, field)? == Some(0.0),
        unknown_keys: turn.keys().filter(is_unknown).cloned().collect(),
    })
}

/// The first recorded reasoning that is not blank: given an empty one, templates open and close a
/// reasoning block for nothing.
fn reasoning_of(turn: &Map<String, Value>, field: &str) -> Result<Option<String>, Error> {
    for name in ["reasoning_content", "thinking", "reasoning"] {
        let Some(reasoning) = present(turn, name) else { continue };
        let text = string(reasoning, &format!("{field}[].{name}"))?;
        if !text.trim().is_empty() {
            return Ok(Some(text.to_owned()));
        }
    }
    Ok(None)
}

/// How much a turn counts, as OpenAI's fine-tuning files say it: 0 or 1.
fn weight(turn: &Map<String, Value>, field: &str) -> Result<Option<f64>, Error> {
    let Some(value) = present(turn, "weight") else { return Ok(None) };
    let known = value.as_f64().filter(|weight| [0.0, 1.0].contains(weight));
    known.map(Some).ok_or_else(|| field_type(&format!("{field}[].weight"), "0 or 1", value))
}

/// A name or id, which some programs write as a number.
fn word(turn: &Map<String, Value>, name: &str, field: &str) -> Result<Option<String>, Error> {
    match present(turn, name) {
        None => Ok(None),
        Some(Value::Number(number)) => Ok(Some(number.to_string())),
        Some(value) => Ok(Some(string(value, &format!("{field}[].{name}"))?.to_owned())),
    }
}

/// A list, or a JSON string that contains one, as in Arrow files. An empty one counts as none.
fn list_of(object: &Map<String, Value>, name: &str, field: &str) -> Result<Option<Value>, Error> {
    let expected = "a list or a string of JSON that holds one";
    let list = match present(object, name) {
        None => return Ok(None),
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(value @ Value::String(text)) => {
            serde_json::from_str(text).map_err(|_| field_type(field, expected, value))?
        }
        Some(value) => value.clone(),
    };
    match list {
        Value::Array(ref items) => Ok((!items.is_empty()).then_some(list)),
        Value::Null => Ok(None),
        other => Err(field_type(field, expected, &other)),
    }
}

fn tokenized(ids: &Value, mask: &Value) -> Result<Row, Error> {
    let ids = array(ids, "input_ids")?;
    let mask = array(mask, "loss_mask")?;
    if ids.len() != mask.len() {
        return Err(Error::MaskLength { input_ids: ids.len(), loss_mask: mask.len() });
    }
    let input_ids = ids.iter().map(token_id).collect::<Result<_, _>>()?;
    let loss_mask = mask.iter().map(mask_entry).collect::<Result<_, _>>()?;
    Ok(Row::Tokenized { input_ids, loss_mask })
}

fn token_id(value: &Value) -> Result<i64, Error> {
    let id = value.as_i64().filter(|&id| (0..=i64::from(i32::MAX)).contains(&id));
    id.ok_or_else(|| field_type("input_ids[]", "a token id", value))
}

fn mask_entry(value: &Value) -> Result<bool, Error> {
    match (value.as_bool(), value.as_f64()) {
        (Some(flag), _) => Ok(flag),
        (_, Some(0.0)) => Ok(false),
        (_, Some(1.0)) => Ok(true),
        _ => Err(field_type("loss_mask[]", "0 or 1", value)),
    }
}

fn array<'a>(value: &'a Value, field: &str) -> Result<&'a Vec<Value>, Error> {
    value.as_array().ok_or_else(|| field_type(field, "an array", value))
}

fn string<'a>(value: &'a Value, field: &str) -> Result<&'a str, Error> {
    value.as_str().ok_or_else(|| field_type(field, "a string", value))
}

fn field_type(field: &str, expected: &'static str, found: &Value) -> Error {
    Error::FieldType { field: field.to_owned(), expected, found: json_type(found) }
}

#[cfg(test)]
mod tests;
