//! Fetching from a Hub on this machine: what is asked for, what ends up where, what is said when
//! something is missing.

mod fake_hub;
mod fetching;
