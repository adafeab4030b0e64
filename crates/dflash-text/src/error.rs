//! What can be wrong with a row, a data file, a template or a tokenizer.

use std::io;
use std::path::PathBuf;

/// A fault in what the user gave: every variant names the object and, where it is not obvious,
/// what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused to read a file.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// A line (or array element) is not JSON.
    #[error("{path}:{line}: not valid JSON: {reason}; fix or delete the line")]
    Json {
        /// The data file.
        path: PathBuf,
        /// 1-based line.
        line: usize,
        /// The parser's complaint, without its own position.
        reason: String,
    },
    /// A JSON array ends before its closing bracket, or continues after it.
    #[error("{path}:{line}: {found} in a JSON array of rows; is the file cut short?")]
    BrokenArray {
        /// The data file.
        path: PathBuf,
        /// 1-based line.
        line: usize,
        /// What stands there.
        found: &'static str,
    },
    /// A row is not a JSON object.
    #[error("a row must be a JSON object, found {found}")]
    RowNotObject {
        /// The JSON type found.
        found: &'static str,
    },
    /// No known layout fits the row's fields.
    #[error(
        "no conversation in a row with the fields [{fields}]; known layouts: conversations, \
         messages, question/answer, instruction/input/output, prompt/completion, turns, \
         input_ids/loss_mask"
    )]
    UnknownLayout {
        /// The field names found.
        fields: String,
    },
    /// A field has the wrong JSON type.
    #[error("field {field} must be {expected}, found {found}")]
    FieldType {
        /// The field, as a path inside the row.
        field: String,
        /// What it should be.
        expected: &'static str,
        /// The JSON type found.
        found: &'static str,
    },
    /// A turn's speaker is none of the known roles.
    #[error("unknown role {role:?}; known: system, user (human), assistant (gpt, model), tool")]
    UnknownRole {
        /// The role as written.
        role: String,
    },
    /// A pre-tokenized row whose columns differ in length.
    #[error("input_ids has {input_ids} entries but loss_mask has {loss_mask}")]
    MaskLength {
        /// Entries in `input_ids`.
        input_ids: usize,
        /// Entries in `loss_mask`.
        loss_mask: usize,
    },
    /// The model directory lacks `tokenizer.json`.
    #[error(
        "{dir} has no tokenizer.json; pass the directory of a Hugging Face model with a fast \
         tokenizer"
    )]
    NoTokenizer {
        /// The model directory.
        dir: PathBuf,
    },
    /// `tokenizer.json` is not a tokenizer.
    #[error("{path} is not a tokenizer: {reason}")]
    BadTokenizer {
        /// The file.
        path: PathBuf,
        /// The library's complaint.
        reason: String,
    },
    /// A JSON file of the model directory does not parse.
    #[error("{path} is not valid JSON")]
    ModelJson {
        /// The file.
        path: PathBuf,
        /// The parser's complaint.
        #[source]
        source: serde_json::Error,
    },
    /// The model directory has no chat template.
    #[error(
        "{dir} has no chat template (neither chat_template.jinja nor a chat_template in \
         tokenizer_config.json); use an instruct model or put a chat_template.jinja there"
    )]
    NoTemplate {
        /// The model directory.
        dir: PathBuf,
    },
    /// The chat template does not parse.
    #[error("the chat template in {path} does not parse: {reason}")]
    BadTemplate {
        /// The file that holds the template.
        path: PathBuf,
        /// The engine's complaint, with the template's line.
        reason: String,
    },
    /// The template refused a conversation, through `raise_exception` or by failing.
    #[error("the chat template refused the conversation: {reason}")]
    Render {
        /// The template's own words.
        reason: String,
    },
    /// The tokenizer failed on a text or on ids.
    #[error("the tokenizer failed: {reason}")]
    Tokenize {
        /// The library's complaint.
        reason: String,
    },
}

/// The JSON type of `value`, for messages.
pub(crate) fn json_type(value: &serde_json::Value) -> &'static str {
    match value {
        serde_json::Value::Null => "null",
        serde_json::Value::Bool(_) => "a boolean",
        serde_json::Value::Number(_) => "a number",
        serde_json::Value::String(_) => "a string",
        serde_json::Value::Array(_) => "an array",
        serde_json::Value::Object(_) => "an object",
    }
}
