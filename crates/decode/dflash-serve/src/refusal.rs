//! Errors of a request, as a status and a JSON body.

use std::time::Duration;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use dflash_http::NoSlot;

use crate::queue::Dropped;

/// Retry interval while the server is loading.
const WHILE_LOADING: Duration = Duration::from_secs(1);

/// A refused request; the message goes to the client.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("the body is not JSON: {0}")]
    BadJson(#[from] serde_json::Error),
    #[error("the body must be a JSON object")]
    NotAnObject,
    #[error("cannot read the body: {0}")]
    BadBody(axum::Error),
    #[error(
        "the body is larger than {limit} bytes; send less, or start the server with a larger --max-body-mib"
    )]
    BodyTooLarge { limit: usize },
    #[error("a body of {found} is not read; send it with `Content-Type: application/json`")]
    NotJson { found: String },
    #[error("the requests in flight leave no memory for this one; try again in {:.1} s", .after.as_secs_f64())]
    NoRoom { after: Duration },
    #[error("{param} is missing")]
    Missing { param: &'static str },
    #[error("{param} {reason}")]
    BadField { param: String, reason: String },
    #[error("{param} is not a parameter of this endpoint; leave it out")]
    Unknown { param: String },
    #[error("{param} is not supported by this server; leave it out, or send {instead}")]
    Unsupported { param: &'static str, instead: &'static str },
    #[error("the messages cannot be used: {0}")]
    BadMessages(dflash_chat::Error),
    #[error(
        "this model's longest context is {limit} tokens; the prompt has {prompt} and max_tokens is \
         {asked}: {} in all. Send less, or ask for less", .prompt + .asked
    )]
    TooLong { prompt: usize, asked: usize, limit: usize },
    #[error("prompt[{position}] is {id}, the vocabulary has ids 0 to {}", .vocab_size - 1)]
    TokenOutOfRange { position: usize, id: i64, vocab_size: i64 },
    #[error("the model {asked:?} does not exist; this server runs {served:?}")]
    OtherModel { asked: String, served: String },
    #[error("send the server's key as `Authorization: Bearer KEY`")]
    Unauthorized,
    #[error("{slots} requests are being served already; try again in {:.1} s", .after.as_secs_f64())]
    Full { slots: usize, after: Duration },
    #[error("the model is still loading; try again in a moment")]
    Loading,
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error(
        "the server ran out of memory and dropped this answer; ask again, for less, or start it with a \
         smaller --max-num-seqs, --max-model-len or --prefix-cache-mib"
    )]
    OutOfMemory,
    #[error(
        "following the format of this answer exceeds the limit for a request; simplify its schema"
    )]
    Grammar,
    #[error("the tokenizer failed")]
    Tokenizer,
    #[error(
        "there is no {path}; try POST /v1/chat/completions or /v1/completions, GET /v1/models, \
         /health or /metrics, or / in a browser"
    )]
    NoSuchPath { path: String },
    #[error("{path} does not take {method}")]
    WrongMethod { path: String, method: String },
}

impl Refusal {
    fn status(&self) -> StatusCode {
        match self {
            Self::BadJson(_)
            | Self::NotAnObject
            | Self::BadBody(_)
            | Self::Missing { .. }
            | Self::BadField { .. }
            | Self::Unknown { .. }
            | Self::Unsupported { .. }
            | Self::BadMessages(_)
            | Self::TooLong { .. }
            | Self::Grammar
            | Self::TokenOutOfRange { .. } => StatusCode::BAD_REQUEST,
            Self::BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::NotJson { .. } => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::OtherModel { .. } | Self::NoSuchPath { .. } => StatusCode::NOT_FOUND,
            Self::WrongMethod { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::Full { .. } | Self::NoRoom { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::Loading | Self::ShuttingDown | Self::OutOfMemory => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::Tokenizer => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    fn param(&self) -> Option<String> {
        match self {
            Self::Missing { param } | Self::Unsupported { param, .. } => Some((*param).to_owned()),
            Self::BadField { param, .. } | Self::Unknown { param } => Some(param.clone()),
            Self::BadMessages(_) => Some("messages".into()),
            Self::TokenOutOfRange { .. } => Some("prompt".into()),
            Self::OtherModel { .. } => Some("model".into()),
            _ => None,
        }
    }

    /// OpenAI's error code.
    fn code(&self) -> Option<&'static str> {
        match self {
            Self::TooLong { .. } => Some("context_length_exceeded"),
            Self::OtherModel { .. } => Some("model_not_found"),
            Self::Unauthorized => Some("invalid_api_key"),
            Self::Unknown { .. } => Some("unknown_parameter"),
            Self::Unsupported { .. } => Some("unsupported_parameter"),
            Self::Full { .. } | Self::NoRoom { .. } => Some("rate_limit_exceeded"),
            _ => None,
        }
    }
}

impl From<Dropped> for Refusal {
    fn from(dropped: Dropped) -> Self {
        match dropped {
            Dropped::OutOfMemory => Self::OutOfMemory,
            Dropped::Grammar => Self::Grammar,
        }
    }
}

impl From<NoSlot> for Refusal {
    fn from(no_slot: NoSlot) -> Self {
        match no_slot {
            NoSlot::Full { slots, after } => Self::Full { slots, after },
            NoSlot::Closed => Self::ShuttingDown,
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let after = match self {
            Self::Full { after, .. } | Self::NoRoom { after } => Some(after),
            Self::Loading => Some(WHILE_LOADING),
            _ => None,
        };
        dflash_http::Refusal {
            param: self.param(),
            code: self.code(),
            after,
            ..dflash_http::Refusal::new(self.status(), self.to_string())
        }
        .into_response()
    }
}
