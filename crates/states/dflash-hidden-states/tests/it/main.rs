//! The client against servers that behave as badly as real ones.

mod fake;
mod hostile;
mod https;
mod offline;
mod own_server;
mod prefetch;
mod vllm_server;
