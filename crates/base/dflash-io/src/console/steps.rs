//! Progress of a run that counts steps: two lines, neither wider than the terminal.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::say;

/// A bar with the steps and the time, and a line of figures under it; nothing where they are hidden. Clones
/// show the same.
#[derive(Debug, Clone)]
pub struct StepBar {
    /// Bars are locked while other work has the terminal, so what may be asked then is kept here.
    done: Arc<AtomicU64>,
    total: u64,
    is_hidden: bool,
    steps: ProgressBar,
    figures: ProgressBar,
}

impl StepBar {
    /// A bar of `total` steps, `done` of which were taken before, on stderr if it is `shown` and a terminal.
    pub fn new(done: u64, total: u64, shown: bool) -> Self {
        let target =
            if shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        Self::on(target, done, total)
    }

    fn on(target: ProgressDrawTarget, done: u64, total: u64) -> Self {
        let is_hidden = target.is_hidden();
        // A bar has one message that is cut to the terminal's width: two lines are two bars.
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

    /// Whether nothing is shown, so that lines have to be written instead.
    pub fn is_hidden(&self) -> bool {
        self.is_hidden
    }

    /// Steps taken.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// All steps.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Counts another step.
    pub fn advance(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
        self.steps.inc(1);
    }

    /// Shows the time behind the steps.
    pub fn show_time(&self, time: String) {
        self.steps.set_message(time);
    }

    /// Shows `figures` in the line below.
    pub fn show_figures(&self, figures: String) {
        self.figures.set_message(figures);
    }

    /// Says something above the bar, or where it would be.
    pub fn say(&self, message: &str) {
        match self.is_hidden {
            true => say(message),
            false => self.steps.println(message),
        }
    }

    /// Does `work`, which may draw on the terminal meanwhile.
    pub fn suspend<T>(&self, work: impl FnOnce() -> T) -> T {
        match self.is_hidden {
            true => work(),
            false => self.steps.suspend(work),
        }
    }

    /// Leaves the bar as it is; what follows has a line of its own.
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
