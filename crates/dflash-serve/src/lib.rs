//! Serves a target and its drafter under OpenAI's HTTP interface.
//!
//! `POST /v1/chat/completions` and `/v1/completions` answer at once or as server-sent events. The HTTP
//! side renders and tokenizes prompts and puts a job for every choice into a queue; one thread owns
//! the models and decodes up to a fixed number of sequences together ([`dflash_decode::Engine`]), and
//! sends each one's text while it is made. A client that leaves takes its sequences with it. No text
//! of a prompt or an answer goes into a log.

mod answers;
mod calls;
mod error;
mod fields;
mod format;
mod grammars;
mod metrics;
mod protocol;
mod queue;
mod refusal;
mod reply;
mod routes;
mod server;
mod tool_form;
mod tools;
mod worker;

pub use error::Error;
pub use server::{Loader, Ready, serve};
