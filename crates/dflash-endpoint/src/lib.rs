//! Evaluating what a running server does: vLLM, SGLang, llama.cpp or our own.
//!
//! Questions go through the OpenAI interface, streamed, which gives the time to the first token and
//! the speed. Acceptance comes from the server itself: its counters on `/metrics` before and after, or
//! the timings in its replies. At one answer at a time the counters are read after each, so that tau is
//! known per response too; at several, only over all.

mod chat;
mod counters;
mod error;
mod round;
mod run;
mod server;

pub use error::Error;
pub use run::evaluate;
