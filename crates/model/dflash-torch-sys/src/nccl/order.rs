//! Orders collectives and computation: by streams on a GPU, trivially for blocking calls.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
use tch::Device;

use super::driver;
use super::library::Stream;
use crate::Error;

pub(super) enum Order {
    Gpu {
        ordinal: usize,
        compute: Arc<CudaStream>,
        /// The collectives' stream.
        stream: Arc<CudaStream>,
    },
    /// Host memory, with a library that accepts it.
    Host,
}

impl Order {
    pub(super) fn of_gpu(ordinal: usize) -> Result<Self, Error> {
        let context = CudaContext::new(ordinal).map_err(driver("use the GPU"))?;
        let compute = context.default_stream();
        let stream = context.new_stream().map_err(driver("make a stream"))?;
        Ok(Self::Gpu { ordinal, compute, stream })
    }

    pub(super) fn takes(&self, device: Device) -> bool {
        match self {
            Self::Gpu { ordinal, .. } => device == Device::Cuda(*ordinal),
            Self::Host => device == Device::Cpu,
        }
    }

    /// Makes the GPU current on this thread, where another may have been.
    pub(super) fn bind(&self, operation: &'static str) -> Result<(), Error> {
        match self {
            Self::Gpu { stream, .. } => {
                stream.context().bind_to_thread().map_err(driver(operation))
            }
            Self::Host => Ok(()),
        }
    }

    /// The collectives' stream, made to wait for the computation submitted so far.
    pub(super) fn after_computation(&self, operation: &'static str) -> Result<Stream, Error> {
        match self {
            Self::Gpu { compute, stream, .. } => {
                stream.join(compute).map_err(driver(operation))?;
                self.bind(operation)?;
                Ok(stream.cu_stream().cast())
            }
            Self::Host => Ok(std::ptr::null_mut()),
        }
    }

    /// Records an event after the submitted collectives; `None` if they are already complete.
    pub(super) fn mark(&self, operation: &'static str) -> Result<Option<CudaEvent>, Error> {
        match self {
            Self::Gpu { stream, .. } => {
                stream.record_event(None).map(Some).map_err(driver(operation))
            }
            Self::Host => Ok(None),
        }
    }

    /// Makes the computation wait for `done`.
    pub(super) fn before_computation(
        &self,
        operation: &'static str,
        done: Option<&CudaEvent>,
    ) -> Result<(), Error> {
        match (self, done) {
            (Self::Gpu { compute, .. }, Some(done)) => {
                compute.wait(done).map_err(driver(operation))
            }
            _ => Ok(()),
        }
    }
}

/// Whether the GPU has reached the event.
pub(super) fn is_done(event: &CudaEvent) -> Result<bool, DriverError> {
    event.context().bind_to_thread()?;
    event.try_is_complete()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_another_device_are_not_taken() {
        assert!(Order::Host.takes(Device::Cpu));
        assert!(!Order::Host.takes(Device::Cuda(0)));
    }
}
