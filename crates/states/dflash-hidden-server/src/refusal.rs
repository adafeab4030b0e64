//! Errors of a request, as a status and a JSON body.

use std::time::Duration;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use dflash_http::NoSlot;

use crate::error::Error;

/// Retry interval while the server is loading, or has no memory.
const FOR_THE_SERVER: Duration = Duration::from_secs(1);

/// A refused request; the message goes to the client.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("the body is not a request: {0}")]
    BadJson(#[from] serde_json::Error),
    #[error("cannot read the body: {0}")]
    BadBody(axum::Error),
    #[error("the body is larger than {limit} bytes, which no prompt needs")]
    BodyTooLarge { limit: usize },
    #[error("the request has no prompt; send {{\"input_ids\": [1, 2, 3]}}")]
    NoPrompt,
    #[error("input_ids and prompt are two names of the same thing; send one")]
    TwoPrompts,
    #[error("{field} is empty; a prompt has at least one token")]
    EmptyPrompt { field: &'static str },
    #[error("{field}[{position}] is {id}, the vocabulary has ids 0 to {}", .vocab_size - 1)]
    TokenOutOfRange { field: &'static str, position: usize, id: i64, vocab_size: usize },
    #[error("{field} has {tokens} tokens, this server takes up to {limit}")]
    PromptTooLong { field: &'static str, tokens: usize, limit: usize },
    #[error("layer_ids is empty; omit it for all served layers")]
    NoLayers,
    #[error("layer {id} is not served; this server has {served:?} and the last layer, {last}")]
    LayerNotServed { id: u32, served: Vec<u32>, last: u32 },
    #[error("the body does not match its digest; it was damaged on its way")]
    Damaged,
    #[error("model {asked:?} is not served here; this server runs {served:?}")]
    OtherModel { asked: String, served: String },
    #[error("{slots} requests are being served already; try again in {:.1} s", .after.as_secs_f64())]
    Full { slots: usize, after: Duration },
    #[error("the model is still loading; try again in a moment")]
    Loading,
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error(
        "this server has no memory for a prompt of {tokens} tokens; send shorter ones, or give it \
         more memory"
    )]
    TooLargeForMemory { tokens: usize },
    #[error(
        "this server has no memory for a prompt of {tokens} tokens at present; try again later"
    )]
    ShortOfMemory { tokens: usize },
    #[error("{0}")]
    ModelFailed(Error),
    #[error("there is no {path}; try POST /v1/hidden_states, GET /v1/models, /health or /metrics")]
    NoSuchPath { path: String },
    #[error("{path} does not take {method}")]
    WrongMethod { path: String, method: String },
}

impl Refusal {
    /// The client's error for a prompt that failed in the model.
    pub(crate) fn of_model(error: Error) -> Self {
        match error {
            Error::OutOfMemory { tokens, .. } => Self::TooLargeForMemory { tokens },
            Error::ShortOfMemory { tokens, .. } => Self::ShortOfMemory { tokens },
            error => Self::ModelFailed(error),
        }
    }

    fn status(&self) -> StatusCode {
        match self {
            Self::BadJson(_)
            | Self::BadBody(_)
            | Self::NoPrompt
            | Self::TwoPrompts
            | Self::EmptyPrompt { .. }
            | Self::TokenOutOfRange { .. }
            | Self::PromptTooLong { .. }
            | Self::NoLayers
            | Self::LayerNotServed { .. } => StatusCode::BAD_REQUEST,
            // Not the client's fault: it sends the same request again.
            Self::Damaged => StatusCode::CONFLICT,
            // The prompt alone is too large for this server, and will be the next time too.
            Self::BodyTooLarge { .. } | Self::TooLargeForMemory { .. } => {
                StatusCode::PAYLOAD_TOO_LARGE
            }
            Self::OtherModel { .. } | Self::NoSuchPath { .. } => StatusCode::NOT_FOUND,
            Self::WrongMethod { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::Full { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::Loading | Self::ShuttingDown | Self::ShortOfMemory { .. } => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::ModelFailed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    fn param(&self) -> Option<&'static str> {
        match self {
            Self::EmptyPrompt { field }
            | Self::TokenOutOfRange { field, .. }
            | Self::PromptTooLong { field, .. } => Some(field),
            Self::NoPrompt | Self::TwoPrompts => Some("input_ids"),
            Self::NoLayers | Self::LayerNotServed { .. } => Some("layer_ids"),
            Self::OtherModel { .. } => Some("model"),
            _ => None,
        }
    }

    /// Whether the request itself is at fault.
    pub(crate) fn is_invalid_request(&self) -> bool {
        let status = self.status();
        let ours = matches!(self, Self::Full { .. } | Self::TooLargeForMemory { .. });
        status.is_client_error() && !ours
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
            Self::Full { after, .. } => Some(after),
            Self::Loading | Self::ShortOfMemory { .. } => Some(FOR_THE_SERVER),
            _ => None,
        };
        let param = self.param().map(str::to_owned);
        dflash_http::Refusal {
            param,
            after,
            ..dflash_http::Refusal::new(self.status(), self.to_string())
        }
        .into_response()
    }
}
