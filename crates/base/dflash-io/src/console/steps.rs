//! Progress of a run that counts steps: two lines, neither wider than the terminal.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::say;

/// A bar with steps and time, and a line of figures below it. Clones share the bar.
#[derive(Debug, Clone)]
pub struct StepBar {
    /// Kept here because bars are locked while other work uses the terminal.
    done: Arc<AtomicU64>,
    total: u64,
    is_hidden: bool,
    steps: ProgressBar,
    figures: ProgressBar,
}

impl StepBar {
    /// A bar of `total` steps, `done` of them earlier, on stderr if that is a terminal and `shown`.
    pub fn new(done: u64, total: u64, shown: bool) -> Self {
        let target =
            if shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        Self::on(target, done, total)
    }

    fn on(target: ProgressDrawTarget, done: u64, total: u64) -> Self {
        let is_hidden = target.is_hidden();
        // A bar has one message, cut to the terminal's width, so two lines need two bars.
        let lines = MultiProgress::with_draw_target(target);
        let line = |template: &str| {
            let style = ProgressStyle::with_template(template).expect("a well-formed template");
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden());
            lines.add(bar.with_position(done).with_style(style))
        };
        let steps = line("{bar:16} {pos}/{len} steps  {wide_msg}");
        let figures = line("{wide_msg}");
        Self { done: Arc::new(AtomicU64::new(done)), total, is_hidden, steps, figures }
    }

    /// Whether nothing is shown, so that lines should be printed instead.
    pub fn is_hidden(&self) -> bool {
        self.is_hidden
    }

    /// Number of steps taken.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Total number of steps.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Counts another step.
    pub fn advance(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
        self.steps.inc(1);
    }

    /// Shows the time after the steps.
    pub fn show_time(&self, time: String) {
        self.steps.set_message(time);
    }

    /// Shows `figures` in the line below.
    pub fn show_figures(&self, figures: String) {
        self.figures.set_message(figures);
    }

    /// Prints a message above the bar, or on stderr if hidden.
    pub fn say(&self, message: &str) {
        match self.is_hidden {
            true => say(message),
            false => self.steps.println(message),
        }
    }

    /// Runs `work` while the bar is hidden, so that it may draw on the terminal.
    pub fn suspend<T>(&self, work: impl FnOnce() -> T) -> T {
        match self.is_hidden {
            true => work(),
            false => self.steps.suspend(work),
        }
    }

    /// Leaves the bar on screen; later output starts on a new line.
    pub fn close(&self) {
        if self.is_hidden || self.steps.is_finished() {
            return;
        }
        self.steps.abandon();
        self.figures.abandon();
        say("");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::screen::Screen;

    #[test]
    fn both_lines_fit_terminals_of_any_width_however_long_the_run_is() {
        for columns in [40, 60, 80, 200] {
            let screen = Screen::new(columns);
            let bar = StepBar::on(screen.target(), 999_999, 1_000_000);
            bar.show_time("1234 h 59 min elapsed, 1234 h 59 min left".to_owned());
            bar.show_figures("loss 3.2500  length 2.50  ".repeat(9));
            bar.advance();
            assert!(screen.last_with("1000000/1000000 steps").starts_with("████████████████ "));
            assert!(screen.last_with("loss 3.2500").starts_with("loss 3.2500"));
            assert_eq!((bar.done(), bar.total(), bar.is_hidden()), (1_000_000, 1_000_000, false));
        }
        let screen = Screen::new(80);
        StepBar::on(screen.target(), 63, 400).show_time("5 s elapsed, 20 min left".to_owned());
        assert!(screen.last_with("63/400").ends_with("63/400 steps  5 s elapsed, 20 min left"));
    }

    #[test]
    fn what_is_counted_can_be_asked_while_other_work_has_the_terminal() {
        let bar = StepBar::on(Screen::new(80).target(), 3, 40);
        let aside = bar.clone();
        let asked = bar.suspend(|| {
            let asking =
                std::thread::spawn(move || (aside.done(), aside.total(), aside.is_hidden()));
            asking.join().unwrap()
        });
        assert_eq!(asked, (3, 40, false));
    }
}
