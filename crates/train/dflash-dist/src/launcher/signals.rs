//! Records the signals that the launcher receives, for forwarding to the workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::SigId;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};

use crate::Error;

/// Records SIGINT, SIGTERM and SIGUSR1 while it exists, in addition to the program's own handlers.
pub(super) struct Signals<'a> {
    /// The caller's flag to end the job.
    stop: &'a AtomicBool,
    interrupted: Arc<AtomicBool>,
    terminated: Arc<AtomicBool>,
    asked_to_save: Arc<AtomicBool>,
    handlers: Vec<SigId>,
}

impl<'a> Signals<'a> {
    pub(super) fn watch(stop: &'a AtomicBool) -> Result<Self, Error> {
        let mut signals = Self {
            stop,
            interrupted: Arc::default(),
            terminated: Arc::default(),
            asked_to_save: Arc::default(),
            handlers: Vec::new(),
        };
        signals.note(SIGINT, Arc::clone(&signals.interrupted))?;
        signals.note(SIGTERM, Arc::clone(&signals.terminated))?;
        signals.note(SIGUSR1, Arc::clone(&signals.asked_to_save))?;
        Ok(signals)
    }

    /// Whether the job should end.
    pub(super) fn any(&self) -> bool {
        [self.stop, &self.interrupted, &self.terminated]
            .iter()
            .any(|flag| flag.load(Ordering::Relaxed))
    }

    /// Whether SIGUSR1 arrived and was not forwarded yet.
    pub(super) fn save(&self) -> &AtomicBool {
        &self.asked_to_save
    }

    /// The signal to forward: SIGINT after Ctrl-C, else SIGTERM.
    pub(super) fn to_pass_on(&self) -> i32 {
        if self.interrupted.load(Ordering::Relaxed) { SIGINT } else { SIGTERM }
    }

    fn note(&mut self, signal: i32, flag: Arc<AtomicBool>) -> Result<(), Error> {
        self.handlers.push(signal_hook::flag::register(signal, flag).map_err(Error::Signals)?);
        Ok(())
    }
}

impl Drop for Signals<'_> {
    fn drop(&mut self) {
        for &handler in &self.handlers {
            signal_hook::low_level::unregister(handler);
        }
    }
}
