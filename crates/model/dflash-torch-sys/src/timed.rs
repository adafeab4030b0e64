//! Where a GPU's time goes: events on libtorch's stream at each change of a part of the work, and the time
//! between them. The GPU waits for nothing that it would not wait for anyhow, and the host only once the
//! work is done.

use std::cell::RefCell;
use std::sync::Arc;

use cudarc::driver::result::event;
use cudarc::driver::sys::{CUevent, CUevent_flags};
use cudarc::driver::{CudaContext, DriverError};

use crate::Error;
use crate::cuda::current_stream;

thread_local! {
    static MARKS: RefCell<Option<Marks>> = const { RefCell::new(None) };
}

/// Events in order, each with the number of the part that begins at it.
struct Marks {
    context: Arc<CudaContext>,
    index: usize,
    events: Vec<(u32, CUevent)>,
    /// The first refusal; nothing is noted after it.
    failed: Option<Error>,
}

/// From now on this thread's changes of parts on the GPU `index` are timed.
///
/// # Errors
/// No such GPU.
pub(crate) fn begin(index: usize) -> Result<(), Error> {
    let context = CudaContext::new(index).map_err(refused)?;
    context.bind_to_thread().map_err(refused)?;
    MARKS.replace(Some(Marks { context, index, events: Vec::new(), failed: None }));
    mark(0);
    Ok(())
}

/// The part of this number begins, behind all that was asked of the GPU so far.
pub(crate) fn mark(part: u32) {
    MARKS.with_borrow_mut(|marks| {
        if let Some(marks) = marks.as_mut().filter(|marks| marks.failed.is_none())
            && let Err(error) = marks.add(part)
        {
            marks.failed = Some(error);
        }
    });
}

/// Waits for the GPU; milliseconds of each stretch, with its part's number.
///
/// # Errors
/// What the driver says, then or at any mark.
pub(crate) fn end(part: u32) -> Result<Vec<(u32, f64)>, Error> {
    mark(part);
    let mut marks = MARKS.take().expect("begun");
    match marks.failed.take() {
        Some(error) => Err(error),
        None => marks.stretches(),
    }
}

impl Marks {
    fn add(&mut self, part: u32) -> Result<(), Error> {
        let stream = current_stream(self.index)?;
        let event = event::create(CUevent_flags::CU_EVENT_DEFAULT).map_err(refused)?;
        self.events.push((part, event));
        // SAFETY: a new event, and libtorch's stream, which lives as long as the process.
        unsafe { event::record(event, stream.cast()) }.map_err(refused)
    }

    fn stretches(&self) -> Result<Vec<(u32, f64)>, Error> {
        let (_, last) = *self.events.last().expect("the first mark");
        // SAFETY: events of this thread's context, which live as long as `self`.
        unsafe { event::synchronize(last) }.map_err(refused)?;
        let stretch = |pair: &[(u32, CUevent)]| {
            // SAFETY: as above, both recorded and done.
            let ms = unsafe { event::elapsed(pair[0].1, pair[1].1) }.map_err(refused)?;
            Ok((pair[0].0, f64::from(ms)))
        };
        self.events.windows(2).map(stretch).collect()
    }
}

impl Drop for Marks {
    fn drop(&mut self) {
        // Another thread than the one that made them would need the context.
        let _ = self.context.bind_to_thread();
        for &(_, event) in &self.events {
            // SAFETY: made by `add`, and not used any more.
            let _ = unsafe { event::destroy(event) };
        }
    }
}

fn refused(error: DriverError) -> Error {
    Error::Torch { operation: "time the GPU's work", message: error.to_string() }
}
