//! A fake GPU: records what a step would launch, on tensors that have shapes but no data.
//!
//! [`on_fake_cuda`] runs a function on its own thread, never in a process that has loaded
//! libtorch_cuda. Inside, code can create and use tensors on `Device::Cuda(0)` without a GPU and
//! with almost no memory: CUDA operators take shapes from the meta device and record bytes,
//! arithmetic and launches. Reading a value, waiting for one, or mixing devices is an error that
//! names the operator. Outside, everything here costs one check of a thread-local variable.
//!
//! It runs the real CUDA code paths. So tests detect a synchronisation within a step, mixed devices
//! or extra launches, and `dflash plan` predicts the time of a step. With
//! `DFLASH_TEST_DEVICE=fake_cuda` the tests for a real GPU also run here; values then read as zeros
//! and are not compared.

use std::cell::{Cell, RefCell};

use serde::Serialize;
use tch::Tensor;

use crate::{Error, fake_cuda as shim, timed as clock};

thread_local! {
    static FAKE_CUDA: Cell<bool> = const { Cell::new(false) };
    static TIMED: Cell<bool> = const { Cell::new(false) };
    static PART: Cell<u32> = const { Cell::new(0) };
    static PARTS: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
}

/// The part of events outside any named part.
pub const NO_PART: &str = "other";

/// Type of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum Form {
    /// A libtorch operator.
    Operator,
    /// One of our own kernels.
    OwnKernel,
    /// A host-to-device copy that overlaps GPU work.
    Upload,
    /// A host-to-device copy for which the host first waits for all earlier work.
    BlockingUpload,
    /// The host waits for the GPU.
    Wait,
}

/// Something that a GPU would execute.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Event {
    /// libtorch's name, such as `aten::mm`, or our kernel's name.
    pub operation: String,
    /// The part of the step.
    pub part: &'static str,
    /// Type of event.
    pub form: Form,
    /// Number of kernels launched.
    pub launches: u64,
    /// Bytes read, counting each argument once.
    pub read: f64,
    /// Bytes written.
    pub written: f64,
    /// Arithmetic operations of matrix products; 0 for elementwise operators.
    pub flops: f64,
    /// `flops` including masked pairs in partly filled tiles; differs only for attention.
    pub tile_flops: f64,
}

/// All recorded events, and memory use.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Record {
    /// In order.
    pub events: Vec<Event>,
    /// Bytes of live tensors at the end, rounded like CUDA's allocator (to 512 bytes).
    pub live_bytes: u64,
    /// Peak bytes.
    pub peak_bytes: u64,
    /// The part in which the peak occurred.
    pub peak_part: &'static str,
}

/// Whether CUDA is fake on this thread. If so, our kernels are not launched but passed to
/// [`own_kernel`], and results are tensors of the right shape.
pub fn is_fake_cuda() -> bool {
    FAKE_CUDA.get()
}

/// Records a launch of one of our own kernels, with all tensors that it reads and writes.
///
/// # Panics
/// If a tensor is not fake: a bug of the caller.
pub fn own_kernel(name: &'static str, reads: &[&Tensor], writes: &[&Tensor]) {
    own_kernels(name, 1, reads, writes);
}

/// [`own_kernel`] for several `launches` that share the work.
///
/// # Panics
/// As [`own_kernel`].
pub fn own_kernels(name: &'static str, launches: i64, reads: &[&Tensor], writes: &[&Tensor]) {
    if is_fake_cuda() {
        shim::own_kernel(name, launches, reads, writes).unwrap_or_else(|error| panic!("{error}"));
    }
}

/// Marks the current part of a step until dropped.
#[derive(Debug)]
#[must_use = "the part ends when this is dropped"]
pub struct TracedPart {
    before: Option<u32>,
}

/// Assigns what follows to part `name` until the result is dropped. The innermost part counts.
pub fn part(name: &'static str) -> TracedPart {
    if !is_fake_cuda() && !TIMED.get() {
        return TracedPart { before: None };
    }
    TracedPart { before: Some(enter(number(name))) }
}

fn enter(number: u32) -> u32 {
    if TIMED.get() {
        clock::mark(number);
    } else {
        shim::part(number);
    }
    PART.replace(number)
}

fn number(name: &'static str) -> u32 {
    PARTS.with_borrow_mut(|parts| {
        let known = parts.iter().position(|part| *part == name);
        let index = known.unwrap_or_else(|| {
            parts.push(name);
            parts.len() - 1
        });
        index as u32
    })
}

impl Drop for TracedPart {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            enter(before);
        }
    }
}

/// Milliseconds per part.
pub type PartTimes = Vec<(&'static str, f64)>;

/// Runs `f` and measures how many milliseconds the GPU `index` spent on each part, including gaps
/// in which it waited for the host; parts are in order of first appearance.
///
/// # Errors
/// No such GPU, or the driver's error.
///
/// # Panics
/// If nested, or on a fake GPU: a bug of the caller.
pub fn timed<R>(index: usize, f: impl FnOnce() -> R) -> Result<(R, PartTimes), Error> {
    assert!(!is_fake_cuda() && !TIMED.get(), "one account of the parts at a time");
    PARTS.replace(vec![NO_PART]);
    PART.set(0);
    clock::begin(index)?;
    let timing = Timing;
    TIMED.set(true);
    let result = f();
    drop(timing);
    let stretches = clock::end(0)?;
    let parts = PARTS.take();
    let mut sums: PartTimes = parts.into_iter().map(|part| (part, 0.0)).collect();
    stretches.into_iter().for_each(|(part, ms)| sums[part as usize].1 += ms);
    Ok((result, sums))
}

/// Ends the measurement, also on a panic.
struct Timing;

impl Drop for Timing {
    fn drop(&mut self) {
        TIMED.set(false);
    }
}

/// Fakes a CUDA device on this thread for the rest of its life, for tests of GPU operators. Values
/// may be read; they are zeros, except integers copied from the host and not computed with. Nothing
/// is recorded; repeated calls have no effect.
///
/// # Errors
/// libtorch's CUDA library is loaded.
pub fn fake_cuda_to_the_end() -> Result<(), Error> {
    if is_fake_cuda() {
        // The record is not used and would accumulate.
        shim::start_over();
        return Ok(());
    }
    shim::begin()?;
    shim::readable();
    PARTS.replace(vec![NO_PART]);
    FAKE_CUDA.set(true);
    Ok(())
}

/// Discards the events so far, such as those of a step's preparation. Live tensors still count as
/// memory, and the peak restarts from them.
pub fn start_over() {
    shim::start_over();
}

/// Ends the fake device, also on a panic.
struct Pretence;

impl Drop for Pretence {
    fn drop(&mut self) {
        if FAKE_CUDA.replace(false) {
            shim::end();
        }
    }
}

/// Runs `f` with a fake CUDA device on this thread and returns the record.
///
/// Tensors of the fake device may outlive the call but can no longer be computed with.
///
/// # Errors
/// libtorch's CUDA library is loaded, or CUDA is already fake on this thread.
pub fn on_fake_cuda<R>(f: impl FnOnce() -> R) -> Result<(R, Record), Error> {
    recorded(f, || {})
}

/// [`on_fake_cuda`] where values may be read, as zeros: for passes whose shapes depend on values,
/// such as experts on GPUs whose rows the host picks. The recorded work is not meaningful.
///
/// # Errors
/// As [`on_fake_cuda`].
pub fn on_readable_fake_cuda<R>(f: impl FnOnce() -> R) -> Result<(R, Record), Error> {
    recorded(f, shim::readable)
}

fn recorded<R>(f: impl FnOnce() -> R, prepare: fn()) -> Result<(R, Record), Error> {
    shim::begin()?;
    prepare();
    PARTS.replace(vec![NO_PART]);
    PART.set(0);
    FAKE_CUDA.set(true);
    let pretence = Pretence;
    let result = f();
    FAKE_CUDA.set(false);
    let numbered = shim::end();
    drop(pretence);
    let parts = PARTS.take();
    let name = |number: u32| parts.get(number as usize).copied().unwrap_or(NO_PART);
    let events = numbered.events.into_iter();
    let record = Record {
        events: events.map(|(part, event)| Event { part: name(part), ..event }).collect(),
        live_bytes: numbered.live,
        peak_bytes: numbered.peak,
        peak_part: name(numbered.peak_part),
    };
    Ok((result, record))
}
