//! OpenAI-compatible HTTP server for a target and its drafter.
//!
//! `POST /v1/chat/completions` and `/v1/completions` return whole answers or server-sent events.
//! The HTTP side renders and tokenizes prompts and queues a job per choice. One thread owns the
//! models, decodes up to a fixed number of sequences together ([`dflash_decode::Engine`]), and
//! streams each one's text. When a client disconnects, its sequences are dropped. No text of a
//! prompt or an answer is logged.

mod answers;
mod blocks;
mod calls;
mod error;
mod fields;
mod format;
mod grammars;
mod metrics;
mod page;
mod protocol;
mod queue;
mod refusal;
mod reply;
mod routes;
mod server;
mod shares;
mod tool_form;
mod tools;
mod worker;

pub use error::Error;
pub use server::{Loader, Ready, serve};
