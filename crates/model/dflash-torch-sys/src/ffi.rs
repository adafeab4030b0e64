//! FFI declarations of `cpp/c10d.cpp`, `cpp/device.cpp` and `cpp/level.cpp`, and conversion of what
//! they allocate.
//!
//! Every fallible function of the shim returns a [`Failure`]; the C++ of `dflash-kernels` does the
//! same.

use std::ffi::{CStr, c_char, c_void};
use std::time::Duration;

use crate::Error;

/// Text as pointer and length, without a NUL terminator.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Text {
    data: *const u8,
    length: usize,
}

impl Text {
    /// Valid as long as `text`, which covers any call that takes it by value.
    pub(crate) fn new(text: &(impl AsRef<[u8]> + ?Sized)) -> Self {
        let bytes = text.as_ref();
        Self { data: bytes.as_ptr(), length: bytes.len() }
    }
}

// Opaque C++ objects, only ever behind a pointer.
pub(crate) enum RawStore {}
pub(crate) enum RawGroup {}
pub(crate) enum RawWork {}

/// libtorch's `at::Tensor`, the same as tch's `C_tensor`.
pub type RawTensor = c_void;

/// Result of a shim function: null on success, or a message that is freed when it is read.
#[repr(transparent)]
#[must_use]
#[derive(Debug)]
pub struct Failure(*mut c_char);

impl Failure {
    /// The shim's message; `None` if the call succeeded.
    pub fn message(self) -> Option<String> {
        (!self.0.is_null()).then(|| take_string(self.0))
    }
}

unsafe extern "C" {
    pub(crate) fn dflash_quiet_logs();

    pub(crate) fn dflash_libtorch_level(level: *mut *mut c_char) -> Failure;
    pub(crate) fn dflash_mkl_branch() -> i32;
    pub(crate) fn dflash_multiply_in_bf16(rounded: bool) -> Failure;
    pub(crate) fn dflash_leave_out_cudnn_attention();
    #[cfg(test)]
    pub(crate) fn dflash_uses_cudnn_attention() -> bool;
    pub(crate) fn dflash_peak_device_bytes(index: i32, bytes: *mut i64) -> Failure;
    pub(crate) fn dflash_current_stream(index: i32, stream: *mut *mut c_void) -> Failure;
    pub(crate) fn dflash_show_config(report: *mut *mut c_char) -> Failure;

    pub(crate) fn dflash_store_tcp(
        host: Text,
        port: *mut u16,
        is_server: bool,
        listener: i32,
        timeout_ms: i64,
        store: *mut *mut RawStore,
    ) -> Failure;
    pub(crate) fn dflash_store_prefix(
        store: *const RawStore,
        prefix: Text,
        prefixed: *mut *mut RawStore,
    ) -> Failure;
    pub(crate) fn dflash_store_set(store: *const RawStore, key: Text, value: Text) -> Failure;
    pub(crate) fn dflash_store_get(
        store: *const RawStore,
        key: Text,
        value: *mut *mut c_char,
        length: *mut usize,
    ) -> Failure;
    pub(crate) fn dflash_store_contains(
        store: *const RawStore,
        key: Text,
        present: *mut bool,
    ) -> Failure;
    pub(crate) fn dflash_store_add(
        store: *const RawStore,
        key: Text,
        amount: i64,
        total: *mut i64,
    ) -> Failure;
    pub(crate) fn dflash_store_free(store: *mut RawStore);

    pub(crate) fn dflash_group_gloo(
        store: *const RawStore,
        rank: i32,
        size: i32,
        bind: Text,
        bind_is_interface: bool,
        timeout_ms: i64,
        group: *mut *mut RawGroup,
    ) -> Failure;
    pub(crate) fn dflash_group_free(group: *mut RawGroup);
    pub(crate) fn dflash_group_all_reduce(
        group: *const RawGroup,
        tensor: *const RawTensor,
        maximum: bool,
        work: *mut *mut RawWork,
    ) -> Failure;
    pub(crate) fn dflash_group_broadcast(
        group: *const RawGroup,
        tensor: *const RawTensor,
        root: i32,
        work: *mut *mut RawWork,
    ) -> Failure;
    pub(crate) fn dflash_group_all_gather(
        group: *const RawGroup,
        output: *mut RawTensor,
        input: *mut RawTensor,
        work: *mut *mut RawWork,
    ) -> Failure;
    pub(crate) fn dflash_group_reduce_scatter(
        group: *const RawGroup,
        output: *mut RawTensor,
        input: *mut RawTensor,
        work: *mut *mut RawWork,
    ) -> Failure;
    pub(crate) fn dflash_group_barrier(group: *const RawGroup, work: *mut *mut RawWork) -> Failure;

    pub(crate) fn dflash_work_wait(
        work: *const RawWork,
        timeout_ms: i64,
        pending: *mut bool,
    ) -> Failure;
    pub(crate) fn dflash_work_free(work: *mut RawWork);
}

/// Converts the result of a shim call.
///
/// # Errors
/// [`Error::Torch`] with the shim's message, without source positions.
pub fn checked(operation: &'static str, failure: Failure) -> Result<(), Error> {
    match failure.message() {
        None => Ok(()),
        Some(message) => Err(Error::Torch { operation, message: plain(&message) }),
    }
}

/// Copies a NUL-terminated string from the shim and frees the original.
pub(crate) fn take_string(text: *mut c_char) -> String {
    // SAFETY: the shim allocates each string with strdup and hands it over once.
    unsafe {
        let copy = CStr::from_ptr(text).to_string_lossy().into_owned();
        libc::free(text.cast());
        copy
    }
}

/// Copies `length` bytes from the shim and frees the original.
pub(crate) fn take_bytes(bytes: *mut c_char, length: usize) -> Vec<u8> {
    // SAFETY: the shim allocates `length` initialised bytes with malloc and hands them over once.
    unsafe {
        let copy = std::slice::from_raw_parts(bytes.cast::<u8>(), length).to_vec();
        libc::free(bytes.cast());
        copy
    }
}

/// Whole milliseconds, at least one, since c10d takes zero as "forever".
pub(crate) fn milliseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX).max(1)
}

/// An exception's message for end users: without source positions and backtrace; common connection
/// failures are reworded.
fn plain(message: &str) -> String {
    let line = message.lines().next().unwrap_or_default();
    let text = line.split("Exception raised from ").next().unwrap_or_default();
    translated(without_positions(text).trim())
}

/// `text` without source positions such as `[path/file.cc:123] `.
fn without_positions(text: &str) -> String {
    let mut kept = String::new();
    let mut rest = text;
    while let Some(start) = rest.find('[') {
        let (before, after) = rest.split_at(start);
        kept.push_str(before);
        rest = match after.split_once(']') {
            Some((position, behind)) if is_position(&position[1..]) => behind.trim_start(),
            _ => {
                kept.push('[');
                &after[1..]
            }
        };
    }
    kept + rest
}

/// Whether `text` is a source position such as `/src/gloo/pair.cc:553`.
fn is_position(text: &str) -> bool {
    let Some((file, line)) = text.rsplit_once(':') else { return false };
    let is_source = [".cc", ".cpp", ".h", ".hpp"].iter().any(|end| file.ends_with(end));
    is_source && !line.is_empty() && line.bytes().all(|byte| byte.is_ascii_digit())
}

/// Rewords the failures that users meet. gloo puts the peer's address in brackets.
fn translated(text: &str) -> String {
    let lower = text.to_lowercase();
    let peer = text.find(" [").map_or_else(String::new, |at| format!(" ({})", text[at..].trim()));
    let gone = ["connection closed by peer", "connection reset by peer", "broken pipe"];
    if gone.iter().any(|words| lower.contains(words)) {
        return format!("a peer closed the connection{peer}");
    }
    if lower.contains("remote server shutdown or crash") || lower.contains("failed to recv, got 0")
    {
        return "the store's process has ended, or the connection to it is gone".to_owned();
    }
    if lower.contains("connection refused") {
        return format!("nobody listens there: connection refused{peer}");
    }
    if let Some(limit) = waited(&lower) {
        return format!("no answer from a peer within {limit:.1} s");
    }
    if lower.contains("application timeout caused pair closure") {
        return "no answer from a peer in time".to_owned();
    }
    text.to_owned()
}

/// The timeout in seconds from gloo's `timed out waiting 2000ms for recv operation to complete`.
fn waited(text: &str) -> Option<f64> {
    let (_, after) = text.split_once("timed out waiting ")?;
    let (number, _) = after.split_once("ms")?;
    Some(number.trim().parse::<f64>().ok()? / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_lose_position_and_backtrace_only() {
        let check = |input: &str, expected: &str| assert_eq!(plain(input), expected);
        check("[/src/gloo/pair.cc:553] kept", "kept");
        check("failed with [../third_party/gloo/pair.cc:144] no error", "failed with no error");
        check("kept\nException raised from x\nframe #0", "kept");
        check("kept. Exception raised from f at a.cpp:1 (most recent call first):", "kept.");
        check("[::1]:29500 in use", "[::1]:29500 in use");
        check("[/a b] kept [", "[/a b] kept [");
        check("", "");
    }

    #[test]
    fn the_usual_failures_are_said_in_words() {
        let check = |input: &str, expected: &str| assert_eq!(plain(input), expected);
        let pair = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534]";
        let closed = format!("{pair} Connection closed by peer [127.0.0.1]:40522");
        check(&closed, "a peer closed the connection ([127.0.0.1]:40522)");
        let reset = format!("{pair} Read error [10.0.0.2]:4: Connection reset by peer");
        check(&reset, "a peer closed the connection ([10.0.0.2]:4: Connection reset by peer)");
        let late = format!("{pair} Timed out waiting 2000ms for recv operation to complete");
        check(&late, "no answer from a peer within 2.0 s");
        let cut = format!("{pair} Application timeout caused pair closure");
        check(&cut, "no answer from a peer in time");
        let store = "failed to recv, got 0 bytes. Connection was likely closed. Did the remote \
                     server shutdown or crash?";
        check(store, "the store's process has ended, or the connection to it is gone");
    }

    #[test]
    fn a_zero_timeout_is_not_for_ever() {
        assert_eq!(milliseconds(Duration::ZERO), 1);
        assert_eq!(milliseconds(Duration::from_secs(2)), 2000);
        assert_eq!(milliseconds(Duration::MAX), i64::MAX);
    }
}
