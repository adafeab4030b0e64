//! Measures GPU time per part of the work: an event on libtorch's stream at each change of part.
//! This adds no waiting on the GPU, and the host waits only at the end.

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

/// Events in order, each with the number of the part that starts there.
struct Marks {
    context: Arc<CudaContext>,
    index: usize,
    events: Vec<(u32, CUevent)>,
    /// The first error; nothing is recorded after it.
    failed: Option<Error>,
}

/// Starts timing this thread's parts on the GPU `index`.
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

/// Starts part `part` after all work submitted to the GPU so far.
pub(crate) fn mark(part: u32) {
    MARKS.with_borrow_mut(|marks| {
        if let Some(marks) = marks.as_mut().filter(|marks| marks.failed.is_none())
            && let Err(error) = marks.add(part)
        {
            marks.failed = Some(error);
        }
    });
}

/// Waits for the GPU and returns the milliseconds of each stretch, with its part's number.
///
/// # Errors
/// The driver's error, now or at an earlier mark.
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
        // SAFETY: a new event, and libtorch's stream, which lives until the process exits.
        unsafe { event::record(event, stream.cast()) }.map_err(refused)
    }

    fn stretches(&self) -> Result<Vec<(u32, f64)>, Error> {
        let (_, last) = *self.events.last().expect("the first mark");
        // SAFETY: events of this thread's context, which live as long as `self`.
        unsafe { event::synchronize(last) }.map_err(refused)?;
        let stretch = |pair: &[(u32, CUevent)]| {
            // SAFETY: as above; both are recorded and complete.
            let ms = unsafe { event::elapsed(pair[0].1, pair[1].1) }.map_err(refused)?;
            Ok((pair[0].0, f64::from(ms)))
        };
        self.events.windows(2).map(stretch).collect()
    }
}

impl Drop for Marks {
    fn drop(&mut self) {
        // A thread other than their creator needs the context to be current.
        let _ = self.context.bind_to_thread();
        for &(_, event) in &self.events {
            // SAFETY: created by `add` and no longer used.
            let _ = unsafe { event::destroy(event) };
        }
    }
}

fn refused(error: DriverError) -> Error {
    Error::Torch { operation: "time the GPU's work", message: error.to_string() }
}
