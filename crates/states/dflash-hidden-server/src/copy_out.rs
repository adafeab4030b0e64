//! Copies rows from a GPU to the host on a stream of its own while the next batch computes.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use dflash_torch_sys::staging::{Arrival, Download, HostBuffer};
use tch::Tensor;

use crate::target::Unfit;

/// Copies the rows of batches in order, of which two may be in flight.
pub(crate) struct CopyOut {
    download: Box<dyn Download>,
    /// Buffers without rows; as many as batches have been in flight.
    free: Arc<Mutex<Vec<HostBuffer>>>,
}

/// The rows of a batch, being copied.
pub(crate) struct Coming {
    arrival: Arrival,
    /// Bytes of each prompt in one layer.
    lengths: Vec<usize>,
    layers: usize,
    free: Arc<Mutex<Vec<HostBuffer>>>,
}

impl CopyOut {
    pub(crate) fn new(download: Box<dyn Download>) -> Self {
        Self { download, free: Arc::default() }
    }

    /// Starts copying `layers`, each [T, H] contiguous in the wire's type, of prompts that begin at
    /// `starts`.
    pub(crate) fn begin(&self, layers: Vec<Tensor>, starts: &[i64]) -> Result<Coming, Unfit> {
        let row =
            layers.first().map_or(0, |th| th.size()[1] as usize * th.kind().elt_size_in_bytes());
        let lengths = starts.windows(2).map(|ends| (ends[1] - ends[0]) as usize * row).collect();
        let (bytes, count) = (layers.iter().map(bytes_of).sum(), layers.len());
        let buffer = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let buffer = match buffer.filter(|buffer| buffer.capacity() >= bytes) {
            Some(buffer) => buffer,
            None => self.download.buffer(bytes)?,
        };
        let arrival = self.download.fetch(layers, buffer)?;
        Ok(Coming { arrival, lengths, layers: count, free: Arc::clone(&self.free) })
    }
}

impl Coming {
    /// The rows of each prompt and each layer, in their own memory, once the copy has finished.
    pub(crate) fn rows(self) -> Result<Vec<Vec<Bytes>>, Unfit> {
        let mut buffer = self.arrival.wait()?;
        let mut rows = vec![Vec::with_capacity(self.layers); self.lengths.len()];
        let mut rest = &*buffer.bytes_mut();
        for _ in 0..self.layers {
            for (rows, &length) in rows.iter_mut().zip(&self.lengths) {
                let (own, behind) = rest.split_at(length);
                rows.push(copied(own)?);
                rest = behind;
            }
        }
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
        Ok(rows)
    }
}

impl fmt::Debug for CopyOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyOut").field("free", &self.free).finish_non_exhaustive()
    }
}

fn bytes_of(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

/// A copy of `rows`. An infallible allocation would end the process if memory ran out.
fn copied(rows: &[u8]) -> Result<Bytes, Unfit> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(rows.len())?;
    bytes.extend_from_slice(rows);
    Ok(bytes.into())
}
