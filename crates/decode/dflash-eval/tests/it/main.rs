//! Evaluations against servers that answer like the common engines.

mod fake_server;
mod servers;
