//! Tests of the whole workspace: crate boundaries, and the built programs as a user starts them.
//!
//! The programs are those of `make build`; `make test` builds them first.

#[path = "workspace/book.rs"]
mod book;
#[path = "workspace/boundaries.rs"]
mod boundaries;
#[path = "workspace/crate_diagram.rs"]
mod crate_diagram;
#[path = "workspace/demo.rs"]
mod demo;
#[path = "workspace/doctor.rs"]
mod doctor;
#[path = "workspace/front.rs"]
mod front;
#[allow(dead_code, reason = "the tests of `dflash push` need more of it")]
#[path = "../crates/program/dflash/tests/push/http.rs"]
mod http;
#[allow(dead_code, reason = "the tests of `dflash push` need more of it")]
#[path = "../crates/program/dflash/tests/push/hub_server.rs"]
mod hub_server;
#[path = "workspace/levels.rs"]
mod levels;
#[path = "workspace/mistakes.rs"]
mod mistakes;
#[path = "workspace/newcomer.rs"]
mod newcomer;
#[path = "workspace/pipeline.rs"]
mod pipeline;
#[path = "workspace/program.rs"]
mod program;
#[path = "workspace/roles.rs"]
mod roles;
#[path = "workspace/setup.rs"]
mod setup;
#[path = "workspace/streams.rs"]
mod streams;
