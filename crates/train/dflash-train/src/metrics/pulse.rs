//! Updates the display between lines: the clock runs while a step waits, long waits are shown with
//! their duration, and without a terminal a line each minute shows that the run is alive.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dflash_io::{Beat, StepBar, say};

/// Interval between updates.
const BEAT: Duration = Duration::from_secs(1);
/// Waits longer than this are shown.
const LONG: Duration = Duration::from_secs(3);
/// Interval between lines without a terminal.
const SILENCE: Duration = Duration::from_secs(60);

/// The run's current activity.
#[derive(Clone, Debug)]
pub(super) struct Doing {
    /// Start and description of the current wait.
    pub(super) waits: Option<(Instant, &'static str)>,
    /// An estimate of the seconds left, and when it was made.
    pub(super) left: Option<(Instant, f64)>,
    /// Figures of the last line.
    pub(super) message: String,
    /// Whether a validation is using the terminal.
    pub(super) is_aside: bool,
    /// That validation's progress bar, if it has one.
    pub(super) beat: Option<Beat>,
    /// When the run started in this process.
    begun: Instant,
    /// When something was last written without a terminal.
    told: Instant,
}

/// The display thread; it ends on drop.
#[derive(Debug)]
pub(super) struct Pulse {
    doing: Arc<Mutex<Doing>>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Pulse {
    pub(super) fn start(bar: StepBar) -> Self {
        let doing = Arc::new(Mutex::new(Doing::begin(Instant::now())));
        let (stop, stopped) = channel();
        let shown = Arc::clone(&doing);
        let thread = std::thread::spawn(move || {
            while stopped.recv_timeout(BEAT) == Err(RecvTimeoutError::Timeout) {
                let known = shown.lock().unwrap_or_else(PoisonError::into_inner).clone();
                if !bar.is_hidden() {
                    known.draw(&bar, Instant::now());
                } else if let Some(line) = known.line(&bar, Instant::now()) {
                    shown.lock().unwrap_or_else(PoisonError::into_inner).told = Instant::now();
                    say(line);
                }
            }
        });
        Self { doing, stop: Some(stop), thread: Some(thread) }
    }

    /// Changes the state.
    pub(super) fn tell(&self, change: impl FnOnce(&mut Doing)) {
        let mut doing = self.doing.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut doing);
    }

    /// Notes that a line has been written.
    pub(super) fn wrote(&self) {
        self.tell(|doing| doing.told = Instant::now());
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Doing {
    fn begin(now: Instant) -> Self {
        let message = String::new();
        Self {
            waits: None,
            left: None,
            message,
            is_aside: false,
            beat: None,
            begun: now,
            told: now,
        }
    }

    /// Redraws the step bar, or during a validation the validation's bar.
    fn draw(&self, bar: &StepBar, now: Instant) {
        let wait = self.long_wait(now);
        if self.is_aside {
            self.beat.iter().for_each(|beat| beat.show(wait.as_deref()));
            return;
        }
        let elapsed = clock(now.saturating_duration_since(self.begun).as_secs_f64());
        let left = self.seconds_left(now);
        let left = left.map_or_else(String::new, |left| format!(", {} left", clock(left)));
        bar.show_time(format!("{elapsed} elapsed{left}"));
        let wait = wait.map_or_else(String::new, |wait| format!("{wait}  "));
        bar.show_figures(format!("{wait}{}", self.message));
    }

    /// A line, if nothing has been written for a minute.
    fn line(&self, bar: &StepBar, now: Instant) -> Option<String> {
        if now.saturating_duration_since(self.told) < SILENCE {
            return None;
        }
        let (step, total) = (bar.done(), bar.total());
        let work = if self.is_aside { "validating" } else { "at work" };
        let what = self.long_wait(now).unwrap_or_else(|| work.to_owned());
        let left = self.seconds_left(now);
        let left = left.map_or_else(String::new, |left| format!("  {left:.0} s left"));
        Some(format!("step {step}/{total}  {what}{left}"))
    }

    /// Description and duration of the current wait, if it is long.
    fn long_wait(&self, now: Instant) -> Option<String> {
        let (since, what) = self.waits?;
        let waited = now.saturating_duration_since(since);
        (waited >= LONG).then(|| format!("{what}: {} s", waited.as_secs()))
    }

    /// Seconds to the end; the estimate stops falling during a wait.
    fn seconds_left(&self, now: Instant) -> Option<f64> {
        let (at, left) = self.left?;
        let until = self.waits.map_or(now, |(since, _)| since);
        Some((left - until.saturating_duration_since(at).as_secs_f64()).max(0.0))
    }
}

/// Formats seconds.
fn clock(seconds: f64) -> String {
    match seconds as u64 {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds @ 60..3600 => format!("{} min", seconds.div_ceil(60)),
        seconds => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_told_with_its_length_and_a_minute_of_silence_broken() {
        let bar = StepBar::new(3, 40, false);
        let begun = Instant::now();
        let after = |seconds: u64| begun + Duration::from_secs(seconds);
        let mut doing = Doing::begin(begun);
        assert_eq!(doing.line(&bar, after(59)), None);
        assert_eq!(doing.line(&bar, after(60)).unwrap(), "step 3/40  at work");
        doing.left = Some((begun, 100.0));
        assert_eq!(doing.line(&bar, after(70)).unwrap(), "step 3/40  at work  30 s left");
        doing.waits = Some((after(10), "waiting for hidden states"));
        assert_eq!(doing.long_wait(after(12)), None);
        assert_eq!(doing.long_wait(after(22)).unwrap(), "waiting for hidden states: 12 s");
        let line = doing.line(&bar, after(70)).unwrap();
        assert_eq!(line, "step 3/40  waiting for hidden states: 60 s  90 s left");
        doing.told = after(69);
        assert_eq!(doing.line(&bar, after(70)), None);
        // a validation does not suppress the line
        (doing.is_aside, doing.told) = (true, begun);
        assert_eq!(doing.line(&bar, after(70)).unwrap(), line);
        doing.waits = None;
        assert_eq!(doing.line(&bar, after(70)).unwrap(), "step 3/40  validating  30 s left");
    }

    #[test]
    fn times_are_short() {
        let texts = [0.4, 59.0, 61.0, 3599.0, 7300.0].map(clock);
        assert_eq!(texts, ["0 s", "59 s", "2 min", "60 min", "2 h 1 min"]);
    }
}
