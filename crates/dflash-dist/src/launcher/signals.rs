//! Which signal the launcher was sent, so that the workers are sent the same.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::SigId;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::Error;

/// Notes SIGINT and SIGTERM while it lives, beside whatever handlers the program has.
pub(super) struct Signals {
    interrupted: Arc<AtomicBool>,
    terminated: Arc<AtomicBool>,
    handlers: Vec<SigId>,
}

impl Signals {
    pub(super) fn watch() -> Result<Self, Error> {
        let (interrupted, terminated) = (Arc::default(), Arc::default());
        let mut signals = Self { interrupted, terminated, handlers: Vec::new() };
        signals.note(SIGINT, Arc::clone(&signals.interrupted))?;
        signals.note(SIGTERM, Arc::clone(&signals.terminated))?;
        Ok(signals)
    }

    pub(super) fn any(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed) || self.terminated.load(Ordering::Relaxed)
    }

    /// SIGINT after Ctrl-C, else SIGTERM.
    pub(super) fn to_pass_on(&self) -> i32 {
        if self.interrupted.load(Ordering::Relaxed) { SIGINT } else { SIGTERM }
    }

    fn note(&mut self, signal: i32, flag: Arc<AtomicBool>) -> Result<(), Error> {
        self.handlers.push(signal_hook::flag::register(signal, flag).map_err(Error::Signals)?);
        Ok(())
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for &handler in &self.handlers {
            signal_hook::low_level::unregister(handler);
        }
    }
}
