//! Evaluations of servers that answer as the field's do.

mod fake_server;
mod servers;
