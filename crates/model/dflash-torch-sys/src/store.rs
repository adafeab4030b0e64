//! c10d's key-value store, through which processes find each other.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::{IntoRawFd, RawFd};
use std::ptr::NonNull;
use std::sync::Once;
use std::time::Duration;

use crate::Error;
use crate::ffi::{self, RawStore, Text};

/// A connection to a TCPStore; with [`Store::serve`] also the server.
///
/// Calls from several threads are serialised, so a thread that waits in [`Store::get`] blocks the
/// others: a thread that sets the awaited key needs its own connection. Values are arbitrary bytes.
#[derive(Debug)]
pub struct Store {
    raw: NonNull<RawStore>,
    port: u16,
}

// SAFETY: the C++ object has an atomic reference count, and TCPStore serialises its operations with
// its own mutex.
unsafe impl Send for Store {}
// SAFETY: as above; every method of the shim takes the store by const pointer.
unsafe impl Sync for Store {}

impl Store {
    /// Listens on `address` only (port 0 for a free one, see [`Store::port`]) until dropped.
    /// `timeout` bounds [`Store::get`].
    ///
    /// # Errors
    /// [`Error::Listen`] if the address is in use or not usable, [`Error::Torch`] if the server
    /// does not start.
    pub fn serve(address: impl Into<SocketAddr>, timeout: Duration) -> Result<Self, Error> {
        let address = address.into();
        let failed = |source| Error::Listen { address, source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        // c10d closes the socket.
        let role = Role::Server(Some(listener.into_raw_fd()));
        Self::tcp(&bound.ip().to_string(), bound.port(), role, timeout)
    }

    /// [`Store::serve`] on all interfaces.
    ///
    /// # Errors
    /// [`Error::Torch`] if the port is in use or not permitted.
    pub fn serve_everywhere(port: u16, timeout: Duration) -> Result<Self, Error> {
        Self::tcp("127.0.0.1", port, Role::Server(None), timeout)
    }

    /// Connects to the store at `host:port` within `timeout`, which also bounds [`Store::get`].
    ///
    /// # Errors
    /// [`Error::Torch`] if nothing answers in time or it is not a TCPStore.
    pub fn connect(host: &str, port: u16, timeout: Duration) -> Result<Self, Error> {
        Self::tcp(host, port, Role::Client, timeout)
    }

    /// A view of this store in which every key starts with `prefix`; shares the connection.
    ///
    /// # Errors
    /// [`Error::Torch`] when out of memory.
    pub fn prefixed(&self, prefix: &str) -> Result<Self, Error> {
        let mut raw = std::ptr::null_mut();
        // SAFETY (here and below): live store; texts outlive the call; out pointers are locals.
        let failure =
            unsafe { ffi::dflash_store_prefix(self.pointer(), Text::new(prefix), &mut raw) };
        ffi::checked("open a prefix of the store", failure)?;
        Ok(Self::own(raw, self.port))
    }

    /// The server's port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Sets `key`, replacing any previous value.
    ///
    /// # Errors
    /// [`Error::Torch`] if the server is gone, as for all methods below.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), Error> {
        ffi::checked("write to the store", unsafe {
            ffi::dflash_store_set(self.pointer(), Text::new(key), Text::new(value))
        })
    }

    /// Waits for `key` and returns its value.
    ///
    /// # Errors
    /// [`Error::Torch`], also if the store's timeout expires.
    pub fn get(&self, key: &str) -> Result<Vec<u8>, Error> {
        let (mut value, mut length) = (std::ptr::null_mut(), 0);
        ffi::checked("read from the store", unsafe {
            ffi::dflash_store_get(self.pointer(), Text::new(key), &mut value, &mut length)
        })?;
        Ok(ffi::take_bytes(value, length))
    }

    /// Whether `key` is set; does not wait.
    pub fn contains(&self, key: &str) -> Result<bool, Error> {
        let mut present = false;
        ffi::checked("look into the store", unsafe {
            ffi::dflash_store_contains(self.pointer(), Text::new(key), &mut present)
        })?;
        Ok(present)
    }

    /// Adds `amount` to the number at `key` (0 if unset) and returns the sum.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64, Error> {
        let mut total = 0;
        ffi::checked("count in the store", unsafe {
            ffi::dflash_store_add(self.pointer(), Text::new(key), amount, &mut total)
        })?;
        Ok(total)
    }

    fn tcp(host: &str, port: u16, role: Role, timeout: Duration) -> Result<Self, Error> {
        quiet_logs();
        let (mut raw, mut used) = (std::ptr::null_mut(), port);
        let (operation, is_server, listener) = match role {
            Role::Client => ("reach the store", false, None),
            Role::Server(listener) => ("open the store", true, listener),
        };
        let (listener, limit) = (listener.unwrap_or(-1), ffi::milliseconds(timeout));
        let host = Text::new(host);
        ffi::checked(operation, unsafe {
            ffi::dflash_store_tcp(host, &mut used, is_server, listener, limit, &mut raw)
        })?;
        Ok(Self::own(raw, used))
    }

    fn own(raw: *mut RawStore, port: u16) -> Self {
        Self { raw: NonNull::new(raw).expect("the shim succeeds with an object"), port }
    }

    pub(crate) fn pointer(&self) -> *const RawStore {
        self.raw.as_ptr()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: owned, freed once.
        unsafe { ffi::dflash_store_free(self.raw.as_ptr()) }
    }
}

/// Log level variable of libtorch, for debugging.
const LOG_VARIABLE: &str = "TORCH_CPP_LOG_LEVEL";

/// Keeps c10d's logs, with their stack traces, off the terminal unless the user enables them.
fn quiet_logs() {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        if std::env::var_os(LOG_VARIABLE).is_none() {
            // SAFETY: sets a number that is read without a lock, as libtorch's own setter does.
            unsafe { ffi::dflash_quiet_logs() }
        }
    });
}

/// Role of this end of a connection.
enum Role {
    Client,
    /// The server, on a bound socket if given.
    Server(Option<RawFd>),
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Long enough for a machine that is busy with other tests.
    const PATIENCE: Duration = Duration::from_secs(60);
    const SOON: Duration = Duration::from_millis(300);

    const LOOPBACK: ([u8; 4], u16) = ([127, 0, 0, 1], 0);

    #[test]
    fn a_client_reads_what_the_server_wrote() {
        let server = Store::serve(LOOPBACK, PATIENCE).unwrap();
        let client = Store::connect("127.0.0.1", server.port(), PATIENCE).unwrap();
        server.set("key", b"\0value\xff").unwrap();
        assert_eq!(client.get("key").unwrap(), b"\0value\xff");
        assert!(!client.contains("other").unwrap());
        assert_eq!(client.add("count", 2).unwrap(), 2);
        assert_eq!(server.add("count", 3).unwrap(), 5);
    }

    #[test]
    fn prefixes_keep_keys_apart() {
        let server = Store::serve(LOOPBACK, PATIENCE).unwrap();
        let (left, right) = (server.prefixed("left").unwrap(), server.prefixed("right").unwrap());
        left.set("key", b"").unwrap();
        assert!(left.contains("key").unwrap());
        assert!(!right.contains("key").unwrap());
        assert_eq!(left.get("key").unwrap(), b"");
    }

    #[test]
    fn a_missing_key_ends_in_an_error_after_the_timeout() {
        let server = Store::serve(LOOPBACK, SOON).unwrap();
        let start = std::time::Instant::now();
        let error = server.get("nobody writes this").unwrap_err();
        assert!(matches!(error, Error::Torch { operation: "read from the store", .. }), "{error}");
        assert!(start.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn a_taken_port_is_an_error() {
        let listener = TcpListener::bind("0.0.0.0:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let error = Store::serve_everywhere(port, PATIENCE).unwrap_err().to_string();
        assert!(error.contains("open the store"), "{error}");
        let error = Store::serve((LOOPBACK.0, port), PATIENCE).unwrap_err();
        assert!(
            matches!(error, Error::Listen { address, .. } if address.port() == port),
            "{error}"
        );
    }

    #[test]
    fn only_the_given_address_is_listened_on() {
        // All of 127.0.0.0/8 is loopback, so a second address tells the two apart on any machine.
        let reached = |port| std::net::TcpStream::connect(("127.0.0.2", port)).is_ok();
        assert!(!reached(Store::serve(LOOPBACK, PATIENCE).unwrap().port()));
        assert!(reached(Store::serve_everywhere(0, PATIENCE).unwrap().port()));
    }
}
