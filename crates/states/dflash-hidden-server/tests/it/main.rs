//! The server over HTTP: with a test double of the model, and with a real, tiny one.

mod double;
mod lifecycle;
mod pressure;
mod queueing;
mod requests;
mod stream;
mod target;
