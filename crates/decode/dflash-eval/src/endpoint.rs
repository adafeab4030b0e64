//! Evaluates a running server: vLLM, SGLang, llama.cpp or our own.
//!
//! Questions are sent through the OpenAI interface, and answers are streamed, which gives the time
//! to the first token and the speed. Acceptance comes from the server itself: its counters on
//! `/metrics` before and after, or the timings in its replies. At concurrency 1 the counters are
//! read after each answer, so that tau is known per response too; at higher concurrency only over
//! all.

mod attempts;
mod chat;
mod counters;
mod round;
mod run;
mod server;

pub use run::evaluate;
