//! Serves the hidden states of selected target layers over HTTP.
//!
//! `POST /v1/hidden_states` takes a prompt as token ids and streams an Arrow IPC reply
//! (`dflash_hidden_states`). Requests wait in a bounded queue; one thread owns the model and runs waiting
//! requests in batches up to a token budget; the HTTP side never touches the model. `GET
//! /v1/models` describes the model to clients; `/health` and `/metrics` are for people.

mod copy_out;
mod error;
mod featurizer;
mod metrics;
mod parallel;
mod queue;
mod refusal;
mod routes;
mod server;
mod target;
mod worker;

pub use dflash_target::PackedPrompts;
pub use error::Error;
pub use featurizer::{Features, Featurizer, ModelFacts, StateRows};
pub use server::{Loader, Ready, serve};
pub use target::{TargetFeaturizer, follow, grid};
