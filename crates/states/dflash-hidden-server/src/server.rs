//! The life of a server: listen, load, serve, stop.
//!
//! It listens before it loads, because a large model takes minutes and an occupied port should be
//! reported at once; meanwhile it answers 503. The model runs on a thread of its own.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use dflash_hidden_states::Metadata;
use dflash_http::{Listening, Server};
use dflash_settings::HiddenServerSettings;
use tokio::sync::oneshot;

use crate::error::Error;
use crate::featurizer::{Featurizer, ModelFacts};
use crate::routes::{Shared, router};
use crate::worker;

/// How long replies may take to be sent after the stop; then connections are closed.
const REPLY_GRACE: Duration = Duration::from_secs(2);

/// Loads the model on the thread that will run it.
pub type Loader = Box<dyn FnOnce() -> Result<Box<dyn Featurizer>, Error> + Send>;

/// A server that accepts prompts.
#[derive(Debug, Clone)]
pub struct Ready {
    /// Where it listens.
    pub address: SocketAddr,
    /// What it serves.
    pub facts: ModelFacts,
}

impl fmt::Display for Ready {
    /// One line for people.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, facts } = self;
        let Metadata { num_hidden_layers, hidden_size, layer_ids, dtype, .. } = &facts.metadata;
        let ids: Vec<String> = layer_ids.iter().map(u32::to_string).collect();
        write!(
            out,
            "ready on http://{address}: {}, layers {} of {num_hidden_layers}, hidden size \
             {hidden_size}, {dtype} on the wire, prompts up to {} tokens, on {}",
            facts.name,
            ids.join(" "),
            facts.max_model_len,
            facts.device,
        )
    }
}

/// Serves until `stop` is set, then returns within about three seconds.
///
/// `ready` is called once, when prompts are accepted.
///
/// # Errors
/// An address that cannot be listened on, a model that cannot be loaded, a port file that cannot
/// be written, a model thread that ended.
pub fn serve(
    settings: &HiddenServerSettings,
    load: Loader,
    stop: &Arc<AtomicBool>,
    ready: impl FnOnce(&Ready),
) -> Result<(), Error> {
    settings.check_port_file()?;
    let listening = Listening::on(&settings.host, settings.port)?;
    let address = listening.address;
    let shared = Arc::new(Shared::new(settings));
    shared.guard.listens_on.get_or_init(|| address);
    let (loaded, when_loaded) = oneshot::channel();
    let model = start_model(load, &shared, settings.max_batch_tokens, loaded)?;
    let server = Server {
        router: router(Arc::clone(&shared)),
        connections: Arc::clone(&shared.connections),
        stop: Arc::clone(stop),
        model,
        reply_grace: REPLY_GRACE,
    };
    let is_ready = || {
        if let Some(path) = &settings.port_file {
            // Checked again, because loading takes a while.
            settings.check_port_file()?;
            Listening::write_port(address, path)?;
        }
        let facts = shared.facts.get().ok_or(dflash_http::Error::ModelGone)?.clone();
        ready(&Ready { address, facts });
        Ok(())
    };
    server.run(listening, when_loaded, is_ready, || shared.close(), || shared.close())
}

fn start_model(
    load: Loader,
    shared: &Arc<Shared>,
    max_batch_tokens: usize,
    loaded: oneshot::Sender<Result<(), Error>>,
) -> Result<JoinHandle<()>, Error> {
    let shared = Arc::clone(shared);
    let work = move || {
        let mut model = match load() {
            Ok(model) => model,
            Err(error) => return drop(loaded.send(Err(error))),
        };
        shared.facts.get_or_init(|| model.facts().clone());
        let _ = loaded.send(Ok(()));
        worker::run(model.as_mut(), &shared.queue, &shared.metrics, max_batch_tokens);
    };
    let spawned = thread::Builder::new().name("model".into()).spawn(work);
    Ok(spawned.map_err(dflash_http::Error::Runtime)?)
}
