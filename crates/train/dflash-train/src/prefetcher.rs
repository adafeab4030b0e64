//! Prefetches rows on a thread of its own while the step computes.
//!
//! The thread takes loaded rows, does all the work of a batch that needs only the host
//! ([`Assembler`]: anchors, attention plan, one buffer for the device), and copies each row to the
//! device one row before the step asks for it. There are three buffers: the step reads one, one is
//! ready, one is being written. Errors, the end of the data and stops are delivered in row order.
//!
//! This is the only copy between a received body and the step. On a CPU the step reads the buffer
//! itself. On a GPU the buffer is page-locked and copied on a stream of its own: the step's stream
//! waits for the copy, and the buffer is reused only once the copy has finished. A buffer that a
//! tensor still references is never overwritten; one call checks that. Streams are used through
//! libtorch's generic guard, so CUDA is not linked, and tests substitute copies whose pace they
//! control.

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

/// Buffers that rows are written to in turns.
pub(crate) const BUFFERS: usize = 3;

/// Rows that are ready, or soon.
pub(crate) struct Prefetcher {
    /// Ends with the thread.
    ready: Option<Receiver<DeliveredRow>>,
    /// A word for each row that was taken: the next may go to the device.
    taken: Option<Sender<()>>,
    recycle: Sender<Recycled>,
    closer: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    counters: Counters,
}

/// What became of a row, and what its stream had counted when it came.
struct DeliveredRow {
    row: Result<Option<AssembledRow>, Error>,
    counters: Counters,
}

/// What comes back to the thread.
enum Recycled {
    Used(StagedCopy),
    /// Nobody wants rows any more.
    Closed,
}

/// A row's hold on its buffer: when it is dropped, no tensor of the buffer's memory may be left, and
/// the next row is written to it.
#[derive(Debug)]
pub(crate) struct Lease {
    /// Always there until the drop.
    staged_copy: Option<StagedCopy>,
    recycle: Sender<Recycled>,
}

/// What the thread has.
struct Work {
    rows: Box<dyn RowStream>,
    assembler: Assembler,
    upload: Box<dyn Upload>,
    /// Buffers that nobody uses.
    free: Vec<HostBuffer>,
    back: Receiver<Recycled>,
    recycle: Sender<Recycled>,
    taken: Receiver<()>,
    ready: Sender<DeliveredRow>,
}

/// A row on the host.
struct Written {
    row: AssembledRow,
    /// What the row will hold a lease on, with its bytes.
    trained: Option<(HostBuffer, Blocks, Layout)>,
}

impl Prefetcher {
    /// Begins to make `rows` ready with `upload`.
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
        // The first row may go at once.
        let _ = taken.send(());
        let (ready, taken) = (Some(ready), Some(taken));
        Ok(Self { ready, taken, recycle, closer, thread, counters: Counters::default() })
    }

    /// The next row; `None` at the end, and after an error.
    pub(crate) fn next(&mut self) -> Result<Option<AssembledRow>, Error> {
        let (Some(ready), Some(taken)) = (&self.ready, &self.taken) else { return Ok(None) };
        let Ok(DeliveredRow { row, counters }) = ready.recv() else {
            let ended = self.thread.take().map(JoinHandle::join);
            return ended.unwrap_or(Ok(())).map(|()| None).map_err(|panic| died(&*panic));
        };
        self.counters = counters;
        // A thread that is done wants no more words.
        let _ = taken.send(());
        row
    }

    /// What the stream had counted when it gave the last row that was taken.
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
            // A panic that no row came after has ended the program, or nobody asked for the row.
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
        // A buffer first: a row that waits for one has left the window, and nobody would count it.
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

    /// Waits for a free buffer whose copy is over; `None` when nobody wants rows any more.
    fn buffer(&mut self) -> Option<Result<HostBuffer, Error>> {
        if let Some(buffer) = self.free.pop() {
            return Some(Ok(buffer));
        }
        match self.back.recv() {
            Ok(Recycled::Used(staged_copy)) => Some(staged_copy.into_buffer().map_err(Error::from)),
            Ok(Recycled::Closed) | Err(_) => None,
        }
    }

    /// The next row on the host, `None` at the end.
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
            // Not both at a time.
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

/// The result of `work`; a panic because memory ran out becomes an error that says so.
fn contained<T>(work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    let operation = "make a row ready";
    catch_oom(work)
        .unwrap_or_else(|message| Err(dflash_torch_sys::Error::Torch { operation, message }.into()))
}

impl Lease {
    /// The row's bytes where they are computed on, uint8; what is asked of the device from now on comes
    /// after their copy.
    pub(crate) fn tensor(&self) -> Result<Tensor, Error> {
        let staged_copy = self.staged_copy.as_ref().expect("it is there until the drop");
        Ok(staged_copy.tensor()?)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(staged_copy) = self.staged_copy.take() {
            // A thread that is done needs no buffer.
            let _ = self.recycle.send(Recycled::Used(staged_copy));
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
