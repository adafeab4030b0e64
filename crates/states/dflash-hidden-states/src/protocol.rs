//! The JSON of requests, model lists and errors, shared by client and server.

use dflash_identity::TargetIdentity;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::record::Dtype;
use crate::text::clean;

/// The version of the protocol. It is increased when an older peer would misread a message; 2
/// introduced the digests.
pub const PROTOCOL_VERSION: u32 = 2;
/// Longest part of a server's error message that is shown.
const LONGEST_REASON: usize = 300;

/// `owned_by` of the models that our server lists, by which clients recognise it.
pub(crate) const OWNER: &str = "dflash";

/// Header of every reply with states: digests of their target, so that another model at the same
/// address is noticed at its first reply.
pub const TARGET_HEADER: &str = "x-dflash-target";

/// Body of `POST /v1/hidden_states`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StatesRequest {
    /// Served model's id; checked when given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The prompt as token ids.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_ids: Option<Vec<i64>>,
    /// The same under the name that completion servers use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt: Option<Vec<i64>>,
    /// The layers to send; by default all that the server was started with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_ids: Option<Vec<u32>>,
}

/// Reply of `GET /v1/models`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelList {
    /// Always `list`.
    #[serde(default)]
    pub object: String,
    /// One entry per model; a hidden-state server has one.
    pub data: Vec<ModelCard>,
}

/// One served model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelCard {
    /// The name that requests use.
    pub id: String,
    /// Always `model`.
    #[serde(default)]
    pub object: String,
    /// `dflash` for our server, `vllm` for vLLM.
    #[serde(default)]
    pub owned_by: String,
    /// The model's directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub root: Option<String>,
    /// Longest context in tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<usize>,
    /// [`PROTOCOL_VERSION`] of our server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocol: Option<u32>,
    /// Our server's additional properties.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Metadata>,
}

/// The properties that a client checks before its first request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Metadata {
    /// Elements per row.
    pub hidden_size: usize,
    /// Decoder layers of the target. The last one's output is always available.
    pub num_hidden_layers: u32,
    /// Rows of the target's embedding.
    pub vocab_size: usize,
    /// Served layers, ascending.
    pub layer_ids: Vec<u32>,
    /// Element type on the wire.
    pub dtype: Dtype,
    /// The target's identity; `None` from a server that does not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<TargetIdentity>,
}

impl ModelCard {
    /// A card of our own server.
    pub fn new(id: String, root: String, max_model_len: usize, metadata: Metadata) -> Self {
        Self {
            id,
            object: "model".into(),
            owned_by: OWNER.into(),
            root: Some(root),
            max_model_len: Some(max_model_len),
            protocol: Some(PROTOCOL_VERSION),
            metadata: Some(metadata),
        }
    }
}

impl ModelList {
    /// The list of a server with one model.
    pub fn of(card: ModelCard) -> Self {
        Self { object: "list".into(), data: vec![card] }
    }
}

/// The message of an error reply, which OpenAI-compatible servers put at `error.message`, or the
/// start of the body; safe for a terminal.
pub(crate) fn error_message(body: &[u8]) -> String {
    let reply: Value = serde_json::from_slice(body).unwrap_or_default();
    match reply["error"]["message"].as_str() {
        Some(message) => clean(message, LONGEST_REASON),
        None => clean(&String::from_utf8_lossy(body), LONGEST_REASON),
    }
}

/// Whether an error reply comes from a server that read the request: OpenAI-compatible ones answer
/// with an object that has an `error`, older vLLMs with one whose `object` is "error".
pub(crate) fn is_error(body: &[u8]) -> bool {
    let reply: Value = serde_json::from_slice(body).unwrap_or_default();
    !reply["error"].is_null() || reply["object"] == "error" || !reply["detail"].is_null()
}

/// Ids in the form of the command line.
pub(crate) fn spaced(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stock_server_s_model_list_is_read() {
        let text = r#"{"object":"list","data":[{"id":"Qwen/Qwen3-8B","object":"model",
            "created":1,"owned_by":"vllm","root":"Qwen/Qwen3-8B","parent":null,
            "max_model_len":4096,"permission":[{"id":"modelperm-1"}]}]}"#;
        let list: ModelList = serde_json::from_str(text).unwrap();
        assert_eq!(list.data[0].max_model_len, Some(4096));
        assert_eq!(list.data[0].metadata, None);
    }

    #[test]
    fn errors_of_servers_are_told_from_bare_ones() {
        let check = |body: &str, expect| assert_eq!(is_error(body.as_bytes()), expect, "{body}");
        check(r#"{"error":{"message":"too long","code":400}}"#, true);
        check(r#"{"object":"error","message":"too long","code":400}"#, true);
        check(r#"{"detail":[{"loc":["body"]}]}"#, true);
        check("", false);
        check("<html>Bad Request</html>", false);
        check("{}", false);
    }

    #[test]
    fn error_messages_are_found_or_cut() {
        assert_eq!(error_message(br#"{"error":{"message":"too long","code":400}}"#), "too long");
        assert_eq!(error_message(b" <html>nope</html> "), "<html>nope</html>");
        assert_eq!(error_message(&[b'x'; 1000]).len(), 303);
        let steering = br#"{"error":{"message":"\u001b[2Jgone"}}"#;
        assert_eq!(error_message(steering), "\u{fffd}[2Jgone");
    }
}
