//! The life of a server: listen, load, serve, stop.
//!
//! It listens before it loads, because a large model takes minutes and an occupied port should be
//! reported at once. The model runs on a thread of its own.

use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot, watch};
use tower_service::Service;

use crate::connections::{Connections, Door, Socket};

/// How soon a set stop flag is noticed.
const STOP_POLL: Duration = Duration::from_millis(25);
/// How long the model may take to finish its work once no request waits for it.
const MODEL_GRACE: Duration = Duration::from_secs(1);

/// Why a server does not start, or ends.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the variants and their fields are")]
pub enum Error {
    #[error("cannot listen on host {host:?}; pass --host 127.0.0.1, or 0.0.0.0 for all interfaces")]
    BadHost { host: String, source: io::Error },
    #[error(
        "port {} is in use on {}; stop the program that listens there, or pass another --port \
         (0 picks a free one)", .address.port(), .address.ip()
    )]
    PortInUse { address: SocketAddr },
    #[error("cannot listen on {address}; pass another --host or --port")]
    Bind { address: SocketAddr, source: io::Error },
    #[error("the model's thread ended unexpectedly; its message is above")]
    ModelGone,
    #[error(transparent)]
    Files(#[from] dflash_io::Error),
    #[error("cannot start the server's threads")]
    Runtime(#[source] io::Error),
    #[error("the listener on {address} failed")]
    Serve { address: SocketAddr, source: io::Error },
}

/// A listening socket, and the threads for connections.
#[derive(Debug)]
pub struct Listening {
    listener: TcpListener,
    runtime: Runtime,
    /// Where it listens.
    pub address: SocketAddr,
}

impl Listening {
    /// # Errors
    /// An address that cannot be listened on; threads that cannot be started.
    pub fn on(host: &str, port: u16) -> Result<Self, Error> {
        let (listener, address) = listen(host, port)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("http")
            .enable_all()
            .build()
            .map_err(Error::Runtime)?;
        Ok(Self { listener, runtime, address })
    }

    /// Writes the port to `path`.
    ///
    /// # Errors
    /// I/O.
    pub fn write_port(address: SocketAddr, path: &Path) -> Result<(), Error> {
        Ok(dflash_io::write_bytes(path, format!("{}\n", address.port()).as_bytes())?)
    }
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

/// A server from start to shutdown.
#[derive(Debug)]
pub struct Server {
    /// Routes under [`crate::watch`].
    pub router: Router,
    /// The open connections.
    pub connections: Arc<Connections>,
    /// Shuts the server down once set.
    pub stop: Arc<AtomicBool>,
    /// The model's thread; its end is the server's.
    pub model: JoinHandle<()>,
    /// How long replies may take to be sent after the stop; then connections are closed.
    pub reply_grace: Duration,
}

impl Server {
    /// Serves until the stop flag is set. `when_loaded` reports whether the model has been loaded;
    /// then `ready` is called. After the stop `refuse_new` is called at once, and `close` when all
    /// replies have been sent or their time is over; it must end the model's thread.
    ///
    /// # Errors
    /// The loader's, or that of `ready`; [`Error::ModelGone`], [`Error::Serve`].
    pub fn run<E: From<Error> + Send + 'static>(
        self,
        listening: Listening,
        when_loaded: oneshot::Receiver<Result<(), E>>,
        ready: impl FnOnce() -> Result<(), E>,
        refuse_new: impl Fn(),
        close: impl FnOnce(),
    ) -> Result<(), E> {
        let Listening { listener, runtime, address } = listening;
        let serving = self.serve(listener, address, when_loaded, ready, refuse_new);
        let outcome = runtime.block_on(serving);
        close();
        runtime.shutdown_timeout(Duration::from_millis(100));
        outcome.map(join_within_grace)
    }

    /// Returns the model's thread when the stop flag has ended the server.
    async fn serve<E: From<Error>>(
        self,
        listener: TcpListener,
        address: SocketAddr,
        when_loaded: oneshot::Receiver<Result<(), E>>,
        ready: impl FnOnce() -> Result<(), E>,
        refuse_new: impl Fn(),
    ) -> Result<JoinHandle<()>, E> {
        let failed = |source| Error::Serve { address, source };
        let listener = tokio::net::TcpListener::from_std(listener).map_err(failed)?;
        tokio::spawn(Arc::clone(&self.connections).sweep());
        let door = Door { listener, connections: Arc::clone(&self.connections) };
        let (closing, closed) = watch::channel(false);
        let mut server = tokio::spawn(answer_all(door, self.router.clone(), closed));
        let loaded = tokio::select! {
            // A loader that fails also ends its thread; its error takes precedence.
            biased;
            loaded = when_loaded => match loaded {
                Ok(loaded) => loaded.map(|()| true),
                Err(_) => Err(Error::ModelGone.into()),
            },
            () = self.stopped() => Ok(false),
        };
        if loaded? {
            ready()?;
            tokio::select! {
                () = self.stopped() => {}
                ended = &mut server => {
                    ended.map_err(|panic| failed(io::Error::other(panic)))?;
                }
            }
        }
        if !self.stop.load(Ordering::Relaxed) {
            return Err(Error::ModelGone.into());
        }
        refuse_new();
        closing.send_replace(true);
        if tokio::time::timeout(self.reply_grace, server).await.is_err() {
            tracing::warn!("closing the connections that are still open");
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

/// Serves connections until `closed` is set; returns when the last reply has been sent.
async fn answer_all(door: Door, router: Router, mut closed: watch::Receiver<bool>) {
    // Every connection holds a sender, so the receiver learns when all are gone.
    let (alive, mut all_gone) = mpsc::channel::<()>(1);
    let closing = closed.clone();
    let mut is_closed =
        std::pin::pin!(async move { drop(closed.wait_for(|closed| *closed).await) });
    loop {
        let socket = tokio::select! {
            () = is_closed.as_mut() => break,
            socket = door.accept() => socket,
        };
        let connection = answer(socket, router.clone(), closing.clone());
        let alive = alive.clone();
        tokio::spawn(async move {
            connection.await;
            drop(alive);
        });
    }
    drop((door, alive));
    all_gone.recv().await;
}

/// Serves the requests of one connection, one after the other. HTTP/1 only: slots and deadlines
/// belong to connections, and under HTTP/2 many requests share one.
async fn answer(socket: Socket, router: Router, mut closed: watch::Receiver<bool>) {
    let client = socket.client();
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(ConnectInfo(client.clone()));
        router.clone().call(request)
    });
    let connection = http1::Builder::new().serve_connection(TokioIo::new(socket), service);
    let mut connection = std::pin::pin!(connection);
    let closing = async move { drop(closed.wait_for(|closed| *closed).await) };
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = closing => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::trace!("a connection ended: {error}");
    }
}

/// A forward pass cannot be interrupted. If the thread takes too long it is abandoned; the process
/// is about to exit.
fn join_within_grace(model: JoinHandle<()>) {
    let start = Instant::now();
    while !model.is_finished() && start.elapsed() < MODEL_GRACE {
        thread::sleep(Duration::from_millis(5));
    }
    if model.is_finished() {
        let _ = model.join();
    }
}
