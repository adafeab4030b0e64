//! FFI declarations of `cpp/fake_cuda.cpp`, and the conversion of its record.

use std::ffi::{CStr, CString, c_char};

use tch::Tensor;

use crate::Error;
use crate::ffi::{self, Failure, RawTensor};
use crate::trace::{Event, Form};

/// Layout as in cpp/fake_cuda.cpp.
#[repr(C)]
struct RawEvent {
    operation: *const c_char,
    part: u32,
    form: u32,
    launches: i64,
    read: f64,
    written: f64,
    flops: f64,
    tile_flops: f64,
}

/// Layout as in cpp/fake_cuda.cpp.
#[repr(C)]
struct RawRecord {
    events: *mut RawEvent,
    count: u64,
    live: i64,
    peak: i64,
    peak_part: u32,
}

unsafe extern "C" {
    fn dflash_fake_cuda_begin() -> Failure;
    fn dflash_fake_cuda_readable();
    fn dflash_fake_cuda_part(part: u32);
    fn dflash_fake_cuda_start_over();
    fn dflash_fake_cuda_own_kernel(
        name: *const c_char,
        launches: i64,
        reads: *const *const RawTensor,
        read: u64,
        writes: *const *const RawTensor,
        written: u64,
    ) -> Failure;
    fn dflash_fake_cuda_end(record: *mut RawRecord);
    fn dflash_fake_cuda_free(events: *mut RawEvent);
}

/// The record, with parts by number.
#[derive(Debug)]
pub(crate) struct Numbered {
    pub(crate) events: Vec<(u32, Event)>,
    pub(crate) live: u64,
    pub(crate) peak: u64,
    pub(crate) peak_part: u32,
}

/// Starts the fake CUDA device on this thread.
///
/// # Errors
/// libtorch's CUDA library is loaded, or CUDA is already fake on this thread.
pub(crate) fn begin() -> Result<(), Error> {
    // SAFETY: takes nothing.
    ffi::checked("fake a CUDA device", unsafe { dflash_fake_cuda_begin() })
}

/// Allows reading values from now on.
pub(crate) fn readable() {
    // SAFETY: takes nothing.
    unsafe { dflash_fake_cuda_readable() }
}

/// Sets the part that later events belong to.
pub(crate) fn part(number: u32) {
    // SAFETY: plain numbers.
    unsafe { dflash_fake_cuda_part(number) }
}

/// Discards the events; live tensors remain counted.
pub(crate) fn start_over() {
    // SAFETY: takes nothing.
    unsafe { dflash_fake_cuda_start_over() }
}

/// Records a launch of one of our own kernels.
///
/// # Errors
/// Tensors that are not fake.
pub(crate) fn own_kernel(
    name: &str,
    launches: i64,
    reads: &[&Tensor],
    writes: &[&Tensor],
) -> Result<(), Error> {
    let name = CString::new(name).expect("a kernel's name has no NUL");
    let handles = |tensors: &[&Tensor]| -> Vec<*const RawTensor> {
        tensors.iter().map(|tensor| tensor.as_ptr().cast()).collect()
    };
    let (reads, writes) = (handles(reads), handles(writes));
    // SAFETY: live tensors in the stated number; the name outlives the call.
    let failure = unsafe {
        dflash_fake_cuda_own_kernel(
            name.as_ptr(),
            launches,
            reads.as_ptr(),
            reads.len() as u64,
            writes.as_ptr(),
            writes.len() as u64,
        )
    };
    ffi::checked("note an own kernel", failure)
}

/// Ends the fake device and returns the record.
pub(crate) fn end() -> Numbered {
    let mut raw =
        RawRecord { events: std::ptr::null_mut(), count: 0, live: 0, peak: 0, peak_part: 0 };
    // SAFETY: the record is a local; its events are valid until they are freed, once.
    unsafe {
        dflash_fake_cuda_end(&mut raw);
        let count = if raw.events.is_null() { 0 } else { raw.count as usize };
        let events = (0..count).map(|index| event(&*raw.events.add(index))).collect();
        dflash_fake_cuda_free(raw.events);
        Numbered {
            events,
            live: raw.live.unsigned_abs(),
            peak: raw.peak.unsigned_abs(),
            peak_part: raw.peak_part,
        }
    }
}

/// # Safety
/// The event's name must be valid.
unsafe fn event(raw: &RawEvent) -> (u32, Event) {
    let form = match raw.form {
        0 => Form::Operator,
        1 => Form::OwnKernel,
        2 => Form::Upload,
        3 => Form::BlockingUpload,
        _ => Form::Wait,
    };
    // SAFETY: guaranteed by the caller; the name lives until the process exits.
    let operation = unsafe { CStr::from_ptr(raw.operation) }.to_string_lossy().into_owned();
    let event = Event {
        operation,
        part: "",
        form,
        launches: raw.launches.unsigned_abs(),
        read: raw.read,
        written: raw.written,
        flops: raw.flops,
        tile_flops: raw.tile_flops,
    };
    (raw.part, event)
}
