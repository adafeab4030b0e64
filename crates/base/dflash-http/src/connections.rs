//! Open connections, and how long each has been waiting for its client.
//!
//! A client that stops in the middle of a request, or does not read its reply, holds a connection,
//! a place in the queue and the reply's rows. So every connection records what it waits for
//! ([`Phase`]). One that waits for its client too long is closed, and when there are too many, the
//! one that has waited for its client longest is closed for a new one. A connection whose request
//! is being processed, or whose next piece of a reply is being made, is never closed.
//!
//! A client may close its sending side and wait for the reply; a client that has left looks the
//! same. They can be told apart by sending something: a socket that nobody holds answers with a
//! reset. So the end of a client's input is hidden from HTTP while its request is in progress, and
//! the client gets an interim response, `100 Continue`, which HTTP/1.1 lets a server send at any
//! time.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::body::{Body, HttpBody};
use axum::extract::{ConnectInfo, Request, State as Shared};
use axum::http::Version;
use axum::http::header::CONTENT_LENGTH;
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use futures::task::AtomicWaker;
use http_body::{Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

use crate::access::{AccessLog, Entry, Note};
use crate::admission::Slot;
use crate::count::Count;

/// How long a connection may stay open between two requests: longer than the 90 s of common HTTP
/// clients, so that they close first and no request meets a closing connection.
const KEPT_OPEN: Duration = Duration::from_secs(120);
/// Largest head of a request; ours have some 200 bytes.
const LARGEST_HEAD: usize = 64 << 10;
/// Time that a reply may take in addition to the client's timeout, per byte: a mebibyte per second,
/// a tenth of a slow network.
const SECONDS_PER_BYTE: f64 = 1.0 / (1 << 20) as f64;
/// How often overdue connections are looked for.
const SWEEP: Duration = Duration::from_millis(200);
/// Tells a client that has left from one that has only closed its sending side.
const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
/// How long the end of a client's input is hidden from HTTP while a request is still being read:
/// the request may be complete, and HTTP about to notice. One that is not is then dropped.
const END_KEPT: Duration = Duration::from_secs(1);
/// How many connections are closed at once if the process may open no more files.
const ROOM: usize = 16;
/// The time that they get to close.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// All open connections.
#[derive(Debug)]
pub struct Connections {
    open: Mutex<Vec<Weak<Connection>>>,
    most: usize,
    client_timeout: Duration,
    cut: Count,
}

impl Connections {
    /// For at most `most` connections, whose clients have `client_timeout` for each step.
    pub fn new(most: usize, client_timeout: Duration) -> Arc<Self> {
        Arc::new(Self { open: Mutex::default(), most, client_timeout, cut: Count::default() })
    }

    /// Connections closed because the client was too slow.
    pub fn cut_so_far(&self) -> u64 {
        self.cut.get()
    }

    /// Open connections.
    pub fn count(&self) -> usize {
        lock(&self.open).iter().filter(|connection| connection.strong_count() > 0).count()
    }

    /// Closes overdue connections, forever.
    pub(crate) async fn sweep(self: Arc<Self>) {
        loop {
            tokio::time::sleep(SWEEP).await;
            let now = Instant::now();
            for connection in self.all() {
                if connection.half_closed.load(Ordering::Relaxed) {
                    // It checks whether its client is still there.
                    connection.waker.wake();
                }
                let deadline = connection.state().deadline(self.client_timeout);
                if deadline.is_some_and(|deadline| deadline < now) {
                    self.cut(&connection);
                }
            }
        }
    }

    fn add(&self) -> Arc<Connection> {
        let connection = Arc::new(Connection::default());
        if self.all().len() >= self.most {
            self.make_room();
        }
        lock(&self.open).push(Arc::downgrade(&connection));
        connection
    }

    /// Closes the connection that has waited for its client longest.
    fn make_room(&self) {
        let waiting = |connection: &Arc<Connection>| connection.state().waits_for_its_client();
        let all = self.all().into_iter().filter(waiting);
        if let Some(connection) = all.min_by_key(|connection| connection.state().since) {
            self.cut(&connection);
        }
    }

    fn cut(&self, connection: &Connection) {
        if !connection.cut.swap(true, Ordering::Relaxed) {
            // Closing an idle connection loses nothing.
            if !matches!(connection.state().phase, Phase::Idle) {
                self.cut.add(1);
            }
            connection.waker.wake();
        }
    }

    /// The connections that are still open and were not closed by us; the others are forgotten.
    fn all(&self) -> Vec<Arc<Connection>> {
        let mut open = lock(&self.open);
        let mut all = Vec::with_capacity(open.len());
        open.retain(|connection| {
            let connection = connection.upgrade();
            let connection =
                connection.filter(|connection| !connection.cut.load(Ordering::Relaxed));
            all.extend(connection.clone());
            connection.is_some()
        });
        all
    }
}

/// The connection's current wait.
#[derive(Debug, Default)]
enum Phase {
    /// The next request; nothing of it has arrived.
    #[default]
    Idle,
    /// The rest of a request's head, of which this many bytes have arrived.
    Head { bytes: usize },
    /// The rest of a request's body.
    Body,
    /// The server's own work.
    Served,
    /// The client, to read its reply. `whole`: HTTP has all of it, and unsent parts are in its
    /// buffer.
    Sending { whole: bool, time: Duration, _slot: Option<Slot> },
    /// The client, to read what has been made so far of a streamed reply.
    Streaming { whole: bool, _slot: Option<Slot> },
    /// The server, to make the next piece of a streamed reply.
    Making { _slot: Option<Slot> },
}

#[derive(Debug)]
struct State {
    phase: Phase,
    since: Instant,
}

impl State {
    fn enter(&mut self, phase: Phase) {
        *self = Self { phase, since: Instant::now() };
    }

    fn deadline(&self, client_timeout: Duration) -> Option<Instant> {
        let time = match self.phase {
            Phase::Idle => KEPT_OPEN,
            Phase::Head { .. } | Phase::Body => client_timeout,
            Phase::Served | Phase::Making { .. } => return None,
            Phase::Streaming { .. } => client_timeout,
            Phase::Sending { time, .. } => client_timeout + time,
        };
        Some(self.since + time)
    }

    fn waits_for_its_client(&self) -> bool {
        !matches!(self.phase, Phase::Served | Phase::Making { .. })
    }
}

/// One connection, shared by its socket, its requests and the sweep.
#[derive(Debug)]
pub struct Connection {
    state: Mutex<State>,
    cut: AtomicBool,
    /// Whether its client has closed its sending side, and the task to notify.
    half_closed: AtomicBool,
    when_half_closed: Notify,
    /// Whether its client supports interim responses.
    takes_interim: AtomicBool,
    /// Wakes the task that serves it.
    waker: AtomicWaker,
}

impl Default for Connection {
    fn default() -> Self {
        let state = Mutex::new(State { phase: Phase::Idle, since: Instant::now() });
        Self {
            state,
            cut: AtomicBool::new(false),
            half_closed: AtomicBool::new(false),
            when_half_closed: Notify::new(),
            takes_interim: AtomicBool::new(false),
            waker: AtomicWaker::new(),
        }
    }
}

impl Connection {
    /// The connection now waits for the request's body.
    pub fn receiving(&self) {
        self.state().enter(Phase::Body);
    }

    /// The connection now waits for the server.
    pub fn served(&self) {
        self.state().enter(Phase::Served);
    }

    /// Returns once the client has closed its sending side and may have left. Sending something
    /// then shows which.
    pub async fn half_closed(&self) {
        self.when_half_closed.notified().await;
    }

    /// Whether a complete request is here and its reply has not been sent.
    fn owes_a_reply(&self) -> bool {
        !matches!(self.state().phase, Phase::Idle | Phase::Head { .. } | Phase::Body)
    }

    /// Whether part of a request has arrived.
    fn has_begun(&self) -> bool {
        !matches!(self.state().phase, Phase::Idle)
    }

    /// Whether no part of the reply has been sent.
    fn is_served(&self) -> bool {
        matches!(self.state().phase, Phase::Served)
    }

    /// A reply starts: of this many bytes, or streamed.
    fn sending(&self, bytes: Option<u64>, slot: Option<Slot>) {
        self.state().enter(match bytes {
            Some(bytes) => {
                let time = Duration::from_secs_f64(bytes as f64 * SECONDS_PER_BYTE);
                Phase::Sending { whole: false, time, _slot: slot }
            }
            None => Phase::Making { _slot: slot },
        });
    }

    /// HTTP has taken a piece of a reply.
    fn took_piece(&self) {
        let mut state = self.state();
        if let Phase::Making { _slot } = &mut state.phase {
            let _slot = _slot.take();
            state.enter(Phase::Streaming { whole: false, _slot });
        }
    }

    /// HTTP has taken the whole reply, or dropped it.
    fn handed_over(&self) {
        let mut state = self.state();
        match &mut state.phase {
            Phase::Sending { whole, .. } | Phase::Streaming { whole, .. } => *whole = true,
            Phase::Making { _slot } => {
                let _slot = _slot.take();
                state.enter(Phase::Streaming { whole: true, _slot });
            }
            _ => {}
        }
    }

    /// The socket has taken everything that HTTP had.
    fn flushed(&self) {
        let mut state = self.state();
        match &mut state.phase {
            Phase::Sending { whole: true, .. } | Phase::Streaming { whole: true, .. } => {
                state.enter(Phase::Idle);
            }
            Phase::Streaming { whole: false, _slot } => {
                let _slot = _slot.take();
                state.enter(Phase::Making { _slot });
            }
            _ => {}
        }
    }

    /// `bytes` have arrived.
    fn received(&self, bytes: usize) {
        let mut state = self.state();
        match &mut state.phase {
            Phase::Idle if bytes > 0 => state.enter(Phase::Head { bytes }),
            Phase::Head { bytes: so_far } => *so_far += bytes,
            _ => {}
        }
    }

    /// Whether the head of a request is too long.
    fn head_is_too_large(&self) -> bool {
        matches!(self.state().phase, Phase::Head { bytes } if bytes > LARGEST_HEAD)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The connection of a request.
#[derive(Debug, Clone)]
pub struct Client(Arc<Connection>);

impl std::ops::Deref for Client {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.0
    }
}

/// Wraps every request: tracks its reply until it is sent, keeps the slot that the reply carries
/// until the socket has taken all of it, and logs the request.
pub async fn watch(
    Shared(log): Shared<AccessLog>,
    ConnectInfo(client): ConnectInfo<Client>,
    request: Request,
    next: Next,
) -> Response {
    let is_1_1 = request.version() == Version::HTTP_11;
    client.takes_interim.store(is_1_1, Ordering::Relaxed);
    if request.body().is_end_stream() {
        client.served()
    } else {
        client.receiving()
    }
    let mut entry = Entry::new(log, &request);
    let mut response = next.run(request).await;
    let slot = response.extensions_mut().remove::<Slot>();
    entry.answered(response.status(), response.extensions_mut().remove::<Note>());
    let announced = response.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok());
    let announced = announced.and_then(|length| length.parse().ok());
    client.sending(announced.or(response.body().size_hint().exact()), slot);
    response.map(|body| Body::new(Outgoing { body, client, _entry: entry }))
}

/// A reply's body that reports when HTTP has all of it.
struct Outgoing {
    body: Body,
    client: Client,
    /// Logged when the body, which is dropped before it, is gone.
    _entry: Entry,
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        self.client.handed_over();
    }
}

impl HttpBody for Outgoing {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(Some(_)) = &polled {
            self.client.took_piece();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Accepts connections.
#[derive(Debug)]
pub(crate) struct Door {
    pub(crate) listener: TcpListener,
    pub(crate) connections: Arc<Connections>,
}

impl Door {
    pub(crate) async fn accept(&self) -> Socket {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    // Replies end in small chunks: waiting to fill a packet would cost 40 ms each.
                    let _ = stream.set_nodelay(true);
                    let client = Client(self.connections.add());
                    return Socket { stream, client, ended_at: None, has_asked: false };
                }
                Err(error) => {
                    tracing::debug!("cannot accept a connection: {error}");
                    (0..ROOM).for_each(|_| self.connections.make_room());
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

/// A socket that can be closed from elsewhere.
#[derive(Debug)]
pub(crate) struct Socket {
    stream: TcpStream,
    client: Client,
    /// When its client closed its sending side.
    ended_at: Option<Instant>,
    /// Whether a client that closed its side got an interim response.
    has_asked: bool,
}

impl Socket {
    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    /// The client has closed its sending side. While a reply is due this is not the end, unless the
    /// client has left.
    fn ended(&mut self) -> Poll<io::Result<()>> {
        let kept = self.ended_at.get_or_insert_with(Instant::now).elapsed() < END_KEPT;
        if !(self.client.owes_a_reply() || kept && self.client.has_begun()) {
            return Poll::Ready(Ok(()));
        }
        if let Some(error) = self.stream.take_error()? {
            return Poll::Ready(Err(error));
        }
        if !self.client.half_closed.swap(true, Ordering::Relaxed) {
            self.client.when_half_closed.notify_one();
        }
        let may_ask = self.client.takes_interim.load(Ordering::Relaxed) && self.client.is_served();
        if may_ask && !std::mem::replace(&mut self.has_asked, true) {
            // There is room for it: nothing else is unsent.
            let _ = self.stream.try_write(INTERIM);
        }
        // The sweep wakes it.
        Poll::Pending
    }

    /// The stream, unless it has been closed by us. Then it closes without waiting for unsent data.
    fn uncut(&mut self, context: &Context<'_>) -> io::Result<Pin<&mut TcpStream>> {
        self.client.waker.register(context.waker());
        if self.client.cut.load(Ordering::Relaxed) {
            let _ = self.stream.set_zero_linger();
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(Pin::new(&mut self.stream))
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // Before the read, because bytes that a read returns after the head are body.
        if self.client.head_is_too_large() {
            return Poll::Ready(Err(io::ErrorKind::InvalidData.into()));
        }
        let before = buffer.filled().len();
        ready!(self.uncut(context)?.poll_read(context, buffer))?;
        let bytes = buffer.filled().len() - before;
        if bytes == 0 && buffer.remaining() > 0 {
            return self.ended();
        }
        self.client.received(bytes);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.uncut(context)?.poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.uncut(context)?.poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.uncut(context)?.poll_flush(context))?;
        self.client.flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
