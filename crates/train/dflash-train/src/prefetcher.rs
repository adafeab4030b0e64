//! Prefetches rows on a separate thread while the step computes.
//!
//! The thread takes loaded rows, does all the work of a batch that needs only the host
//! ([`Assembler`]: anchors, attention plan, one buffer for the device), and copies each row to the
//! device one row before the step asks for it. There are three buffers: the step reads one, one is
//! ready, one is being written. Errors, the end of the data and stops are delivered in row order.
//!
//! This is the only copy between a received body and the step. On a CPU the step reads the buffer
//! itself. On a GPU the buffer is page-locked and copied on a separate stream: the step's stream
//! waits for the copy, and the buffer is reused only once the copy has finished. A buffer that a
//! tensor still references is never overwritten; a single call enforces that. Streams are used
//! through libtorch's generic guard, so CUDA is not linked, and tests substitute copies whose pace
//! they control.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use dflash_hidden_states::Counters;
use dflash_tensor::catch_oom;
use dflash_torch_sys::staging::{HostBuffer, StagedCopy, Upload};
use tch::Tensor;

use crate::Error;
use crate::assembly::{AssembledRow, Assembler, Layout, RowTensors, TrainedRow};
use crate::batch::Blocks;
use crate::rows::{LoadedRow, RowStream};

/// Number of buffers, used in turn.
pub(crate) const BUFFERS: usize = 3;

/// Rows assembled ahead of the step.
pub(crate) struct Prefetcher {
    /// Closed when the thread ends.
    ready: Option<Receiver<DeliveredRow>>,
    /// Signals that a row was taken, so the next one may go to the device.
    taken: Option<Sender<()>>,
    recycle: Sender<Recycled>,
    closer: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    counters: Counters,
}

/// A row or the reason that there is none, with the stream's counters at that time.
struct DeliveredRow {
    row: Result<Option<AssembledRow>, Error>,
    counters: Counters,
}

/// What is returned to the thread.
enum Recycled {
    Used(StagedCopy),
    /// No more rows are wanted.
    Closed,
}

/// A row's hold on its buffer. Dropping it returns the buffer for the next row; no tensor in the
/// buffer's memory may exist then.
#[derive(Debug)]
pub(crate) struct Lease {
    /// `Some` until dropped.
    staged_copy: Option<StagedCopy>,
    recycle: Sender<Recycled>,
}

/// The thread's state.
struct Work {
    rows: Box<dyn RowStream>,
    assembler: Assembler,
    upload: Box<dyn Upload>,
    /// Unused buffers.
    free: Vec<HostBuffer>,
    back: Receiver<Recycled>,
    recycle: Sender<Recycled>,
    taken: Receiver<()>,
    ready: Sender<DeliveredRow>,
}

/// A row written to host memory.
struct Written {
    row: AssembledRow,
    /// The row's buffer, blocks and layout, if it has a supervised slot.
    trained: Option<(HostBuffer, Blocks, Layout)>,
}

impl Prefetcher {
    /// Starts assembling `rows` ahead, copying them with `upload`.
    pub(crate) fn start(
        rows: Box<dyn RowStream>,
        assembler: Assembler,
        upload: Box<dyn Upload>,
    ) -> Result<Self, Error> {
        let free = (0..BUFFERS).map(|_| HostBuffer::new(0)).collect::<Result<Vec<_>, _>>()?;
        let ((delivered, ready), (taken, takes)) = (channel(), channel());
        let (recycle, back) = channel();
        let closer = rows.closer();
        let own = recycle.clone();
        let work = Work {
            rows,
            assembler,
            upload,
            free,
            back,
            recycle: own,
            taken: takes,
            ready: delivered,
        };
        let thread = thread::Builder::new().name("assembly".into()).spawn(|| work.run());
        let thread = Some(thread.map_err(dflash_hidden_states::Error::Runtime)?);
        // The first row may go to the device at once.
        let _ = taken.send(());
        let (ready, taken) = (Some(ready), Some(taken));
        Ok(Self { ready, taken, recycle, closer, thread, counters: Counters::default() })
    }

    /// The next row; `None` at the end and after an error.
    pub(crate) fn next(&mut self) -> Result<Option<AssembledRow>, Error> {
        let (Some(ready), Some(taken)) = (&self.ready, &self.taken) else { return Ok(None) };
        let Ok(DeliveredRow { row, counters }) = ready.recv() else {
            let ended = self.thread.take().map(JoinHandle::join);
            return ended.unwrap_or(Ok(())).map(|()| None).map_err(|panic| died(&*panic));
        };
        self.counters = counters;
        // A finished thread needs no signal.
        let _ = taken.send(());
        row
    }

    /// The stream's counters as of the last row taken.
    pub(crate) fn counters(&self) -> Counters {
        self.counters
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        self.closer.store(true, Ordering::Relaxed);
        (self.ready, self.taken) = (None, None);
        let _ = self.recycle.send(Recycled::Closed);
        if let Some(thread) = self.thread.take() {
            // A panic has either been reported by `next`, or nobody asked for the row.
            let _ = thread.join();
        }
    }
}

fn died(panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    Error::Assembly { reason: text.unwrap_or("a panic without a message").to_owned() }
}

impl Work {
    fn run(mut self) {
        // Get a buffer first: a row waiting for one would have left the window uncounted.
        while let Some(buffer) = self.buffer() {
            let written = contained(|| self.write(buffer?));
            let counters = self.rows.counters();
            if self.taken.recv().is_err() {
                return;
            }
            let row = contained(|| written?.map(|written| self.ship(written)).transpose());
            let goes_on = matches!(row, Ok(Some(_)));
            if self.ready.send(DeliveredRow { row, counters }).is_err() || !goes_on {
                return;
            }
        }
    }

    /// Waits for a free buffer whose copy has finished; `None` if no more rows are wanted.
    fn buffer(&mut self) -> Option<Result<HostBuffer, Error>> {
        if let Some(buffer) = self.free.pop() {
            return Some(Ok(buffer));
        }
        match self.back.recv() {
            Ok(Recycled::Used(staged_copy)) => Some(staged_copy.into_buffer().map_err(Error::from)),
            Ok(Recycled::Closed) | Err(_) => None,
        }
    }

    /// Loads and writes the next row; `None` at the end.
    fn write(&mut self, mut buffer: HostBuffer) -> Result<Option<Written>, Error> {
        let Some(loaded) = self.rows.next()? else { return Ok(None) };
        let LoadedRow { row, states, skipped, .. } = &loaded;
        let (tokens, samples, skipped) = (row.input_ids.len(), states.len(), *skipped);
        let row = AssembledRow { tokens, samples, skipped, trained: None, target: None };
        let Some((blocks, layout)) = self.assembler.plan(&loaded) else {
            self.free.push(buffer);
            return Ok(Some(Written { row, trained: None }));
        };
        if buffer.capacity() < layout.bytes() {
            // Free the old one first, so that both never exist at once.
            drop(buffer);
            buffer = self.upload.buffer(layout.bytes())?;
        }
        self.assembler.write(&loaded, &blocks, &layout, buffer.bytes_mut());
        Ok(Some(Written { row, trained: Some((buffer, blocks, layout)) }))
    }

    fn ship(&self, written: Written) -> Result<AssembledRow, Error> {
        let Written { row, trained } = written;
        let Some((buffer, blocks, layout)) = trained else { return Ok(row) };
        let staged_copy = Some(self.upload.ship(buffer, layout.bytes())?);
        let lease = Lease { staged_copy, recycle: self.recycle.clone() };
        let tensors = RowTensors::Written { layout, lease };
        Ok(AssembledRow { trained: Some(TrainedRow { blocks, tensors }), ..row })
    }
}

/// Runs `work`, turning an out-of-memory panic into an error.
fn contained<T>(work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    let operation = "assemble a row";
    catch_oom(work)
        .unwrap_or_else(|message| Err(dflash_torch_sys::Error::Torch { operation, message }.into()))
}

impl Lease {
    /// The row's bytes on the computing device, uint8; later work there follows the copy.
    pub(crate) fn tensor(&self) -> Result<Tensor, Error> {
        let staged_copy = self.staged_copy.as_ref().expect("it is there until the drop");
        Ok(staged_copy.tensor()?)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(staged_copy) = self.staged_copy.take() {
            // A finished thread needs no buffer.
            let _ = self.recycle.send(Recycled::Used(staged_copy));
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
