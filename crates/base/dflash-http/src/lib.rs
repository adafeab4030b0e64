//! Shared parts of the project's HTTP servers.
//!
//! A [`Server`] listens before its model is loaded and shuts down in order; [`Connections`] closes
//! connections of slow clients; [`Admission`] bounds the requests in flight and makes others wait
//! in line for a while; a [`Guard`] keeps web pages out; [`Refusal`] is an error reply in the shape
//! that OpenAI-compatible clients read; [`Page`] is the frame and [`PAGE_STYLE`] the style of every HTML
//! page. There is no model and no route here.

mod access;
mod admission;
mod body;
mod connections;
mod count;
mod guard;
mod page;
mod refusal;
mod server;

pub use access::{AccessLog, Note};
pub use admission::{Admission, LONGEST_LINE, NoSlot, Slot};
pub use body::{Bodies, BodyFault, Received, announced_length, drain, read_body};
pub use connections::{Client, Connections, watch};
pub use count::Count;
pub use guard::{Guard, guard, says_json};
pub use page::{PAGE_STYLE, Page, escape, source};
pub use refusal::Refusal;
pub use server::{Error, Listening, Server};
