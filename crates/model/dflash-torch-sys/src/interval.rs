//! Measures how long a device works on a piece of work.
//!
//! CPU work is done when a call returns. A GPU works asynchronously: start and end are recorded as
//! events in its stream, and the time between them is read with the next line of metrics, when the
//! run synchronises anyway.

use std::time::{Duration, Instant};

use tch::Device;

use crate::ffi::{self, Failure};
use crate::{Error, trace};

enum RawInterval {}

unsafe extern "C" {
    fn dflash_interval_begin(index: i32, interval: *mut *mut RawInterval) -> Failure;
    fn dflash_interval_end(interval: *mut RawInterval) -> Failure;
    fn dflash_interval_seconds(interval: *const RawInterval, seconds: *mut f64) -> Failure;
    fn dflash_interval_free(interval: *mut RawInterval);
}

/// A measurement in progress.
#[derive(Debug)]
pub struct Begun(Clock);

/// A finished measurement; a GPU may still be working.
#[derive(Debug)]
pub struct Interval(Measured);

#[derive(Debug)]
enum Clock {
    Host(Instant),
    Device(Events),
}

#[derive(Debug)]
enum Measured {
    Known(Duration),
    OnDevice(Events),
}

/// Never null; freed once.
#[derive(Debug)]
struct Events(*mut RawInterval);

// SAFETY: events may be used from any thread and are owned by this struct.
unsafe impl Send for Events {}

impl Begun {
    /// Starts measuring the work submitted to `device`.
    ///
    /// # Errors
    /// The device has failed.
    pub fn on(device: Device) -> Result<Self, Error> {
        match device {
            // A fake device has no clock.
            Device::Cuda(index) if !trace::is_fake_cuda() => {
                let mut raw = std::ptr::null_mut();
                // SAFETY: the out pointer is a local.
                ffi::checked("time a GPU", unsafe {
                    dflash_interval_begin(index as i32, &mut raw)
                })?;
                Ok(Self(Clock::Device(Events(raw))))
            }
            _ => Ok(Self(Clock::Host(Instant::now()))),
        }
    }

    /// Ends the measurement after the work submitted so far.
    ///
    /// # Errors
    /// The device has failed.
    pub fn end(self) -> Result<Interval, Error> {
        match self.0 {
            Clock::Host(begun) => Ok(Interval(Measured::Known(begun.elapsed()))),
            Clock::Device(events) => {
                // SAFETY: the events are live.
                ffi::checked("time a GPU", unsafe { dflash_interval_end(events.0) })?;
                Ok(Interval(Measured::OnDevice(events)))
            }
        }
    }
}

impl Interval {
    /// The elapsed time; waits for a GPU to reach the end event.
    ///
    /// # Errors
    /// The device has failed.
    pub fn length(&self) -> Result<Duration, Error> {
        match &self.0 {
            Measured::Known(length) => Ok(*length),
            Measured::OnDevice(events) => {
                let mut seconds = 0.0;
                // SAFETY: the events are live, and the out pointer is a local.
                ffi::checked("time a GPU", unsafe {
                    dflash_interval_seconds(events.0, &mut seconds)
                })?;
                Ok(Duration::from_secs_f64(seconds.max(0.0)))
            }
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // SAFETY: owned, and freed only here.
        unsafe { dflash_interval_free(self.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_has_worked_when_the_call_returns() {
        let begun = Begun::on(Device::Cpu).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        let interval = begun.end().unwrap();
        assert!(interval.length().unwrap() >= Duration::from_millis(5));
    }

    #[test]
    fn a_gpu_that_is_not_there_is_an_error() {
        if tch::Cuda::is_available() {
            return;
        }
        let error = Begun::on(Device::Cuda(0)).unwrap_err().to_string();
        assert!(error.starts_with("time a GPU: "), "{error}");
    }
}
