//! SIGINT and SIGTERM: a flag that long calls poll, and a deadline for those that do not.
//!
//! The first signal sets the flag; the command then has [`GRACE`] to end on its own. A second one
//! ends the process at once. A terminal sends Ctrl-C to the whole process group while a launcher
//! forwards it as well, so signals within [`ECHO`] of the first count as the same one.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals as Incoming;

use crate::error::Error;
use crate::exit;

/// How long a command may take to end after the first signal. What is half written by then is
/// removed, so cutting a command short loses work but breaks no file.
pub const GRACE: Duration = Duration::from_secs(4);
/// A repetition this soon after the first signal is its echo.
pub const ECHO: Duration = Duration::from_millis(700);

/// The installed handlers.
#[derive(Debug, Clone)]
pub struct Signals {
    stop: Arc<AtomicBool>,
    received: Arc<AtomicI32>,
}

impl Signals {
    /// Installs the handlers and the thread that watches them. Call once, before other threads.
    ///
    /// # Errors
    /// When the operating system refuses a handler.
    pub fn install() -> Result<Self, Error> {
        let incoming =
            Incoming::new([SIGINT, SIGTERM]).map_err(|source| Error::Signals { source })?;
        let signals = Self { stop: Arc::default(), received: Arc::default() };
        let watched = signals.clone();
        thread::Builder::new()
            .name("signals".into())
            .spawn(move || watched.watch(incoming))
            .map_err(|source| Error::Signals { source })?;
        Ok(signals)
    }

    /// The flag that a long call polls.
    pub fn stop(&self) -> &Arc<AtomicBool> {
        &self.stop
    }

    /// The first signal received, if any.
    pub fn received(&self) -> Option<i32> {
        Some(self.received.load(Ordering::SeqCst)).filter(|signal| *signal != 0)
    }

    fn watch(&self, mut incoming: Incoming) {
        let mut first: Option<Instant> = None;
        for signal in incoming.forever() {
            match first {
                None => {
                    first = Some(Instant::now());
                    self.begin_to_stop(signal);
                }
                Some(at) if at.elapsed() < ECHO => {}
                Some(_) => exit::at_once(128 + signal),
            }
        }
    }

    fn begin_to_stop(&self, signal: i32) {
        self.received.store(signal, Ordering::SeqCst);
        self.stop.store(true, Ordering::SeqCst);
        // The deadline has a thread of its own: this one must keep listening for a second signal.
        thread::spawn(move || {
            thread::sleep(GRACE);
            let _ = writeln!(io::stderr(), "interrupted; the current step did not end in time");
            exit::at_once(128 + signal);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use signal_hook::low_level::raise;

    #[test]
    fn the_first_signal_sets_the_flag_and_its_echo_does_nothing() {
        let signals = Signals::install().unwrap();
        assert_eq!(signals.received(), None);
        raise(SIGTERM).unwrap();
        let began = Instant::now();
        while !signals.stop().load(Ordering::SeqCst) && began.elapsed() < Duration::from_secs(2) {
            thread::sleep(Duration::from_millis(5));
        }
        raise(SIGTERM).unwrap();
        thread::sleep(Duration::from_millis(50));
        assert_eq!(signals.received(), Some(SIGTERM));
    }
}
