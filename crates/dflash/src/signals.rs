//! SIGINT and SIGTERM: a flag that long calls poll, and a deadline for those that do not.
//!
//! The first signal sets the flag; the command then has [`GRACE`] to end on its own, or
//! [`SAVE_GRACE`] (or what [`set_save_grace`] says) where SIGTERM is an [`OrdinaryEnd`] that leaves
//! work to be saved. A second one ends the process at once. A terminal sends Ctrl-C to the whole
//! process group while a launcher forwards it as well, so signals within [`ECHO`] of the first count
//! as the same one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dflash_console::say;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals as Incoming;

use crate::error::Error;
use crate::exit;

/// How long a command may take to end after the first signal. What is half written by then is
/// removed, so cutting a command short loses work but breaks no file.
pub const GRACE: Duration = Duration::from_secs(4);
/// The same after SIGTERM for a command that saves its work first. Schedulers follow up with SIGKILL
/// after 30 s (Slurm's KillWait, Kubernetes' grace period), and we promise 20.
pub const SAVE_GRACE: Duration = Duration::from_secs(19);
/// [`SAVE_GRACE`] in milliseconds, until a command knows better.
static SAVE_GRACE_MS: AtomicU64 = AtomicU64::new(SAVE_GRACE.as_millis() as u64);
/// A repetition this soon after the first signal is its echo.
pub const ECHO: Duration = Duration::from_millis(700);

/// Sets how long this process may save after SIGTERM, in place of [`SAVE_GRACE`]; for signals that
/// come later.
pub fn set_save_grace(grace: Duration) {
    SAVE_GRACE_MS.store(grace.as_millis() as u64, Ordering::SeqCst);
}

/// Which signals are an ordinary way for a command to end. It exits with 0 after them, once it has
/// done what there was to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrdinaryEnd {
    /// None: what a signal cuts short is unfinished.
    Never,
    /// SIGTERM, by which schedulers ask for the machine back. Ctrl-C stays an interruption, so that
    /// a script that is interrupted does not go on to its next command.
    Termination,
    /// Both.
    AnySignal,
}

impl OrdinaryEnd {
    /// Whether `signal` is one of them.
    pub fn is_by(self, signal: i32) -> bool {
        match self {
            Self::Never => false,
            Self::Termination => signal == SIGTERM,
            Self::AnySignal => true,
        }
    }
}

/// The installed handlers.
#[derive(Debug, Clone)]
pub struct Signals {
    end: OrdinaryEnd,
    stop: Arc<AtomicBool>,
    received: Arc<AtomicI32>,
}

impl Signals {
    /// Installs the handlers and the thread that watches them. Call once, before other threads.
    ///
    /// # Errors
    /// When the operating system refuses a handler.
    pub fn install(end: OrdinaryEnd) -> Result<Self, Error> {
        let incoming =
            Incoming::new([SIGINT, SIGTERM]).map_err(|source| Error::Signals { source })?;
        let signals = Self { end, stop: Arc::default(), received: Arc::default() };
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

    /// A server has nothing to save, so the longer time is only for those that SIGTERM ends.
    fn saves_after(&self, signal: i32) -> bool {
        self.end == OrdinaryEnd::Termination && signal == SIGTERM
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
                // A scheduler that repeats itself must not cost the work that is being saved.
                Some(_) if signal == SIGTERM && self.saves_after(signal) => {}
                Some(_) => exit::at_once(128 + signal),
            }
        }
    }

    fn begin_to_stop(&self, signal: i32) {
        self.received.store(signal, Ordering::SeqCst);
        self.stop.store(true, Ordering::SeqCst);
        // The deadline has a thread of its own: this one must keep listening for a second signal.
        let (grace, remedy) = if self.saves_after(signal) {
            let grace = Duration::from_millis(SAVE_GRACE_MS.load(Ordering::SeqCst));
            (grace, "; --grace gives it more time to save")
        } else {
            (GRACE, "")
        };
        thread::spawn(move || {
            thread::sleep(grace);
            let seconds = grace.as_secs_f64();
            say(format!("interrupted; the work did not end within {seconds:.1} s{remedy}"));
            exit::at_once(128 + signal);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use signal_hook::low_level::raise;

    #[test]
    fn an_interrupt_is_not_an_ordinary_end_of_a_training() {
        let check = |end: OrdinaryEnd, expected: [bool; 2]| {
            assert_eq!([SIGINT, SIGTERM].map(|signal| end.is_by(signal)), expected, "{end:?}");
        };
        check(OrdinaryEnd::Never, [false, false]);
        check(OrdinaryEnd::Termination, [false, true]);
        check(OrdinaryEnd::AnySignal, [true, true]);
    }

    #[test]
    fn the_first_signal_sets_the_flag_and_its_echo_does_nothing() {
        let signals = Signals::install(OrdinaryEnd::Never).unwrap();
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
