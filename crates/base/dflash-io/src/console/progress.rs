//! Progress of a long piece of work: a bar on a terminal, otherwise a line now and then.

use std::fmt::Display;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{DecimalBytes, ProgressBar, ProgressStyle};

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
    /// What an earlier run had done.
    done_before: u64,
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

    /// As [`Self::new`], shown as `show` says.
    ///
    /// # Panics
    /// Never.
    pub fn shown(show: Show, title: impl Into<String>, unit: Unit, total: u64) -> Self {
        let template = match unit {
            Unit::Items => "{prefix} {bar:30} {pos} of {len}, {eta} left  {msg}",
            Unit::Bytes => {
                "{prefix} {bar:30} {decimal_bytes} of {decimal_total_bytes}, {eta} left  {msg}"
            }
        };
        let style = ProgressStyle::with_template(template).expect("a well-formed template");
        let title = title.into();
        let draws = show == Show::Bar && io::stderr().is_terminal();
        let bar = if draws { ProgressBar::new(total) } else { ProgressBar::hidden() };
        bar.set_style(style);
        bar.set_length(total);
        bar.set_prefix(title.clone());
        let started = Instant::now();
        let last_line = (!draws && show != Show::Nothing).then_some(started);
        Self { title, unit, bar, started, done_before: 0, last_line }
    }

    /// Work of which an earlier run had done `done`.
    #[must_use]
    pub fn starting_at(mut self, done: u64) -> Self {
        self.done_before = done;
        self.bar.set_position(done);
        self.bar.reset_eta();
        self
    }

    /// Corrects the amount of work.
    pub fn set_total(&mut self, total: u64) {
        self.bar.set_length(total);
    }

    /// `done` of the total is done; `message` is shown with it.
    pub fn update(&mut self, done: u64, message: impl Display) {
        self.bar.set_position(done);
        self.bar.set_message(message.to_string());
        if self.last_line.is_some_and(|at| at.elapsed() >= LINE_INTERVAL) {
            self.last_line = Some(Instant::now());
            say(self.line(done, &message.to_string()));
        }
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
        format!("{}: {amounts}, {left:.0} s left{message}", self.title)
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
}
