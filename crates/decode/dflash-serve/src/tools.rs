//! `tools`: the functions that a model may call, and whether it must.

use std::collections::BTreeSet;

use dflash_chat::{ChatTokenizer, Message};
use dflash_decode::GrammarSource;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::fields::Fields;
use crate::format::{Format, check_schema};
use crate::refusal::Refusal;
use crate::tool_form::ToolForm;

/// OpenAI's limit.
const MOST_TOOLS: usize = 128;
/// Maximum number of calls of an answer for which calls are required.
const MOST_CALLS: usize = 16;

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tools {
    /// In the form that the template takes.
    pub(crate) list: Value,
    functions: Vec<Function>,
    choice: Choice,
    /// Whether an answer may have several calls.
    pub(crate) parallel: bool,
}

#[derive(Debug, Clone, PartialEq)]
struct Function {
    name: String,
    parameters: Value,
}

/// Which call is required.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Choice {
    Auto,
    Required,
    /// The function at this index of the list.
    Named(usize),
}

/// The field `tool_choice` as it is sent.
#[derive(Deserialize)]
#[serde(untagged)]
enum SentChoice {
    Word(String),
    Named {
        #[serde(rename = "type")]
        kind: String,
        function: SentName,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SentName {
    name: String,
}

/// The tools that may be called; `None` if there are none, or `tool_choice` is none.
pub(crate) fn read(fields: &mut Fields) -> Result<Option<Tools>, Refusal> {
    let sent: Vec<Value> = fields.take("tools")?.unwrap_or_default();
    let choice: Option<SentChoice> = fields.take("tool_choice")?;
    let parallel: Option<bool> = fields.take("parallel_tool_calls")?;
    if sent.len() > MOST_TOOLS {
        let reason = format!("has {} functions, but it may have {MOST_TOOLS}", sent.len());
        return Err(bad("tools".into(), reason));
    }
    let each = sent.iter().enumerate().map(|(at, tool)| function(at, tool));
    let functions: Vec<Function> = each.collect::<Result<_, _>>()?;
    let mut names = BTreeSet::new();
    if let Some(twice) = functions.iter().find(|function| !names.insert(&function.name)) {
        return Err(bad("tools".into(), format!("has two functions of the name {:?}", twice.name)));
    }
    let choice = match choice {
        None => Choice::Auto,
        Some(SentChoice::Word(word)) => match word.as_str() {
            "none" => return Ok(None),
            "auto" => Choice::Auto,
            "required" if functions.is_empty() => return Err(no_tools()),
            "required" => Choice::Required,
            _ => return Err(bad("tool_choice".into(), unknown_choice(&word))),
        },
        Some(SentChoice::Named { kind, .. }) if kind != "function" => {
            return Err(bad(
                "tool_choice.type".into(),
                format!("is {kind:?}, but it must be function"),
            ));
        }
        Some(SentChoice::Named { function: SentName { name }, .. }) => {
            let at = functions.iter().position(|function| function.name == name);
            let reason = || format!("is {name:?}, which is not in tools");
            Choice::Named(at.ok_or_else(|| bad("tool_choice.function.name".into(), reason()))?)
        }
    };
    let parallel = parallel.unwrap_or(true);
    Ok((!functions.is_empty()).then(|| Tools { list: sent.into(), functions, choice, parallel }))
}

fn no_tools() -> Refusal {
    bad("tool_choice".into(), "needs tools".into())
}

fn unknown_choice(word: &str) -> String {
    format!("is {word:?}, but it must be auto, none, required or a function's name as an object")
}

fn bad(param: String, reason: String) -> Refusal {
    Refusal::BadField { param, reason }
}

/// An entry of `tools`.
fn function(at: usize, tool: &Value) -> Result<Function, Refusal> {
    let param = |field: &str| format!("tools[{at}]{field}");
    if tool["type"] != "function" {
        return Err(bad(param(".type"), "must be function".into()));
    }
    let Some(function) = tool["function"].as_object() else {
        return Err(bad(param(".function"), "must be an object".into()));
    };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    let name = function.get("name").and_then(Value::as_str).unwrap_or_default();
    if name.is_empty() || name.len() > 64 || !name.chars().all(is_plain) {
        let reason = "must be 1 to 64 letters, digits, _, - or .";
        return Err(bad(param(".function.name"), reason.into()));
    }
    let parameters = match function.get("parameters") {
        None | Some(Value::Null) => json!({"type": "object", "properties": {}}),
        Some(parameters @ Value::Object(_)) => parameters.clone(),
        Some(_) => {
            let reason = "must be a JSON schema of an object";
            return Err(bad(param(".function.parameters"), reason.into()));
        }
    };
    Ok(Function { name: name.into(), parameters })
}

impl Tools {
    /// Whether there is a function of that name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.functions.iter().any(|function| function.name == name)
    }

    /// Whether a parameter's value is or may be a string by the function's schema.
    pub(crate) fn is_text(&self, function: &str, parameter: &str) -> bool {
        let function = self.functions.iter().find(|known| known.name == function);
        let kind = function.map(|known| &known.parameters["properties"][parameter]["type"]);
        kind.is_none_or(|kind| kind.is_null() || kind == "string")
    }

    /// Whether the answer must be calls.
    pub(crate) fn are_required(&self) -> bool {
        self.choice != Choice::Auto
    }

    /// The format of an answer that must call some of these; `None` if it need not.
    ///
    /// # Errors
    /// A call format other than JSON; parameters whose schema cannot be enforced.
    pub(crate) fn format(
        &self,
        form: ToolForm,
        tokenizer: &ChatTokenizer,
    ) -> Result<Option<Format>, Refusal> {
        let callable = match self.choice {
            Choice::Auto => return Ok(None),
            Choice::Required => 0..self.functions.len(),
            Choice::Named(at) => at..at + 1,
        };
        let Some(frame) = form.frame() else {
            let reason = format!(
                "requires a call, but this target's template writes calls {form}, and only calls in JSON can be required. Send auto"
            );
            return Err(bad("tool_choice".into(), reason));
        };
        let mark = |mark: &str| lark_mark(tokenizer, mark);
        let text = |text: &str| Value::from(text).to_string();
        let mut rules = String::new();
        for at in callable.clone() {
            let Function { name, parameters } = &self.functions[at];
            check_schema(&format!("tools[{at}].function.parameters"), parameters)?;
            let begins = format!("{{\"name\": {}, \"{}\": ", text(name), frame.arguments);
            let arguments = GrammarSource::json_literal(&as_object(parameters));
            rules +=
                &format!("call_{at}: {} args_{at} \"}}\"\nargs_{at}: {arguments}\n", text(&begins));
        }
        // One grammar covers all functions.
        let all: Vec<&Value> = callable.clone().map(|at| &self.functions[at].parameters).collect();
        check_schema("tools", &json!({"anyOf": all}))?;
        let calls: Vec<String> = callable.map(|at| format!("call_{at}")).collect();
        let most = match self.choice {
            Choice::Required if self.parallel && frame.between.is_some() => MOST_CALLS - 1,
            _ => 0,
        };
        let parts = |parts: &[&str]| {
            let each = parts.iter().filter(|part| !part.is_empty()).map(|part| mark(part));
            each.collect::<Vec<_>>().join(" ")
        };
        let more = match frame.between {
            Some(between) if most > 0 => format!("({} call){{0,{most}}}", parts(between)),
            _ => String::new(),
        };
        let lark = format!(
            "start: {} call {more} {}\ncall: {}\n{rules}",
            parts(frame.open),
            parts(frame.close),
            calls.join(" | ")
        );
        Ok(Some(Format { param: "tools", source: GrammarSource::Lark(lark) }))
    }
}

/// Arguments are an object, even if their schema does not say so.
fn as_object(parameters: &Value) -> Value {
    let mut parameters = parameters.clone();
    if let Some(fields) = parameters.as_object_mut().filter(|fields| !fields.contains_key("$ref")) {
        fields.entry("type").or_insert("object".into());
    }
    parameters
}

/// Part of a call's frame: its special token if the vocabulary has one.
fn lark_mark(tokenizer: &ChatTokenizer, mark: &str) -> String {
    let special = crate::tool_form::special_id(tokenizer, mark);
    special.map_or_else(|| Value::from(mark).to_string(), |id| format!("<[{id}]>"))
}

/// Parses arguments of calls in the messages, which OpenAI encodes as strings, into the objects
/// that templates print.
///
/// # Errors
/// A call without a name, or arguments that are not an object.
pub(crate) fn open_arguments(messages: &mut [Message]) -> Result<(), Refusal> {
    for (at, message) in messages.iter_mut().enumerate() {
        let calls = message.tool_calls.as_mut().and_then(Value::as_array_mut);
        for (number, call) in calls.into_iter().flatten().enumerate() {
            let param = |field| format!("messages[{at}].tool_calls[{number}].function.{field}");
            if !call["function"]["name"].is_string() {
                return Err(bad(param("name"), "is missing".into()));
            }
            let arguments = call["function"]["arguments"].take();
            let opened = match &arguments {
                Value::String(text) if text.trim().is_empty() => Some(json!({})),
                Value::String(text) => serde_json::from_str(text).ok(),
                Value::Null => Some(json!({})),
                other => Some(other.clone()),
            };
            let reason = || "are not a JSON object, or one written as a string".into();
            let opened = opened.filter(Value::is_object);
            call["function"]["arguments"] =
                opened.ok_or_else(|| bad(param("arguments"), reason()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
    }

    fn read_from(fields: &Value) -> Result<Option<Tools>, Refusal> {
        read(&mut Fields::parse(fields.to_string().as_bytes(), 0)?)
    }

    #[test]
    fn tools_and_the_choice_among_them_are_openais() {
        let check = |choice: Value, expect: Option<Choice>| {
            let fields = json!({"tools": [tool("a"), tool("b")], "tool_choice": choice});
            assert_eq!(read_from(&fields).unwrap().map(|tools| tools.choice), expect, "{choice}");
        };
        check(Value::Null, Some(Choice::Auto));
        check(json!("auto"), Some(Choice::Auto));
        check(json!("none"), None);
        check(json!("required"), Some(Choice::Required));
        check(json!({"type": "function", "function": {"name": "b"}}), Some(Choice::Named(1)));
        assert_eq!(read_from(&json!({})).unwrap(), None);
        assert_eq!(read_from(&json!({"tools": [], "tool_choice": "auto"})).unwrap(), None);
    }

    #[test]
    fn what_is_no_tool_is_refused_by_name() {
        let check = |fields: Value, words: &str| {
            let text = read_from(&fields).unwrap_err().to_string();
            assert!(text.starts_with(words), "{fields}: {text}");
        };
        check(json!({"tools": {}}), "tools is not usable");
        check(json!({"tools": [{"type": "web_search"}]}), "tools[0].type must be function");
        check(json!({"tools": [tool("a"), tool("a b")]}), "tools[1].function.name must be");
        check(json!({"tools": [tool("a"), tool("a")]}), "tools has two functions");
        let odd = json!({"type": "function", "function": {"name": "a", "parameters": [1]}});
        check(json!({"tools": [odd]}), "tools[0].function.parameters must be");
        check(json!({"tools": vec![tool("a"); 129]}), "tools has 129");
        check(json!({"tool_choice": "required"}), "tool_choice needs tools");
        check(json!({"tools": [tool("a")], "tool_choice": "any"}), "tool_choice is \"any\"");
        let other = json!({"type": "function", "function": {"name": "b"}});
        check(
            json!({"tools": [tool("a")], "tool_choice": other}),
            "tool_choice.function.name is \"b\"",
        );
    }

    #[test]
    fn arguments_of_earlier_calls_become_objects() {
        let message = |arguments: Value| {
            let call = json!({"id": "x", "function": {"name": "f", "arguments": arguments}});
            let mut message = Message::text(dflash_chat::Role::Assistant, "");
            message.tool_calls = Some(json!([call]));
            [message]
        };
        for arguments in [json!("{\"a\": 1}"), json!({"a": 1})] {
            let mut messages = message(arguments);
            open_arguments(&mut messages).unwrap();
            let calls = messages[0].tool_calls.as_ref().unwrap();
            assert_eq!(calls[0]["function"]["arguments"], json!({"a": 1}));
        }
        for wrong in [json!("{"), json!("[1]"), json!(3)] {
            let text = open_arguments(&mut message(wrong)).unwrap_err().to_string();
            assert!(
                text.starts_with("messages[0].tool_calls[0].function.arguments are not"),
                "{text}"
            );
        }
    }
}
