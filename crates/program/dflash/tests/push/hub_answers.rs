//! The Hub's answers, in its own words.

use serde_json::{Value, json};

use crate::http::Answer;

pub(super) fn ok(body: Value) -> Answer {
    Answer::new(200, body.to_string()).with("content-type", "application/json")
}

pub(super) fn refused(status: u16, said: &str) -> Answer {
    let body = json!({"error": said}).to_string();
    Answer::new(status, body).with("content-type", "application/json").with("x-error-message", said)
}

pub(super) fn no_revision() -> Answer {
    refused(404, "Invalid rev id").with("x-error-code", "RevisionNotFound")
}

pub(super) fn quoted(text: &str) -> String {
    format!("\"{text}\"")
}
