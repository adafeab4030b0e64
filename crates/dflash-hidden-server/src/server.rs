//! The life of a server: listen, load, serve, stop.
//!
//! It listens before it loads, because a large model takes minutes and a taken port should be
//! reported at once; meanwhile it answers 503. The model has a thread of its own.

use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fmt, io};

use dflash_hidden::Metadata;
use dflash_settings::HiddenServerSettings;
use tokio::sync::{oneshot, watch};

use crate::connections::{Client, Door};
use crate::error::Error;
use crate::featurizer::{Featurizer, ModelFacts};
use crate::routes::{Shared, router};
use crate::worker;

/// How soon a set stop flag is noticed.
const STOP_POLL: Duration = Duration::from_millis(25);
/// How long replies may take to go out after the stop; then connections are cut.
const REPLY_GRACE: Duration = Duration::from_secs(2);
/// How long the running batch may take after that.
const BATCH_GRACE: Duration = Duration::from_secs(1);

/// Loads the model on the thread that will run it.
pub type Loader = Box<dyn FnOnce() -> Result<Box<dyn Featurizer>, Error> + Send>;

/// A server that takes prompts.
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
/// `ready` is called once, when prompts can be taken.
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
    let (listener, address) = listen(&settings.host, settings.port)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("http")
        .enable_all()
        .build()
        .map_err(Error::Runtime)?;
    let shared = Arc::new(Shared::new(settings));
    let (loaded, when_loaded) = oneshot::channel();
    let model = start_model(load, &shared, settings.max_batch_tokens, loaded)?;
    let running = Running { shared: Arc::clone(&shared), address, stop: Arc::clone(stop), model };
    let outcome = runtime.block_on(running.run(listener, when_loaded, |facts| {
        if let Some(path) = &settings.port_file {
            // Loading took its time.
            settings.check_port_file()?;
            write_port(path, address)?;
        }
        ready(&Ready { address, facts: facts.clone() });
        Ok(())
    }));
    shared.close();
    runtime.shutdown_timeout(Duration::from_millis(100));
    outcome.map(join_within_grace)
}

fn listen(host: &str, port: u16) -> Result<(TcpListener, SocketAddr), Error> {
    let bad_host = |source| Error::BadHost { host: host.to_owned(), source };
    let address = (host, port).to_socket_addrs().map_err(bad_host)?.next();
    let address = address.ok_or_else(|| bad_host(io::ErrorKind::NotFound.into()))?;
    let listener = TcpListener::bind(address).map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => Error::PortInUse { address },
        io::ErrorKind::AddrNotAvailable => bad_host(source),
        _ => Error::Bind { address, source },
    })?;
    let ready = listener.set_nonblocking(true).and_then(|()| listener.local_addr());
    let actual = ready.map_err(|source| Error::Bind { address, source })?;
    Ok((listener, actual))
}

fn write_port(path: &Path, address: SocketAddr) -> Result<(), Error> {
    Ok(dflash_files::write_bytes(path, format!("{}\n", address.port()).as_bytes())?)
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
    thread::Builder::new().name("model".into()).spawn(work).map_err(Error::Runtime)
}

/// A server between its start and its end.
struct Running {
    shared: Arc<Shared>,
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    model: JoinHandle<()>,
}

impl Running {
    /// Hands the model's thread back when the stop flag has ended the server.
    async fn run(
        self,
        listener: TcpListener,
        when_loaded: oneshot::Receiver<Result<(), Error>>,
        ready: impl FnOnce(&ModelFacts) -> Result<(), Error>,
    ) -> Result<JoinHandle<()>, Error> {
        let address = self.address;
        let failed = |source| Error::Serve { address, source };
        let listener = tokio::net::TcpListener::from_std(listener).map_err(failed)?;
        let connections = Arc::clone(&self.shared.connections);
        tokio::spawn(Arc::clone(&connections).sweep());
        let listener = Door { listener, connections };
        let (closing, mut closed) = watch::channel(false);
        let until_closed = async move { drop(closed.wait_for(|closed| *closed).await) };
        let service = router(Arc::clone(&self.shared));
        let service = service.into_make_service_with_connect_info::<Client>();
        let server = axum::serve(listener, service).with_graceful_shutdown(until_closed);
        let mut server = tokio::spawn(server.into_future());
        let loaded = tokio::select! {
            // A loader that fails also ends its thread; its reason comes first.
            biased;
            loaded = when_loaded => loaded.unwrap_or(Err(Error::ModelGone)).map(|()| true),
            () = self.stopped() => Ok(false),
        };
        if loaded? {
            ready(self.shared.facts.get().ok_or(Error::ModelGone)?)?;
            tokio::select! {
                () = self.stopped() => {}
                ended = &mut server => {
                    ended.unwrap_or_else(|panic| Err(io::Error::other(panic))).map_err(failed)?;
                }
            }
        }
        if !self.stop.load(Ordering::Relaxed) {
            return Err(Error::ModelGone);
        }
        self.shared.close();
        closing.send_replace(true);
        if tokio::time::timeout(REPLY_GRACE, server).await.is_err() {
            tracing::warn!("cutting the connections that are still open");
        }
        Ok(self.model)
    }

    /// Returns when the flag is set, or when the model's thread has died.
    async fn stopped(&self) {
        while !self.stop.load(Ordering::Relaxed) && !self.model.is_finished() {
            tokio::time::sleep(STOP_POLL).await;
        }
    }
}

/// A forward pass cannot be interrupted. The thread is left behind when it takes too long; the
/// process is about to end.
fn join_within_grace(model: JoinHandle<()>) {
    let start = Instant::now();
    while !model.is_finished() && start.elapsed() < BATCH_GRACE {
        thread::sleep(Duration::from_millis(5));
    }
    if model.is_finished() {
        let _ = model.join();
    }
}
