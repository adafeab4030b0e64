//! Signals: flags that long calls poll, and a deadline for calls that do not.
//!
//! The first SIGINT or SIGTERM (for training also SIGHUP) sets the stop flag. The command then has
//! [`GRACE`] to end on its own, or [`SAVE_GRACE`] (or the time given to [`set_save_grace`]) if it
//! saves its work after that signal. Files are always complete or absent, so ending the process at
//! the deadline loses work but corrupts nothing. A second signal ends the process at once. A
//! terminal sends Ctrl-C to the whole process group and the launcher forwards it too, so signals
//! within [`ECHO`] of the first count as the same one. SIGUSR1 asks training to save and continue.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dflash_io::say;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals as Incoming;

use crate::error::Error;
use crate::exit;

/// Time for a command to end after the first signal. Partially written files are removed at the
/// deadline, so cutting a command short loses work but corrupts nothing.
pub const GRACE: Duration = Duration::from_secs(4);
/// The same after SIGTERM for a command that saves its work. Schedulers send SIGKILL after 30 s
/// (Slurm's KillWait, Kubernetes' grace period), and we promise 20.
pub const SAVE_GRACE: Duration = Duration::from_secs(19);
/// The last stop signal.
static LAST: AtomicI32 = AtomicI32::new(0);
/// The current grace in milliseconds.
static SAVE_GRACE_MS: AtomicU64 = AtomicU64::new(SAVE_GRACE.as_millis() as u64);
/// A repetition within this time of the first signal counts as the same one.
pub const ECHO: Duration = Duration::from_millis(700);

/// Replaces [`SAVE_GRACE`] for later signals.
pub fn set_save_grace(grace: Duration) {
    SAVE_GRACE_MS.store(grace.as_millis() as u64, Ordering::SeqCst);
}

/// Continues after Ctrl-C: clears `stop` and cancels the deadline. Returns false, and clears
/// nothing, after any other signal.
pub fn forgive_interrupt(stop: &AtomicBool) -> bool {
    let is_interrupt = LAST.load(Ordering::SeqCst) == SIGINT;
    if is_interrupt {
        stop.store(false, Ordering::SeqCst);
    }
    is_interrupt
}

/// What a signal does to a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnSignal {
    /// It cuts the command short.
    Interrupt,
    /// It shuts a server down in an orderly way.
    Shutdown {
        /// Time for pending requests to finish.
        drain: Duration,
    },
    /// It stops a training early. SIGTERM, which schedulers send to reclaim the machine, and
    /// SIGHUP, which a closing terminal sends, leave time to save; Ctrl-C leaves only moments.
    Save {
        /// Whether a training stopped by SIGTERM counts as successful.
        sigterm_is_success: bool,
    },
}

impl OnSignal {
    /// Whether a command that `signal` stopped early counts as successful.
    pub fn is_success(self, signal: i32) -> bool {
        match self {
            Self::Interrupt => false,
            Self::Shutdown { .. } => true,
            Self::Save { sigterm_is_success } => sigterm_is_success && signal == SIGTERM,
        }
    }

    /// The signals to handle. A signal that the parent set to be ignored, as `nohup` does with
    /// SIGHUP, stays ignored.
    fn handled(self) -> Vec<i32> {
        let mut handled = vec![SIGINT, SIGTERM];
        if matches!(self, Self::Save { .. }) {
            handled.push(SIGUSR1);
            handled.extend((!is_ignored(SIGHUP)).then_some(SIGHUP));
        }
        handled
    }

    /// Whether the command saves its work after `signal` and so gets more time.
    fn saves_after(self, signal: i32) -> bool {
        matches!(self, Self::Save { .. }) && [SIGTERM, SIGHUP].contains(&signal)
    }
}

/// The installed handlers.
#[derive(Debug, Clone)]
pub struct Signals {
    on_signal: OnSignal,
    stop: Arc<AtomicBool>,
    save: Arc<AtomicBool>,
    received: Arc<AtomicI32>,
    /// Number of stop requests so far: a deadline applies only to its own request.
    asked: Arc<AtomicU64>,
}

impl Signals {
    /// Installs the handlers and the thread that watches them. Call once, before other threads.
    ///
    /// # Errors
    /// The operating system refuses a handler.
    pub fn install(on_signal: OnSignal) -> Result<Self, Error> {
        let incoming =
            Incoming::new(on_signal.handled()).map_err(|source| Error::Signals { source })?;
        let (stop, save, received) = (Arc::default(), Arc::default(), Arc::default());
        let signals = Self { on_signal, stop, save, received, asked: Arc::default() };
        let watched = signals.clone();
        thread::Builder::new()
            .name("signals".into())
            .spawn(move || watched.watch(incoming))
            .map_err(|source| Error::Signals { source })?;
        Ok(signals)
    }

    /// How the command handles signals.
    pub fn on_signal(&self) -> OnSignal {
        self.on_signal
    }

    /// The flag that a long call polls.
    pub fn stop(&self) -> &Arc<AtomicBool> {
        &self.stop
    }

    /// The flag that asks a training to save and continue; the training clears it after saving.
    pub fn save(&self) -> &Arc<AtomicBool> {
        &self.save
    }

    /// The first stop signal received, if any, unless forgiven.
    pub fn received(&self) -> Option<i32> {
        let asks = self.stop.load(Ordering::SeqCst);
        Some(self.received.load(Ordering::SeqCst)).filter(|signal| asks && *signal != 0)
    }

    fn watch(&self, mut incoming: Incoming) {
        let mut first: Option<Instant> = None;
        for signal in incoming.forever() {
            match first {
                _ if signal == SIGUSR1 => self.save.store(true, Ordering::SeqCst),
                None => {
                    first = Some(Instant::now());
                    self.begin_to_stop(signal);
                }
                Some(at) if at.elapsed() < ECHO => {}
                // The previous signal was forgiven.
                Some(_) if !self.stop.load(Ordering::SeqCst) => {
                    first = Some(Instant::now());
                    self.begin_to_stop(signal);
                }
                // A scheduler that repeats its signal must not cost the work that is being saved.
                Some(_) if self.on_signal.saves_after(signal) => {}
                Some(_) => exit::at_once(128 + signal),
            }
        }
    }

    fn begin_to_stop(&self, signal: i32) {
        self.received.store(signal, Ordering::SeqCst);
        LAST.store(signal, Ordering::SeqCst);
        let number = self.asked.fetch_add(1, Ordering::SeqCst) + 1;
        self.stop.store(true, Ordering::SeqCst);
        // The deadline runs in its own thread: this one must keep listening for a second signal.
        let (grace, remedy) = if self.on_signal.saves_after(signal) {
            let grace = Duration::from_millis(SAVE_GRACE_MS.load(Ordering::SeqCst));
            (grace, "; --grace gives it more time to save")
        } else if let OnSignal::Shutdown { drain } = self.on_signal {
            (drain + GRACE, "")
        } else {
            (GRACE, "")
        };
        let (stop, asked) = (Arc::clone(&self.stop), Arc::clone(&self.asked));
        thread::spawn(move || {
            thread::sleep(grace);
            if !stop.load(Ordering::SeqCst) || asked.load(Ordering::SeqCst) != number {
                return;
            }
            let seconds = grace.as_secs_f64();
            say(format!("interrupted; the work did not end within {seconds:.1} s{remedy}"));
            exit::at_once(128 + signal);
        });
    }
}

/// Whether this process was started with `signal` ignored.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignores(&status, signal)
}

/// The same for the text of /proc/self/status, whose mask has bit 0 for signal 1.
fn ignores(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use signal_hook::low_level::raise;

    #[test]
    fn only_termination_may_be_a_success_of_a_training() {
        let check = |on_signal: OnSignal, expected: [bool; 3]| {
            let found = [SIGINT, SIGTERM, SIGHUP].map(|signal| on_signal.is_success(signal));
            assert_eq!(found, expected, "{on_signal:?}");
        };
        check(OnSignal::Interrupt, [false; 3]);
        check(OnSignal::Shutdown { drain: Duration::ZERO }, [true; 3]);
        check(OnSignal::Save { sigterm_is_success: false }, [false; 3]);
        check(OnSignal::Save { sigterm_is_success: true }, [false, true, false]);
    }

    #[test]
    fn an_ignored_signal_is_found_in_the_mask() {
        let status = "Name:\tx\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\n";
        assert!(ignores(status, SIGHUP) && ignores(status, 13));
        assert!(!ignores(status, SIGINT) && !ignores("", SIGHUP));
        assert!(!is_ignored(SIGTERM));
    }

    #[test]
    fn the_first_signal_sets_the_flag_and_its_echo_does_nothing() {
        let signals = Signals::install(OnSignal::Interrupt).unwrap();
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
