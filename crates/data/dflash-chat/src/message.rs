//! Messages under the names that chat templates use.

use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::error::Error;

/// The speaker of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions to the model.
    System,
    /// The person.
    User,
    /// The model: the draft is trained on its turns.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// Reads a role under any of its common names (`human`, `gpt`, `model`, `observation`, ...), in
    /// upper or lower case.
    ///
    /// # Errors
    /// [`Error::UnknownRole`].
    pub fn parse(name: &str) -> Result<Self, Error> {
        // `chatgpt`, `bing` and `bard` are the model's names in ShareGPT's scrapes; `function_call`
        // and `observation` are LLaMA-Factory's tool turns.
        match name.to_lowercase().as_str() {
            "system" | "developer" => Ok(Self::System),
            "user" | "human" | "prompter" => Ok(Self::User),
            "assistant" | "gpt" | "model" | "bot" | "chatgpt" | "bing" | "bard"
            | "function_call" => Ok(Self::Assistant),
            "tool" | "function" | "observation" | "ipython" => Ok(Self::Tool),
            _ => Err(Error::UnknownRole { role: name.to_owned() }),
        }
    }
}

/// One turn. Serializes to the dictionary that Transformers hands to a chat template.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Message {
    /// The speaker.
    pub role: Role,
    /// A string, a list of typed parts, or null if the row has none.
    pub content: Value,
    /// Recorded reasoning. Templates read it as `reasoning_content` or `thinking`.
    #[serde(flatten, serialize_with = "under_both_names")]
    pub reasoning_content: Option<String>,
    /// Tool calls of an assistant turn, as the row has them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Value>,
    /// The call that a tool turn answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The tool's or speaker's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// A turn that is not to be learned, OpenAI's `weight: 0`.
    #[serde(skip)]
    pub context_only: bool,
    /// Unknown keys of the row's turn.
    #[serde(skip)]
    pub unknown_keys: Vec<String>,
}

impl Message {
    /// A turn of plain text.
    pub fn text(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: Value::String(content.into()),
            reasoning_content: None,
            tool_calls: None,
            tool_call_id: None,
            name: None,
            context_only: false,
            unknown_keys: Vec::new(),
        }
    }

    /// Whether the content has any text: a list of empty texts has none.
    pub fn has_content(&self) -> bool {
        let is_empty_text = |part: &Value| part["text"].as_str().is_some_and(str::is_empty);
        match &self.content {
            Value::Null => false,
            Value::String(text) => !text.is_empty(),
            Value::Array(parts) => !parts.iter().all(is_empty_text),
            _ => true,
        }
    }
}

fn under_both_names<S: Serializer>(
    reasoning: &Option<String>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let names = ["reasoning_content", "thinking"];
    serializer.collect_map(reasoning.iter().flat_map(|text| names.map(|name| (name, text))))
}

/// A conversation as a chat template takes it.
#[derive(Debug, Clone, PartialEq)]
pub struct Conversation {
    /// The turns in order.
    pub messages: Vec<Message>,
    /// JSON schemas of the available tools, a list.
    pub tools: Option<Value>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_serializes_under_the_names_of_templates() {
        let check = |message: &Message, expect: &str| {
            assert_eq!(serde_json::to_string(message).unwrap(), expect);
        };
        let mut message = Message::text(Role::Assistant, "4");
        check(&message, r#"{"role":"assistant","content":"4"}"#);
        message.reasoning_content = Some("2+2".into());
        message.tool_call_id = Some("a".into());
        check(
            &message,
            r#"{"role":"assistant","content":"4","reasoning_content":"2+2","thinking":"2+2","tool_call_id":"a"}"#,
        );
    }

    #[test]
    fn an_empty_text_is_no_content() {
        let check = |content: Value, expect| {
            let message = Message { content, ..Message::text(Role::User, "") };
            assert_eq!(message.has_content(), expect, "{message:?}");
        };
        check(Value::Null, false);
        check("".into(), false);
        check(" ".into(), true);
        check(serde_json::json!([]), false);
        check(serde_json::json!([{"type": "text", "text": ""}]), false);
        check(serde_json::json!([{"type": "text", "text": ""}, {"type": "image"}]), true);
    }

    #[test]
    fn roles_have_the_names_of_the_field() {
        let check = |name, role| assert_eq!(Role::parse(name).unwrap(), role, "{name}");
        check("human", Role::User);
        check("gpt", Role::Assistant);
        check("Assistant", Role::Assistant);
        check("model", Role::Assistant);
        check("developer", Role::System);
        check("observation", Role::Tool);
        let error = Role::parse("narrator").unwrap_err().to_string();
        assert!(error.contains("\"narrator\""), "{error}");
    }
}
