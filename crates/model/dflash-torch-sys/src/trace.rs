//! A fake GPU: records what a step would launch, on tensors that have shapes but no data.
//!
//! [`on_fake_cuda`] runs a function this way, on its own thread and never where libtorch_cuda is loaded.
//! Inside, tensors on `Device::Cuda(0)` can be created and computed with, on machines without a GPU
//! and in next to no memory: operators for CUDA take shapes from the meta device and record bytes,
//! arithmetic and launches. Reading a value of one, waiting for one, or mixing them with host
//! tensors is an error that names the operator. Outside, everything here does nothing and costs one
//! check of a thread-local variable.
//!
//! The code that runs is the code for CUDA. So tests fail on a synchronisation within a step, on
//! mixed devices or on extra launches, and `dflash plan` predicts the time of a step. With
//! `DFLASH_TEST_DEVICE=fake_cuda` the tests for a real GPU run here too; values can then be read,
//! as zeros, and are not compared.

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

/// The part of all that belongs to no other.
pub const NO_PART: &str = "other";

/// What kind of event it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum Form {
    /// An operator of libtorch.
    Operator,
    /// A kernel of our own.
    OwnKernel,
    /// A copy from the host that runs beside the GPU's work.
    Upload,
    /// A copy from the host for which the host first waits until all earlier work is done.
    BlockingUpload,
    /// The host waits for the GPU.
    Wait,
}

/// Something that a GPU would be asked to do.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Event {
    /// As libtorch names it, such as `aten::mm`, or our kernel's name.
    pub operation: String,
    /// The part of the step.
    pub part: &'static str,
    /// What kind of event it is.
    pub form: Form,
    /// Kernels that it launches.
    pub launches: u64,
    /// Bytes read, each argument once.
    pub read: f64,
    /// Bytes written.
    pub written: f64,
    /// Multiplications and additions of products; 0 for all that is elementwise.
    pub flops: f64,
    /// The same with all that a kernel computes because its tiles are full: more only for attention.
    pub tile_flops: f64,
}

/// All that was asked, and the memory that tensors took.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Record {
    /// In order.
    pub events: Vec<Event>,
    /// Bytes of tensors at the end, in the granules of CUDA's allocator (512 bytes).
    pub live_bytes: u64,
    /// Most bytes at one time.
    pub peak_bytes: u64,
    /// The part in which that was.
    pub peak_part: &'static str,
}

/// Whether CUDA is fake on this thread. Then one of our own kernels is not launched, but given
/// to [`own_kernel`], and its results are tensors of the right shape.
pub fn is_fake_cuda() -> bool {
    FAKE_CUDA.get()
}

/// Notes a launch of one of our own kernels, with all that it reads and writes.
///
/// # Panics
/// Tensors that are not fake: a bug of the caller.
pub fn own_kernel(name: &'static str, reads: &[&Tensor], writes: &[&Tensor]) {
    own_kernels(name, 1, reads, writes);
}

/// The same for so many `launches` that share the work.
///
/// # Panics
/// As [`own_kernel`].
pub fn own_kernels(name: &'static str, launches: i64, reads: &[&Tensor], writes: &[&Tensor]) {
    if is_fake_cuda() {
        shim::own_kernel(name, launches, reads, writes).unwrap_or_else(|error| panic!("{error}"));
    }
}

/// The part of a step that the thread is in until this is dropped.
#[derive(Debug)]
#[must_use = "the part ends when this is dropped"]
pub struct TracedPart {
    before: Option<u32>,
}

/// What follows belongs to the part `name`, until the result is dropped. Parts nest; the inner counts.
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

/// Parts and the milliseconds that each took.
pub type PartTimes = Vec<(&'static str, f64)>;

/// Runs `f`, and says for each part how many milliseconds the GPU `index` took for what `f` asked of it there,
/// gaps in which it waited for the host included; parts in the order in which they first came.
///
/// # Errors
/// No such GPU, or what its driver says.
///
/// # Panics
/// Inside itself or a pretence: a bug of the caller.
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

/// Ends the account, by a panic too.
struct Timing;

impl Drop for Timing {
    fn drop(&mut self) {
        TIMED.set(false);
    }
}

/// Fakes a CUDA device on this thread from now to its end, for tests of what a GPU's operators take: values may be
/// read there, and are zeros but for whole numbers that the host has copied and nobody computed with. Nothing is
/// noted for anybody; to call it again does nothing.
///
/// # Errors
/// libtorch's CUDA library is loaded.
pub fn fake_cuda_to_the_end() -> Result<(), Error> {
    if is_fake_cuda() {
        // What was noted is of no use, and would add up.
        shim::start_over();
        return Ok(());
    }
    shim::begin()?;
    shim::readable();
    PARTS.replace(vec![NO_PART]);
    FAKE_CUDA.set(true);
    Ok(())
}

/// Forgets what was noted so far, such as a step's preparations. Tensors that are alive still count as
/// memory, and the peak begins anew with them.
pub fn start_over() {
    shim::start_over();
}

/// Ends the pretence, by a panic too.
struct Pretence;

impl Drop for Pretence {
    fn drop(&mut self) {
        if FAKE_CUDA.replace(false) {
            shim::end();
        }
    }
}

/// Runs `f` with a fake CUDA device on this thread, and says what it asked of it.
///
/// Tensors of the fake CUDA device may outlive it, but not be computed with any more.
///
/// # Errors
/// libtorch's CUDA library is loaded, or the thread fakes one already.
pub fn on_fake_cuda<R>(f: impl FnOnce() -> R) -> Result<(R, Record), Error> {
    recorded(f, || {})
}

/// The same where values may be read, as zeros: for passes whose shapes follow from values, such as those
/// of experts on the GPUs that pick their rows on the host. Their times say nothing.
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
