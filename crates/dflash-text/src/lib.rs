//! Conversations, chat templates and tokenizers: what turns messages into token ids.
#![allow(missing_docs, clippy::unimplemented, unused_variables)]
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path} is missing")]
    Missing { path: PathBuf },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    System,
    User,
    Assistant,
    Tool,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Message {
    pub role: Role,
    /// A string, a list of parts, or null.
    pub content: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}
impl Message {
    pub fn text(role: Role, content: impl Into<String>) -> Self {
        unimplemented!()
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Conversation {
    pub messages: Vec<Message>,
    pub tools: Option<Value>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Row {
    Conversation(Conversation),
    Tokenized { input_ids: Vec<i64>, loss_mask: Vec<bool> },
}

pub fn parse_row(value: &Value) -> Result<Row, Error> {
    unimplemented!()
}

/// Rows of a JSON array or JSONL file, streamed, with the line each starts on.
pub fn read_rows(
    path: &Path,
    limit: Option<usize>,
) -> Result<impl Iterator<Item = Result<(usize, Value), Error>> + use<>, Error> {
    if path.exists() {
        return Ok(std::iter::empty());
    }
    Err(Error::Missing { path: path.into() })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpecialIds {
    pub eos: Option<i64>,
    pub pad: Option<i64>,
    pub unk: Option<i64>,
    pub bos: Option<i64>,
    pub mask: Option<i64>,
}

#[derive(Debug)]
pub struct ChatTokenizer;
impl ChatTokenizer {
    pub fn load(model_dir: &Path) -> Result<Self, Error> {
        unimplemented!()
    }
    pub fn render(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        unimplemented!()
    }
    pub fn encode(&self, text: &str) -> Result<Vec<i64>, Error> {
        unimplemented!()
    }
    pub fn render_ids(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<Vec<i64>, Error> {
        unimplemented!()
    }
    pub fn decode(&self, ids: &[i64], skip_special: bool) -> Result<String, Error> {
        unimplemented!()
    }
    pub fn len(&self) -> usize {
        unimplemented!()
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    pub fn special_ids(&self) -> SpecialIds {
        unimplemented!()
    }
}
