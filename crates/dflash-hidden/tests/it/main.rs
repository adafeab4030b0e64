//! The client against servers that behave as badly as real ones.

mod fake;
mod offline;
mod own_server;
mod prefetch;
mod vllm_server;
