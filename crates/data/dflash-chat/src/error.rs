//! Errors of rows, data files, templates and tokenizers.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// An error in the user's input. Every variant names the object and, if it is not obvious, what to
/// do. Lines count from 1.
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error(
        "{path} is encoded in UTF-16; convert it: iconv -f UTF-16 -t UTF-8 {path} > {}",
        utf8_name(.path)
    )]
    Utf16 { path: PathBuf },
    #[error("{path}:{line}: not valid JSON: {reason}; fix or delete the line")]
    Json { path: PathBuf, line: usize, reason: String },
    #[error("{path}:{line}: {found} in a JSON array of rows; is the file cut short?")]
    BrokenArray { path: PathBuf, line: usize, found: &'static str },
    #[error("a row must be a JSON object, found {found}")]
    RowNotObject { found: &'static str },
    #[error(
        "no conversation in a row with the fields [{fields}]; known layouts: conversations, \
         messages, question/answer, instruction/input/output, prompt/completion, turns, \
         input_ids/loss_mask"
    )]
    UnknownLayout { fields: String },
    #[error("field {field} must be {expected}, found {found}")]
    FieldType { field: String, expected: &'static str, found: &'static str },
    #[error("unknown role {role:?}; known: system, user (human), assistant (gpt, model), tool")]
    UnknownRole { role: String },
    #[error("input_ids has {input_ids} entries but loss_mask has {loss_mask}")]
    MaskLength { input_ids: usize, loss_mask: usize },
    #[error(
        "{dir} has no tokenizer.json; pass the directory of a Hugging Face model with a fast \
         tokenizer"
    )]
    NoTokenizer { dir: PathBuf },
    #[error("{path} is not a tokenizer: {reason}")]
    BadTokenizer { path: PathBuf, reason: String },
    #[error("{path} is not valid JSON")]
    ModelJson { path: PathBuf, source: serde_json::Error },
    #[error(
        "{dir} has no chat template (neither chat_template.jinja nor a chat_template in \
         tokenizer_config.json); use an instruct model or put a chat_template.jinja there"
    )]
    NoTemplate { dir: PathBuf },
    #[error("the chat template in {path} does not parse: {reason}")]
    BadTemplate { path: PathBuf, reason: String },
    /// Through `raise_exception`, or because the template failed.
    #[error("the chat template refused the conversation: {reason}")]
    Render { reason: String },
    #[error(
        "chat_template_kwargs cannot set {key}, which is what the template renders; leave it out"
    )]
    ReservedVariable { key: String },
    #[error("the tokenizer failed: {reason}")]
    Tokenize { reason: String },
}

/// `chats.utf8.jsonl` for `chats.jsonl`.
fn utf8_name(path: &Path) -> String {
    let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or("jsonl");
    path.with_extension(format!("utf8.{ending}")).display().to_string()
}

/// The JSON type of `value`, for messages.
pub(crate) fn json_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
