//! Models and datasets by name: the only place that fetches and publishes.
//!
//! A name is a local directory, or `OWNER/NAME` or `OWNER/NAME@REVISION` on the Hugging Face Hub.
//! The official client fetches, with its cache, token, `HF_ENDPOINT` and `HF_HOME`; with
//! `HF_HUB_OFFLINE`, or if the Hub does not answer, the cache is used. Only files that dflash reads
//! are fetched: never pickled weights or GGUF. For publishing, a list of files becomes one commit
//! of a repository.

mod client;
mod error;
mod hub;
mod login;
mod name;
mod owner;
mod part;
mod progress;
mod push;
mod recognise;

pub use error::{Error, Misnamed, Reason};
pub use hub::{Hub, Split, cache_dir};
pub use login::Login;
pub use name::is_repository;
pub use part::ModelPart;
pub use push::{Outgoing, Publication, Published, Refusal, Token};
