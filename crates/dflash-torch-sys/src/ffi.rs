//! The declarations of `cpp/c10d.cpp`, and the reading of what it allocates.

use std::ffi::{CStr, c_char, c_void};
use std::time::Duration;

use crate::Error;

/// Text as pointer and length; need not end in NUL.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Text {
    data: *const u8,
    length: usize,
}

impl Text {
    /// Valid as long as `text` is, which covers any call that takes it by value.
    pub(crate) fn new(text: &(impl AsRef<[u8]> + ?Sized)) -> Self {
        let bytes = text.as_ref();
        Self { data: bytes.as_ptr(), length: bytes.len() }
    }
}

// Opaque C++ objects, only ever behind a pointer.
pub(crate) enum RawStore {}
pub(crate) enum RawGroup {}
pub(crate) enum RawWork {}

/// libtorch's `at::Tensor`, which tch's `C_tensor` is.
pub(crate) type RawTensor = c_void;

/// What a function of the shim says of a failure: a message to be freed; null where it succeeded.
pub(crate) type Failure = *mut c_char;

unsafe extern "C" {
    pub(crate) fn dflash_multiply_in_bf16() -> Failure;
    pub(crate) fn dflash_peak_device_bytes(index: i32, bytes: *mut i64) -> Failure;
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

/// The outcome of a call of the shim.
pub(crate) fn checked(operation: &'static str, failure: Failure) -> Result<(), Error> {
    if failure.is_null() {
        return Ok(());
    }
    Err(Error::Torch { operation, message: plain(&take_string(failure)) })
}

/// Copies a NUL-terminated string from the shim and frees the original.
pub(crate) fn take_string(text: *mut c_char) -> String {
    // SAFETY: the shim hands over strings from strdup, once each.
    unsafe {
        let copy = CStr::from_ptr(text).to_string_lossy().into_owned();
        libc::free(text.cast());
        copy
    }
}

/// Copies `length` bytes from the shim and frees the original.
pub(crate) fn take_bytes(bytes: *mut c_char, length: usize) -> Vec<u8> {
    // SAFETY: the shim hands over `length` initialised bytes from malloc, once each.
    unsafe {
        let copy = std::slice::from_raw_parts(bytes.cast::<u8>(), length).to_vec();
        libc::free(bytes.cast());
        copy
    }
}

/// Whole milliseconds, at least one: zero means "forever" to c10d.
pub(crate) fn milliseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX).max(1)
}

/// An exception's text without gloo's "`[file:line]` " in front and the lines of a
/// backtrace behind.
fn plain(message: &str) -> String {
    let line = message.lines().next().unwrap_or_default().trim();
    match line.strip_prefix("[/").and_then(|rest| rest.split_once("] ")) {
        Some((position, rest)) if !position.contains(' ') => rest.to_owned(),
        _ => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_lose_position_and_backtrace_only() {
        let check = |input: &str, expected: &str| assert_eq!(plain(input), expected);
        check("[/src/gloo/pair.cc:553] Connection closed by peer", "Connection closed by peer");
        check("Connection closed\nException raised from x\nframe #0", "Connection closed");
        check("[::1]:29500 refused", "[::1]:29500 refused");
        check("[/a b] kept", "[/a b] kept");
        check("", "");
    }

    #[test]
    fn a_zero_timeout_is_not_for_ever() {
        assert_eq!(milliseconds(Duration::ZERO), 1);
        assert_eq!(milliseconds(Duration::from_secs(2)), 2000);
        assert_eq!(milliseconds(Duration::MAX), i64::MAX);
    }
}
