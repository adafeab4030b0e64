//! Models and datasets by name: the one place where anything is fetched, and from which anything is
//! published.
//!
//! A name is a directory, which is used as it is, or `OWNER/NAME` or `OWNER/NAME@REVISION` of the
//! Hugging Face Hub, fetched with the official clients' cache, token, `HF_ENDPOINT` and `HF_HOME`;
//! under `HF_HUB_OFFLINE`, or where the Hub does not answer, what the cache holds is
//! used. Only what dflash reads is fetched: never pickled weights or GGUF. The other way, a list of
//! files becomes one commit of a repository.

mod cache;
mod client;
mod error;
mod fetch;
mod home;
mod hub;
mod login;
mod name;
mod part;
mod progress;
mod push;
mod web;

pub use error::{Error, Reason};
pub use hub::{Hub, Split};
pub use login::Login;
pub use name::is_repository;
pub use part::Part;
pub use push::{Outgoing, Publication, Published, Refusal, Token};
