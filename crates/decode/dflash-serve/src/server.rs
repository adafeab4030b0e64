//! The life of a server: listen, load, serve, drain.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use dflash_decode::{EngineOptions, Models};
use dflash_http::{Listening, Server};
use dflash_settings::ServeSettings;
use tokio::sync::oneshot;

use crate::error::Error;
use crate::grammars::Grammars;
use crate::metrics::Metrics;
use crate::routes::{Loaded, Shared, router};
use crate::tool_form::ToolForm;
use crate::worker;

/// Loads the models on the thread that will run them; also returns the target's directory.
pub type Loader = Box<dyn FnOnce() -> Result<(Models, PathBuf), Error> + Send>;

/// A server that accepts requests.
#[derive(Debug, Clone)]
pub struct Ready {
    /// Where it listens.
    pub address: SocketAddr,
    /// The model name for clients.
    pub name: String,
    /// Longest prompt and answer together, in tokens.
    pub max_model_len: usize,
    /// Sequences decoded together.
    pub max_num_seqs: usize,
    /// The target's format for tool calls, if it is a known one.
    pub tools: Option<String>,
}

impl fmt::Display for Ready {
    /// One line for people.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, name, max_model_len, max_num_seqs, tools } = self;
        write!(
            out,
            "ready on http://{address}/v1: {name}, up to {max_model_len} tokens, {max_num_seqs} \
             sequences at a time; "
        )?;
        match tools {
            Some(form) => write!(out, "calls of tools {form}")?,
            None => out.write_str("no calls of tools")?,
        }
        write!(out, "; chat page http://{address}/")
    }
}

/// Serves until `stop` is set; then refuses new requests, gives running ones time to finish, and
/// returns. `ready` is called once, when requests are accepted.
///
/// # Errors
/// An address that cannot be listened on, models that cannot be loaded, a port file that cannot be
/// written, a model thread that ended.
pub fn serve(
    settings: &ServeSettings,
    load: Loader,
    stop: &Arc<AtomicBool>,
    ready: impl FnOnce(&Ready),
) -> Result<(), Error> {
    settings.check_port_file()?;
    let listening = Listening::on(&settings.host, settings.port)?;
    let address = listening.address;
    let shared = Arc::new(Shared::new(settings));
    shared.guard.listens_on.get_or_init(|| address);
    if settings.api_key.is_none() && !address.ip().is_loopback() {
        tracing::warn!(
            "anyone who reaches {address} may use this server; pass --api-key (or set DFLASH_API_KEY), or \
             --host 127.0.0.1"
        );
    }
    let (loaded, when_loaded) = oneshot::channel();
    let server = Server {
        router: router(Arc::clone(&shared)),
        connections: Arc::clone(&shared.connections),
        stop: Arc::clone(stop),
        model: start_model(load, &shared, settings, loaded)?,
        reply_grace: Duration::from_secs_f64(settings.drain_timeout),
    };
    let is_ready = || {
        if let Some(path) = &settings.port_file {
            // Checked again, because loading takes a while.
            settings.check_port_file()?;
            Listening::write_port(address, path)?;
        }
        let loaded = shared.loaded.get().ok_or(dflash_http::Error::ModelGone)?;
        let (name, max_model_len) = (loaded.name.clone(), loaded.max_model_len);
        let (max_num_seqs, tools) = (settings.max_num_seqs, loaded.tool_form);
        let tools = tools.map(|form| form.to_string());
        ready(&Ready { address, name, max_model_len, max_num_seqs, tools });
        Ok(())
    };
    let refuse_new = || {
        shared.admission.close();
        let under_way = shared.admission.in_use();
        tracing::info!("no new requests are accepted; {under_way} in flight may finish");
    };
    server.run(listening, when_loaded, is_ready, refuse_new, || shared.queue.close())
}

fn start_model(
    load: Loader,
    shared: &Arc<Shared>,
    settings: &ServeSettings,
    loaded: oneshot::Sender<Result<(), Error>>,
) -> Result<JoinHandle<()>, Error> {
    let (shared, settings) = (Arc::clone(shared), settings.clone());
    let work = move || {
        let models = load().and_then(|(models, root)| {
            let max_model_len = max_model_len(&models, &settings)?;
            Ok((models, root, max_model_len))
        });
        let (models, root, max_model_len) = match models {
            Ok(models) => models,
            Err(error) => return drop(loaded.send(Err(error))),
        };
        let options = EngineOptions {
            max_sequences: settings.max_num_seqs,
            max_model_len,
            prefill_tokens: settings.max_prefill_tokens,
            prefix_bytes: (settings.prefix_cache_mib << 20) as usize,
            speculate: settings.speculate,
        };
        let engine = match models.engine(options) {
            Ok(engine) => engine,
            Err(error) => return drop(loaded.send(Err(error.into()))),
        };
        let any_name = settings.served_model_name.is_none();
        let name = settings.served_model_name.clone();
        let name = name.unwrap_or_else(|| models.identity.name.clone());
        let facts = shared.loaded.get_or_init(|| Loaded {
            metrics: Metrics::new(&name, engine.proposals()),
            proposals: engine.proposals(),
            name,
            any_name,
            root: root.display().to_string(),
            max_model_len,
            vocab_size: models.target.vocab_size(),
            grammars: Grammars::new(
                &models.tokenizer,
                models.target.vocab_size(),
                models.stop_ids(),
                Duration::from_secs_f64(settings.max_wait),
            ),
            stop_ids: models.stop_ids(),
            tool_form: ToolForm::of(&models.tokenizer),
            tokenizer: Arc::clone(&models.tokenizer),
        });
        let _ = loaded.send(Ok(()));
        worker::run(&models, engine, &shared.queue, &facts.metrics);
    };
    let spawned = thread::Builder::new().name("model".into()).spawn(work);
    Ok(spawned.map_err(dflash_http::Error::Runtime)?)
}

fn max_model_len(models: &Models, settings: &ServeSettings) -> Result<usize, Error> {
    let limit = models.target.config().max_position_embeddings as usize;
    match settings.max_model_len {
        Some(asked) if asked > limit => Err(Error::TooLongContext { asked, limit }),
        asked => Ok(asked.unwrap_or(limit)),
    }
}
