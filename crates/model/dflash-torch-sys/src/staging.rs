//! Reusable host buffers and asynchronous copies to and from a GPU on a separate stream, so that a
//! thread prepares the next input while the GPU computes.
//!
//! [`Upload`] copies a buffer to the compute device, [`Download`] copies results to a buffer. On a
//! CPU buffers are used in place without a copy.

use std::ffi::c_void;
use std::fmt;
use std::ptr::null_mut;

use tch::{Device, Tensor};

use crate::ffi::{self, Failure, RawTensor};
use crate::{Error, trace};

// Opaque C++ objects, only ever behind a pointer.
enum RawStream {}
enum RawEvent {}

unsafe extern "C" {
    fn dflash_host_buffer(bytes: i64, pinned: bool, buffer: *mut *mut RawTensor) -> Failure;
    fn dflash_owns_alone(tensor: *const RawTensor) -> bool;
    fn dflash_copy_stream_new(index: i32, stream: *mut *mut RawStream) -> Failure;
    fn dflash_copy_stream_free(stream: *mut RawStream);
    fn dflash_copy_up(
        stream: *const RawStream,
        host: *const RawTensor,
        device: *mut *mut RawTensor,
        copied: *mut *mut RawEvent,
    ) -> Failure;
    fn dflash_copy_down(
        stream: *const RawStream,
        parts: *const *const RawTensor,
        count: i64,
        host: *const RawTensor,
        copied: *mut *mut RawEvent,
    ) -> Failure;
    fn dflash_copy_precede(copied: *const RawEvent, tensor: *const RawTensor) -> Failure;
    fn dflash_copy_wait(copied: *const RawEvent) -> Failure;
    fn dflash_copy_free(copied: *mut RawEvent);
}

/// Host memory that tensors can view without a copy.
///
/// It is only written while no tensor views it, which [`Self::bytes_mut`] checks.
#[derive(Debug)]
pub struct HostBuffer {
    /// `[bytes]`, uint8, on the CPU.
    memory: Tensor,
}

/// A buffer passed to [`Upload::ship`], with its copy.
pub struct StagedCopy {
    copying: Option<Box<dyn Copying>>,
    /// `[bytes]`, uint8, on the compute device.
    copied: Tensor,
    buffer: HostBuffer,
}

/// Results being copied to a buffer, started by [`Download::fetch`].
pub struct Arrival {
    copying: Box<dyn Copying>,
    /// Kept alive until the copy is complete.
    _parts: Vec<Tensor>,
    buffer: HostBuffer,
}

/// An asynchronous copy.
pub trait Copying: Send {
    /// Makes this thread's later work on the device of `tensor`, the copy's result, wait for it.
    ///
    /// # Errors
    /// The device has failed.
    fn precede(&self, tensor: &Tensor) -> Result<(), Error>;

    /// Waits until the copy is complete.
    ///
    /// # Errors
    /// The device has failed.
    fn wait(&self) -> Result<(), Error>;
}

/// Copies buffers to the compute device.
pub trait Upload: Send {
    /// A buffer of at least `bytes` bytes.
    ///
    /// # Errors
    /// Out of memory.
    fn buffer(&self, bytes: usize) -> Result<HostBuffer, Error>;

    /// Starts copying the first `bytes` bytes of `buffer`.
    ///
    /// # Errors
    /// Out of memory on the device, or the device has failed.
    fn ship(&self, buffer: HostBuffer, bytes: usize) -> Result<StagedCopy, Error>;
}

/// Copies results to buffers.
pub trait Download: Send {
    /// As [`Upload::buffer`].
    ///
    /// # Errors
    /// Out of memory.
    fn buffer(&self, bytes: usize) -> Result<HostBuffer, Error>;

    /// Starts copying the contiguous `parts`, concatenated, into `buffer`, after the work that this
    /// thread has submitted to the device so far.
    ///
    /// # Errors
    /// The device has failed.
    fn fetch(&self, parts: Vec<Tensor>, buffer: HostBuffer) -> Result<Arrival, Error>;
}

/// The uploader to `device`.
///
/// # Errors
/// No such GPU.
pub fn upload_to(device: Device) -> Result<Box<dyn Upload>, Error> {
    Ok(match device {
        // A fake GPU has no streams.
        Device::Cuda(_) if trace::is_fake_cuda() => Box::new(Plain(device)),
        Device::Cuda(index) => Box::new(CopyStream::new(index)?),
        _ => Box::new(Plain(device)),
    })
}

/// The downloader from `device`; `None` if results are already on the host.
///
/// # Errors
/// No such GPU.
pub fn download_from(device: Device) -> Result<Option<Box<dyn Download>>, Error> {
    match device {
        Device::Cuda(index) => Ok(Some(Box::new(CopyStream::new(index)?))),
        _ => Ok(None),
    }
}

impl HostBuffer {
    /// A zeroed buffer in pageable memory.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(bytes: usize) -> Result<Self, Error> {
        Self::allocate(bytes, false)
    }

    /// A buffer in page-locked memory, which a GPU accesses without the CPU's help.
    fn pinned(bytes: usize) -> Result<Self, Error> {
        // libtorch's allocator rounds up to a power of two; use all of it.
        Self::allocate(bytes.next_power_of_two(), true)
    }

    fn allocate(bytes: usize, pinned: bool) -> Result<Self, Error> {
        let mut memory = null_mut();
        let count = i64::try_from(bytes).unwrap_or(i64::MAX);
        // SAFETY: the out pointer is a local.
        let failure = unsafe { dflash_host_buffer(count, pinned, &mut memory) };
        ffi::checked("make a buffer on the host", failure)?;
        // SAFETY: a new `at::Tensor`, as tch creates them, handed over once.
        Ok(Self { memory: unsafe { Tensor::from_ptr(memory.cast()) } })
    }

    /// Size in bytes.
    pub fn capacity(&self) -> usize {
        self.memory.numel()
    }

    /// Mutable access to the whole buffer.
    ///
    /// # Panics
    /// When a tensor from [`Self::tensor`] is still alive: a bug, since its values would change.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: a live tensor.
        let alone = unsafe { dflash_owns_alone(raw(&self.memory)) };
        assert!(alone, "a buffer is written while a tensor of its memory is in use");
        let length = self.capacity();
        if length == 0 {
            return &mut [];
        }
        // SAFETY: initialised bytes of a contiguous host tensor. No other tensor shares the memory,
        // and none can while `self` is borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.memory.data_ptr().cast(), length) }
    }

    /// A view of the first `bytes` bytes, uint8.
    pub fn tensor(&self, bytes: usize) -> Tensor {
        self.memory.narrow(0, 0, bytes as i64)
    }
}

impl StagedCopy {
    /// Wraps a pending copy into `copied`, uint8; without `copying` it is complete.
    pub fn new(buffer: HostBuffer, copied: Tensor, copying: Option<Box<dyn Copying>>) -> Self {
        Self { copying, copied, buffer }
    }

    /// The bytes on the compute device, uint8. Work that this thread submits to the device from now
    /// on runs after the copy.
    ///
    /// # Errors
    /// The device has failed.
    pub fn tensor(&self) -> Result<Tensor, Error> {
        if let Some(copying) = &self.copying {
            copying.precede(&self.copied)?;
        }
        Ok(self.copied.shallow_clone())
    }

    /// Waits for the copy and returns the buffer for reuse; no tensor of it may be alive.
    ///
    /// # Errors
    /// The device has failed.
    pub fn into_buffer(self) -> Result<HostBuffer, Error> {
        if let Some(copying) = &self.copying {
            copying.wait()?;
        }
        Ok(self.buffer)
    }
}

impl fmt::Debug for StagedCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StagedCopy").field("copied", &self.copied).finish_non_exhaustive()
    }
}

impl Arrival {
    /// Wraps the pending copy of `parts` into `buffer`.
    pub fn new(buffer: HostBuffer, parts: Vec<Tensor>, copying: Box<dyn Copying>) -> Self {
        Self { copying, _parts: parts, buffer }
    }

    /// Waits for the results and returns the buffer.
    ///
    /// # Errors
    /// The device has failed.
    pub fn wait(self) -> Result<HostBuffer, Error> {
        self.copying.wait()?;
        Ok(self.buffer)
    }
}

impl fmt::Debug for Arrival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arrival").field("buffer", &self.buffer).finish_non_exhaustive()
    }
}

/// Pageable memory: used in place on a CPU, or copied synchronously.
#[derive(Debug)]
struct Plain(Device);

impl Upload for Plain {
    fn buffer(&self, bytes: usize) -> Result<HostBuffer, Error> {
        // Rows have similar sizes; some spare room fits the next larger one too.
        HostBuffer::new(bytes + bytes / 8)
    }

    fn ship(&self, buffer: HostBuffer, bytes: usize) -> Result<StagedCopy, Error> {
        let copied = buffer.tensor(bytes).to_device(self.0);
        Ok(StagedCopy::new(buffer, copied, None))
    }
}

/// A GPU stream dedicated to copies, with page-locked buffers.
#[derive(Debug)]
struct CopyStream(*mut RawStream);

// SAFETY: a plain value that identifies a device and stream; no thread changes it.
unsafe impl Send for CopyStream {}

/// Event recorded after a copy in its stream.
#[derive(Debug)]
struct Event(*mut RawEvent);

// SAFETY: recorded before it is handed out, and used by one thread at a time.
unsafe impl Send for Event {}

impl CopyStream {
    fn new(index: usize) -> Result<Self, Error> {
        let mut stream = null_mut();
        let index = i32::try_from(index).unwrap_or(i32::MAX);
        // SAFETY: the out pointer is a local.
        let failure = unsafe { dflash_copy_stream_new(index, &mut stream) };
        ffi::checked("open a stream of the GPU for copies", failure)?;
        Ok(Self(stream))
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        // SAFETY: made by the shim, and freed once.
        unsafe { dflash_copy_stream_free(self.0) };
    }
}

impl Upload for CopyStream {
    fn buffer(&self, bytes: usize) -> Result<HostBuffer, Error> {
        HostBuffer::pinned(bytes)
    }

    fn ship(&self, buffer: HostBuffer, bytes: usize) -> Result<StagedCopy, Error> {
        let host = buffer.tensor(bytes);
        let (mut device, mut copied) = (null_mut(), null_mut());
        // SAFETY: live objects; the out pointers are locals. libtorch's allocator does not reuse
        // page-locked memory until the copy is complete, even if the buffer is dropped before.
        let failure = unsafe { dflash_copy_up(self.0, raw(&host), &mut device, &mut copied) };
        ffi::checked("copy a row to the GPU", failure)?;
        // SAFETY: a new `at::Tensor`, as tch creates them, handed over once.
        let device = unsafe { Tensor::from_ptr(device.cast()) };
        Ok(StagedCopy::new(buffer, device, Some(Box::new(Event(copied)))))
    }
}

impl Download for CopyStream {
    fn buffer(&self, bytes: usize) -> Result<HostBuffer, Error> {
        HostBuffer::pinned(bytes)
    }

    fn fetch(&self, parts: Vec<Tensor>, buffer: HostBuffer) -> Result<Arrival, Error> {
        let handles: Vec<*const RawTensor> = parts.iter().map(raw).collect();
        let (mut copied, count) = (null_mut(), handles.len() as i64);
        // SAFETY: live objects, kept by the arrival; the out pointer is a local.
        let failure = unsafe {
            dflash_copy_down(self.0, handles.as_ptr(), count, raw(&buffer.memory), &mut copied)
        };
        ffi::checked("copy results from the GPU", failure)?;
        Ok(Arrival::new(buffer, parts, Box::new(Event(copied))))
    }
}

impl Copying for Event {
    fn precede(&self, tensor: &Tensor) -> Result<(), Error> {
        // SAFETY: live objects.
        let failure = unsafe { dflash_copy_precede(self.0, raw(tensor)) };
        ffi::checked("wait for a copy on the GPU", failure)
    }

    fn wait(&self) -> Result<(), Error> {
        // SAFETY: a live object.
        ffi::checked("wait for a copy of the GPU", unsafe { dflash_copy_wait(self.0) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by the shim, and freed once.
        unsafe { dflash_copy_free(self.0) };
    }
}

/// tch's handle points to an `at::Tensor`, as the shim expects.
fn raw(tensor: &Tensor) -> *const c_void {
    tensor.as_ptr().cast()
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use tch::Kind;

    use super::*;

    #[test]
    fn a_tensor_of_a_buffer_is_its_memory() {
        let mut buffer = HostBuffer::new(12).unwrap();
        assert_eq!(buffer.bytes_mut(), [0; 12]);
        buffer.bytes_mut()[4..8].copy_from_slice(&2.5f32.to_le_bytes());
        let place = buffer.bytes_mut().as_ptr();
        let shipped = upload_to(Device::Cpu).unwrap().ship(buffer, 8).unwrap();
        let values = shipped.tensor().unwrap().view_dtype(Kind::Float);
        assert_eq!(Vec::<f32>::try_from(&values).unwrap(), [0.0, 2.5]);
        assert_eq!(shipped.tensor().unwrap().data_ptr().cast_const(), place.cast());
        drop(values);
        assert_eq!(shipped.into_buffer().unwrap().bytes_mut().as_ptr(), place);
    }

    #[test]
    fn a_buffer_is_not_written_while_a_tensor_has_it() {
        let mut buffer = HostBuffer::new(8).unwrap();
        let shipped = buffer.tensor(8);
        for kept in [shipped.view_dtype(Kind::Int64), shipped.shallow_clone(), shipped] {
            let written = catch_unwind(AssertUnwindSafe(|| buffer.bytes_mut()[0] = 1));
            assert!(written.is_err());
            drop(kept);
        }
        buffer.bytes_mut()[0] = 1;
    }

    #[test]
    fn buffers_may_be_empty_and_must_not_be_larger_than_memory() {
        assert!(HostBuffer::new(0).unwrap().bytes_mut().is_empty());
        let refused = HostBuffer::new(1 << 60).unwrap_err().to_string();
        assert!(refused.contains("allocate memory"), "{refused}");
    }

    /// Without a GPU the calls reach libtorch's registries, which have no entry for one.
    #[test]
    fn without_a_gpu_streams_and_page_locked_memory_are_refused() {
        if tch::Cuda::is_available() {
            return;
        }
        let stream = upload_to(Device::Cuda(0)).err().expect("no stream").to_string();
        assert!(stream.starts_with("open a stream of the GPU for copies: "), "{stream}");
        assert!(stream.to_lowercase().contains("cuda"), "{stream}");
        let pinned = HostBuffer::pinned(64).unwrap_err().to_string();
        assert!(pinned.starts_with("make a buffer on the host: "), "{pinned}");
        assert!(download_from(Device::Cpu).unwrap().is_none());
    }
}
