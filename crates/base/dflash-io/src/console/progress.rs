//! Progress of a long piece of work: a bar on a terminal, otherwise a line now and then.

use std::fmt::Display;
use std::io::{self, IsTerminal};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{DecimalBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::say;

/// Interval between lines if there is no terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Prompts, steps and other things of about equal size.
    Items,
    /// Bytes.
    Bytes,
}

/// Where progress is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Show {
    /// As a bar on a terminal, otherwise as lines.
    Bar,
    /// As lines.
    Lines,
    /// Not at all: another process shows it.
    Nothing,
}

/// Progress through a known amount of work. The bar disappears when this is dropped.
#[derive(Debug)]
pub struct Progress {
    title: String,
    unit: Unit,
    bar: ProgressBar,
    started: Instant,
    /// Amount done by an earlier run.
    done_before: u64,
    message: String,
    text: Arc<Mutex<String>>,
    /// When the last line was printed; `None` if lines are not printed.
    last_line: Option<Instant>,
}

impl Progress {
    /// Work called `title`, `total` of `unit` to do.
    ///
    /// # Panics
    /// Never: the bar's templates are constants.
    pub fn new(title: impl Into<String>, unit: Unit, total: u64) -> Self {
        Self::shown(Show::Bar, title, unit, total)
    }

    /// [`Self::new`] with the display mode `show`.
    ///
    /// # Panics
    /// Never.
    pub fn shown(show: Show, title: impl Into<String>, unit: Unit, total: u64) -> Self {
        let draws = show == Show::Bar && io::stderr().is_terminal();
        let target =
            if draws { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let mut progress = Self::on(target, title.into(), unit, total);
        progress.last_line = (!draws && show != Show::Nothing).then_some(progress.started);
        progress
    }

    fn on(target: ProgressDrawTarget, title: String, unit: Unit, total: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(total), target);
        // Lines are cut to the terminal's width.
        let style = ProgressStyle::with_template("{bar:16} {wide_msg}");
        bar.set_style(style.expect("a well-formed template"));
        let (started, message) = (Instant::now(), String::new());
        let (text, last_line) = (Arc::default(), None);
        let progress = Self { title, unit, bar, started, done_before: 0, message, text, last_line };
        progress.draw();
        progress
    }

    /// Sets the amount that an earlier run had done.
    #[must_use]
    pub fn starting_at(mut self, done: u64) -> Self {
        self.done_before = done;
        self.bar.set_position(done);
        self.draw();
        self
    }

    /// Changes the amount of work.
    pub fn set_total(&mut self, total: u64) {
        self.bar.set_length(total);
        self.draw();
    }

    /// Sets the amount done; `message` is shown with it.
    pub fn update(&mut self, done: u64, message: impl Display) {
        self.message = message.to_string();
        self.bar.set_position(done);
        self.draw();
        if self.last_line.is_some_and(|at| at.elapsed() >= LINE_INTERVAL) {
            self.last_line = Some(Instant::now());
            say(self.line(done, &self.message));
        }
    }

    /// A handle that shows, also from another thread, that the work continues.
    pub fn beat(&self) -> Beat {
        Beat { bar: self.bar.clone(), started: self.started, text: Arc::clone(&self.text) }
    }

    fn draw(&self) {
        let text = self.line(self.bar.position(), &self.message);
        let mut shown = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        self.bar.set_message(text.clone());
        *shown = text;
    }

    fn line(&self, done: u64, message: &str) -> String {
        let total = self.bar.length().unwrap_or(done).max(done);
        let amounts = match self.unit {
            Unit::Items => format!("{done} of {total}"),
            Unit::Bytes => format!("{} of {}", DecimalBytes(done), DecimalBytes(total)),
        };
        let now_done = done.saturating_sub(self.done_before).max(1);
        let per_unit = self.started.elapsed().as_secs_f64() / now_done as f64;
        let left = per_unit * (total - done) as f64;
        let message = if message.is_empty() { String::new() } else { format!(", {message}") };
        let left = match done > self.done_before {
            true => format!(", {left:.0} s left"),
            false => String::new(),
        };
        format!("{}: {amounts}{left}{message}", self.title)
    }
}

/// Redraws the bar between two updates.
#[derive(Debug, Clone)]
pub struct Beat {
    bar: ProgressBar,
    started: Instant,
    text: Arc<Mutex<String>>,
}

impl Beat {
    /// Shows the elapsed time, and what the work is waiting for, if anything.
    pub fn show(&self, wait: Option<&str>) {
        // The bar is only changed while it is drawn.
        let shown = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        let wait = wait.map_or_else(String::new, |wait| format!(", {wait}"));
        let seconds = self.started.elapsed().as_secs();
        self.bar.set_message(format!("{}{wait}, {seconds} s so far", *shown));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::screen::Screen;

    #[test]
    fn a_line_has_title_amounts_and_message() {
        let check = |unit, expect: &str| {
            let line = Progress::new("fetching", unit, 2000).line(2000, "fine");
            assert_eq!(line, format!("fetching: {expect}, 0 s left, fine"));
        };
        check(Unit::Items, "2000 of 2000");
        check(Unit::Bytes, "2.00 kB of 2.00 kB");
    }

    #[test]
    fn time_left_follows_from_the_pace() {
        let mut progress = Progress::new("eval", Unit::Items, 1);
        progress.set_total(4);
        progress.started -= Duration::from_secs(30);
        assert_eq!(progress.line(1, "tau 3"), "eval: 1 of 4, 90 s left, tau 3");
        let resumed = progress.starting_at(2);
        assert_eq!(resumed.line(3, "tau 3"), "eval: 3 of 4, 30 s left, tau 3");
    }

    fn on(screen: &Screen) -> Progress {
        Progress::on(screen.target(), "validation, rows".into(), Unit::Items, 123_456)
    }

    #[test]
    fn a_bar_is_one_line_of_a_terminal_of_any_width() {
        for columns in [20, 40, 60, 80, 200] {
            let screen = Screen::new(columns);
            let mut progress = on(&screen);
            progress.started -= Duration::from_secs(90_000);
            progress.update(123_000, "gsm8k speculative: 2.5 tokens a step, 1234.5 tokens/s");
            progress.beat().show(Some("waiting for hidden states: 12 s"));
            assert!(screen.last_with("va").chars().count() > 16);
        }
        let screen = Screen::new(60);
        on(&screen).update(7, "");
        assert!(screen.last_with("validation").contains("rows: 7 of 123456, 0 s left"));
    }

    #[test]
    fn a_beat_shows_the_wait_and_the_clock_until_the_bar_is_gone() {
        let screen = Screen::new(120);
        let mut progress = on(&screen);
        progress.started -= Duration::from_secs(12);
        let beat = progress.beat();
        beat.show(Some("waiting for hidden states: 12 s"));
        let told = "validation, rows: 0 of 123456, waiting for hidden states: 12 s, 12 s so far";
        assert!(screen.last_with("rows").ends_with(told));
        progress.update(1, "");
        assert!(!screen.last_with("rows").contains("waiting"));
        drop(progress);
        let drawn = screen.lines().len();
        beat.show(Some("waiting for hidden states: 12 s"));
        assert_eq!(screen.lines().len(), drawn);
    }
}
