//! Fetching from a Hub on this machine: which requests are made, where files end up, and the
//! messages when something is missing.

mod fake_hub;
mod fetching;
