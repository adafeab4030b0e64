//! The field's row layouts, recognised by their field names.
//!
//! Order matters: pre-tokenized columns win over the conversation beside them, because they are
//! what the target really produced, and a list of turns wins over a prompt column beside it
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

/// Column pairs of single-turn layouts: what the user says, what the model answers.
const PAIRS: [(&str, &[&str]); 6] = [
    ("question", &["answer", "response"]),
    ("instruction", &["output", "response"]),
    ("prompt", &["completion", "response"]),
    ("query", &["response", "answer"]),
    ("problem", &["solution", "answer"]),
    // Nemotron's post-training set: `input` is the list of turns before the answer.
    ("input", &["output"]),
];

/// Recognises a row: pre-tokenized, ShareGPT (`conversations`), OpenAI (`messages`), a
/// prompt/response pair, or a benchmark's `turns` (user turns only).
///
/// # Errors
/// [`Error::RowNotObject`], [`Error::UnknownLayout`], [`Error::FieldType`],
/// [`Error::UnknownRole`], [`Error::MaskLength`]. None of them names the file and line.
pub fn parse_row(value: &Value) -> Result<Row, Error> {
    parse(value, Answer::Needed)
}

/// [`parse_row`] for what is still to be answered: a question alone (`question`, `instruction`,
/// `prompt`, `query`, `problem` or `input`) is a row too.
///
/// # Errors
/// As [`parse_row`].
pub fn parse_prompt_row(value: &Value) -> Result<Row, Error> {
    parse(value, Answer::Optional)
}

/// Whether a question needs an answer beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Needed,
    Optional,
}

fn parse(value: &Value, answer: Answer) -> Result<Row, Error> {
    let row = value.as_object().ok_or(Error::RowNotObject { found: json_type(value) })?;
    if let (Some(ids), Some(mask)) = (present(row, "input_ids"), present(row, "loss_mask")) {
        return tokenized(ids, mask);
    }
    let mut messages = messages_of(row, answer)?;
    if let Some(system) = present(row, "system").and_then(Value::as_str)
        && !system.is_empty()
        && messages.first().is_none_or(|first| first.role != Role::System)
    {
        messages.insert(0, Message::text(Role::System, system));
    }
    Ok(Row::Conversation(Conversation { messages, tools: list_of(row, "tools", "tools")? }))
}

fn present<'a>(row: &'a Map<String, Value>, field: &str) -> Option<&'a Value> {
    row.get(field).filter(|value| !value.is_null())
}

fn messages_of(row: &Map<String, Value>, needed: Answer) -> Result<Vec<Message>, Error> {
    for field in ["conversations", "conversation", "messages"] {
        if let Some(turns) = present(row, field) {
            return turn_list(turns, field);
        }
    }
    for (asked, answers) in PAIRS {
        let Some(question) = present(row, asked) else { continue };
        if let Some((field, answer)) = answers.iter().find_map(|f| Some((f, present(row, f)?))) {
            return pair(row, (asked, question), (field, answer));
        }
    }
    if let Some(turns) = present(row, "turns") {
        return benchmark_turns(turns);
    }
    let asked = || PAIRS.iter().find_map(|(asked, _)| Some((*asked, present(row, asked)?)));
    if needed == Answer::Optional
        && let Some((asked, question)) = asked()
    {
        return question_turns(row, (asked, question));
    }
    let fields = row.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
    Err(Error::UnknownLayout { fields })
}

/// A prompt/response pair. Either side may itself be a list of turns, as TRL writes them.
fn pair(
    row: &Map<String, Value>,
    (asked, question): (&str, &Value),
    (answered, answer): (&str, &Value),
) -> Result<Vec<Message>, Error> {
    let mut messages = question_turns(row, (asked, question))?;
    match answer {
        Value::Array(_) => messages.extend(turn_list(answer, answered)?),
        _ => messages.push(Message::text(Role::Assistant, string(answer, answered)?)),
    }
    Ok(messages)
}

/// What is asked, a text or a list of turns.
fn question_turns(
    row: &Map<String, Value>,
    (asked, question): (&str, &Value),
) -> Result<Vec<Message>, Error> {
    match question {
        Value::Array(_) => turn_list(question, asked),
        _ => {
            let text = with_input(row, asked, string(question, asked)?);
            Ok(vec![Message::text(Role::User, text)])
        }
    }
}

/// Alpaca's optional `input` goes on the line after its instruction.
fn with_input(row: &Map<String, Value>, asked: &str, question: &str) -> String {
    match present(row, "input").and_then(Value::as_str) {
        Some(input) if asked == "instruction" && !input.is_empty() => {
            format!("{question}\n{input}")
        }
        _ => question.to_owned(),
    }
}

/// `turns` of MT-Bench and similar: what the user says, in order, without answers.
fn benchmark_turns(turns: &Value) -> Result<Vec<Message>, Error> {
    array(turns, "turns")?
        .iter()
        .map(|turn| Ok(Message::text(Role::User, string(turn, "turns[]")?)))
        .collect()
}

fn turn_list(turns: &Value, field: &str) -> Result<Vec<Message>, Error> {
    array(turns, field)?.iter().map(|turn| parse_turn(turn, field)).collect()
}

/// Keys of a turn that are read.
const TURN_KEYS: [&str; 10] = [
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
    // Columns of Arrow files are null where a turn has no such key.
    let is_unknown = |key: &&String| !TURN_KEYS.contains(&key.as_str()) && !turn[*key].is_null();
    Ok(Message {
        role,
        content,
        reasoning_content: reasoning_of(turn, field)?,
        tool_calls: list_of(turn, "tool_calls", &format!("{field}[].tool_calls"))?,
        tool_call_id: word(turn, "tool_call_id", field)?,
        name: word(turn, "name", field)?,
        unknown_keys: turn.keys().filter(is_unknown).cloned().collect(),
    })
}

/// The first recorded reasoning that is not blank: templates that see an empty one open and close a
/// channel for nothing.
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

/// A name or id, which some programs write as a number.
fn word(turn: &Map<String, Value>, name: &str, field: &str) -> Result<Option<String>, Error> {
    match present(turn, name) {
        None => Ok(None),
        Some(Value::Number(number)) => Ok(Some(number.to_string())),
        Some(value) => Ok(Some(string(value, &format!("{field}[].{name}"))?.to_owned())),
    }
}

/// A list, or a string of JSON that holds one, as in Arrow files. An empty one is none.
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
mod tests {
    use serde_json::json;

    use super::*;

    fn conversation(row: &Value) -> Conversation {
        match parse_row(row).unwrap() {
            Row::Conversation(conversation) => conversation,
            Row::Tokenized { .. } => panic!("{row} was taken for a tokenized row"),
        }
    }

    /// Compares `role: content` of every turn, joined by ` | `.
    fn check(row: Value, expect: &str) {
        let found: Vec<String> = conversation(&row)
            .messages
            .iter()
            .map(|m| format!("{:?}: {}", m.role, m.content.as_str().unwrap_or("-")))
            .collect();
        assert_eq!(found.join(" | "), expect, "{row}");
    }

    fn check_error(row: Value, expect: &str) {
        let error = parse_row(&row).unwrap_err().to_string();
        assert!(error.contains(expect), "{row}: {error}");
    }

    #[test]
    fn every_layout_is_recognised() {
        let expect = "User: q | Assistant: a";
        let turns = json!([{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]);
        check(json!({"id": "x", "conversations": turns}), expect);
        check(json!({"question": "q", "answer": "a"}), expect);
        check(json!({"messages": null, "question": "q", "answer": "a"}), expect);
        check(json!({"prompt": "q", "completion": "a"}), expect);
        check(json!({"query": "q", "response": "a"}), expect);
        check(json!({"instruction": "q", "response": "a"}), expect);
        check(json!({"instruction": "q", "input": "", "output": "a"}), expect);
        check(
            json!({"instruction": "q", "input": "i", "output": "a"}),
            "User: q\ni | Assistant: a",
        );
        check(json!({"problem": "q", "solution": "a", "answer": "4"}), expect);
        check(json!({"turns": ["one", "two"], "question_id": 1}), "User: one | User: two");
        let with_system = json!({"system": "s", "question": "q", "answer": "a"});
        check(with_system, "System: s | User: q | Assistant: a");
    }

    #[test]
    fn either_side_of_a_pair_may_be_a_list_of_turns() {
        let user = json!({"role": "user", "content": "q"});
        check(json!({"input": [user], "output": "a"}), "User: q | Assistant: a");
        let prompt = json!([{"role": "system", "content": "s"}, user]);
        let completion = json!([{"role": "assistant", "content": "a"}]);
        let both = json!({"prompt": prompt, "completion": completion});
        check(both, "System: s | User: q | Assistant: a");
    }

    #[test]
    fn a_list_of_turns_wins_over_columns_beside_it() {
        let turns = json!([{"from": "human", "value": "q"}]);
        let row =
            json!({"instruction": "i", "response": "r", "system": "s", "conversations": turns});
        check(row, "System: s | User: q");
        let turns = json!([{"role": "system", "content": "own"}, {"role": "user", "content": "q"}]);
        check(json!({"prompt": "ignored", "messages": turns}), "System: own | User: q");
        check(json!({"system": "s", "messages": turns}), "System: own | User: q");
    }

    #[test]
    fn pre_tokenized_columns_win() {
        let check = |row: Value, input_ids: Vec<i64>, loss_mask: Vec<bool>| {
            assert_eq!(parse_row(&row).unwrap(), Row::Tokenized { input_ids, loss_mask });
        };
        let row = json!({"question": "q", "answer": "a", "input_ids": [5, 6], "loss_mask": [0, 1]});
        check(row, vec![5, 6], vec![false, true]);
        check(json!({"input_ids": [5], "loss_mask": [true]}), vec![5], vec![true]);
        check_error(json!({"input_ids": [1], "loss_mask": []}), "1 entries but loss_mask has 0");
        check_error(json!({"input_ids": [-1], "loss_mask": [1]}), "must be a token id");
        check_error(json!({"input_ids": [1], "loss_mask": [2]}), "must be 0 or 1");
    }

    #[test]
    fn tools_and_reasoning_are_kept() {
        let call = json!([{"function": {"name": "f", "arguments": "{}"}}]);
        let conversation = conversation(&json!({
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": null, "tool_calls": call, "thinking": "hm"},
                {"role": "tool", "content": "1", "tool_call_id": "c"},
                {"role": "assistant", "content": "a", "tool_calls": []}],
            "tools": "[{\"name\": \"f\"}]"
        }));
        assert_eq!(conversation.tools, Some(json!([{"name": "f"}])));
        let turns = &conversation.messages;
        assert_eq!((&turns[1].content, &turns[1].tool_calls), (&Value::Null, &Some(call)));
        assert_eq!(turns[1].reasoning_content.as_deref(), Some("hm"));
        assert_eq!(turns[2].tool_call_id.as_deref(), Some("c"));
        assert_eq!(turns[3].tool_calls, None);
    }

    #[test]
    fn content_may_be_missing_or_in_parts() {
        let parts = json!([{"type": "text", "text": "q"}]);
        let conversation = conversation(&json!({"messages": [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": null},
            {"role": "assistant", "content": ""},
            {"from": "gpt"}]}));
        let contents: Vec<&Value> = conversation.messages.iter().map(|m| &m.content).collect();
        assert_eq!(contents, [&parts, &Value::Null, &json!(""), &Value::Null]);
        let number = json!([{"role": "user", "content": 5}]);
        check_error(json!({"messages": number}), "content must be a string");
    }

    #[test]
    fn keys_that_nothing_reads_are_named() {
        let turns = json!([
            {"role": "user", "contnt": "q", "weight": 1, "refusal": null},
            {"from": "gpt", "value": "a"}]);
        let messages = conversation(&json!({"conversations": turns, "id": 1})).messages;
        assert_eq!(messages[0].unknown_keys, ["contnt", "weight"]);
        assert!(messages[1].unknown_keys.is_empty());
    }

    #[test]
    fn blank_reasoning_is_none() {
        let reasoning = |turn: Value| {
            let row = json!({"messages": [turn]});
            conversation(&row).messages[0].reasoning_content.clone()
        };
        let blank = json!({"role": "assistant", "content": "a", "reasoning_content": "\n "});
        assert_eq!(reasoning(blank), None);
        let second = json!({"role": "assistant", "reasoning_content": "", "thinking": " hm"});
        assert_eq!(reasoning(second).as_deref(), Some(" hm"));
        let wrong = json!({"role": "assistant", "content": "a", "reasoning": {"text": "x"}});
        check_error(json!({"messages": [wrong]}), "messages[].reasoning must be a string");
    }

    #[test]
    fn ids_may_be_numbers_and_calls_a_string_of_json() {
        let turn = json!({"role": "tool", "tool_call_id": 5, "name": null,
            "tool_calls": "[{\"name\": \"f\"}]"});
        let message = conversation(&json!({"messages": [turn]})).messages.remove(0);
        assert_eq!((message.tool_call_id.as_deref(), message.name), (Some("5"), None));
        assert_eq!(message.tool_calls, Some(json!([{"name": "f"}])));
        let call = json!({"role": "assistant", "tool_calls": {"name": "f"}});
        check_error(json!({"messages": [call]}), "messages[].tool_calls must be a list");
        let name = json!({"role": "user", "content": "q", "name": ["n"]});
        check_error(json!({"messages": [name]}), "messages[].name must be a string");
    }

    #[test]
    fn a_question_alone_is_a_prompt() {
        let check = |row: Value, expect: &str| {
            let Row::Conversation(found) = parse_prompt_row(&row).unwrap() else { panic!("{row}") };
            let texts: Vec<&str> =
                found.messages.iter().filter_map(|m| m.content.as_str()).collect();
            assert_eq!(texts.join(" | "), expect, "{row}");
        };
        check(json!({"question": "q"}), "q");
        check(json!({"question": "q", "answer": null}), "q");
        check(json!({"question": "q", "answer": "a"}), "q | a");
        check(json!({"instruction": "q", "input": "i"}), "q\ni");
        check(json!({"prompt": "q", "system": "s"}), "s | q");
        check(json!({"prompt": [{"role": "user", "content": "q"}]}), "q");
        check(json!({"prompt": "ignored", "turns": ["a", "b"]}), "a | b");
        check_error(json!({"question": "q", "answre": "a"}), "fields [question, answre]");
        assert!(parse_prompt_row(&json!({"text": "q"})).is_err());
    }

    #[test]
    fn tools_may_be_empty_in_many_ways() {
        for tools in [json!(null), json!([]), json!(""), json!("  "), json!("null"), json!("[]")] {
            let row = json!({"messages": [], "tools": tools});
            assert_eq!(conversation(&row).tools, None, "{row}");
        }
    }

    #[test]
    fn a_wrong_row_says_what_is_wrong() {
        check_error(json!([1]), "must be a JSON object, found an array");
        check_error(json!({"text": "x", "url": "y"}), "fields [text, url]");
        check_error(json!({"messages": "x"}), "messages must be an array");
        check_error(json!({"messages": ["q"]}), "messages[] must be an object");
        check_error(json!({"messages": [{"content": "q"}]}), "messages[].role must be a string");
        check_error(json!({"messages": [{"role": "alien", "content": ""}]}), "\"alien\"");
        check_error(json!({"question": "q", "answer": 4}), "answer must be a string");
        check_error(json!({"messages": [], "tools": "{"}), "tools must be a list or a string");
        check_error(json!({"messages": [], "tools": {"a": 1}}), "found an object");
    }
}
