//! One log line per request: method, path, status, duration. No body, header or query.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use axum::extract::Request;
use axum::http::{Method, StatusCode};

/// Paths come from clients: longer ones are cut.
const LONGEST_PATH: usize = 100;

/// Paths that monitoring polls every few seconds.
const LOOKS: [&str; 2] = ["/health", "/metrics"];

/// The level at which a server logs its requests. Successful health checks and reads of metrics are
/// always logged at `debug`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessLog {
    /// Requests come one by one from people and their programs.
    Info,
    /// Requests come by the thousand from one program.
    Debug,
}

/// Additional text for the log line, known when the request ends. A reply carries it along.
#[derive(Debug, Clone, Default)]
pub struct Note(Arc<Mutex<String>>);

impl Note {
    /// Replaces the text.
    pub fn set(&self, text: String) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = text;
    }

    fn take(&self) -> String {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A request's line; written when it is dropped.
#[derive(Debug)]
pub(crate) struct Entry {
    log: AccessLog,
    method: Method,
    path: String,
    since: Instant,
    answered: Option<(StatusCode, f64)>,
    note: Option<Note>,
}

impl Entry {
    pub(crate) fn new(log: AccessLog, request: &Request) -> Self {
        Self {
            log,
            method: request.method().clone(),
            path: request.uri().path().chars().take(LONGEST_PATH).collect(),
            since: Instant::now(),
            answered: None,
            note: None,
        }
    }

    pub(crate) fn answered(&mut self, status: StatusCode, note: Option<Note>) {
        self.answered = Some((status, self.milliseconds()));
        self.note = note;
    }

    fn milliseconds(&self) -> f64 {
        self.since.elapsed().as_secs_f64() * 1e3
    }

    fn line(&self) -> String {
        let Self { method, path, .. } = self;
        let all = self.milliseconds();
        let outcome = match self.answered {
            Some((status, head)) => format!("{} in {head:.1} ms, all {all:.1} ms", status.as_u16()),
            None => format!("the client left after {all:.1} ms"),
        };
        let note = self.note.as_ref().map(Note::take).unwrap_or_default();
        let comma = if note.is_empty() { "" } else { ", " };
        format!("{method} {path} {outcome}{comma}{note}")
    }

    fn is_a_look(&self) -> bool {
        let is_fine = self.answered.is_some_and(|(status, _)| status.is_success());
        self.method == Method::GET && is_fine && LOOKS.contains(&self.path.as_str())
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if self.log == AccessLog::Info && !self.is_a_look() {
            tracing::info!("{}", self.line());
        } else {
            tracing::debug!("{}", self.line());
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    fn entry(method: &str, path: &str) -> Entry {
        let request = Request::builder().method(method).uri(path).body(Body::from("secret"));
        Entry::new(AccessLog::Info, &request.unwrap())
    }

    #[test]
    fn a_line_has_what_happened_and_no_text() {
        let mut asked = entry("POST", "/v1/completions?prompt=secret");
        let note = Note::default();
        asked.answered(StatusCode::OK, Some(note.clone()));
        note.set("prompt tokens 3".into());
        let line = asked.line();
        assert!(line.starts_with("POST /v1/completions 200 in "), "{line}");
        assert!(line.ends_with(" ms, prompt tokens 3") && !line.contains("secret"), "{line}");
        let left = entry("POST", &format!("/{}", "x".repeat(5000))).line();
        assert!(left.contains("the client left after") && left.len() < 200, "{left}");
    }

    #[test]
    fn looks_are_not_for_everyone() {
        let mut look = entry("GET", "/metrics");
        look.answered(StatusCode::OK, None);
        assert!(look.is_a_look());
        for path in ["/v1/models", "/v1/models/owner/name", "/healthy"] {
            let mut asked = entry("GET", path);
            asked.answered(StatusCode::OK, None);
            assert!(!asked.is_a_look(), "{path}");
        }
        look.answered(StatusCode::NOT_FOUND, None);
        assert!(!look.is_a_look() && !entry("POST", "/v1/completions").is_a_look());
    }
}
