//! What the project's HTTP servers share.
//!
//! A [`Server`] listens before its model is loaded and ends in an orderly way; [`Connections`] cuts
//! clients that do not do their part; [`Admission`] bounds how many requests are under way and makes
//! further ones wait in line for a while; a [`Guard`] keeps web pages out; [`Refusal`] is the reply to a request that gets nothing
//! else, in the shape that OpenAI-compatible clients read. No model, no route of its own.

mod access;
mod admission;
mod body;
mod connections;
mod count;
mod guard;
mod refusal;
mod server;

pub use access::{AccessLog, Note};
pub use admission::{Admission, LONGEST_LINE, NoSlot, Slot};
pub use body::{Bodies, BodyFault, Received, announced_length, drain, read_body};
pub use connections::{Client, Connections, watch};
pub use count::Count;
pub use guard::{Guard, guard, says_json};
pub use refusal::Refusal;
pub use server::{Error, Listening, Server};
