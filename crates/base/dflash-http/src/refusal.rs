//! A refused request, in the shape that OpenAI-compatible clients read.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

/// When to retry, in milliseconds.
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

/// An error reply.
#[derive(Debug)]
pub struct Refusal {
    /// The status.
    pub status: StatusCode,
    /// The message for people.
    pub message: String,
    /// The field of the request that is at fault, if one is.
    pub param: Option<String>,
    /// An error code for programs, if the protocol has one.
    pub code: Option<&'static str>,
    /// When to retry.
    pub after: Option<Duration>,
}

impl Refusal {
    /// An error of the request as a whole.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None, after: None }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self { status, message, param, code, after } = self;
        let kind = match status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::UNAUTHORIZED => "authentication_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        let error = json!({"message": message, "type": kind, "param": param, "code": code});
        let mut response = (status, Json(json!({"error": error}))).into_response();
        let Some(after) = after else { return response };
        // Whole seconds for everyone, and the header that OpenAI's clients look for first.
        let seconds = after.as_secs_f64().ceil() as u64;
        let headers = response.headers_mut();
        headers.insert(header::RETRY_AFTER, seconds.max(1).into());
        headers.insert(RETRY_AFTER_MS, (after.as_millis() as u64).into());
        response
    }
}
