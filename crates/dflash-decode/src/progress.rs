//! Progress on stderr: a bar on a terminal, a line now and then in a log.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// How often a log gets a line.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Progress of a known number of items.
#[derive(Debug)]
pub(crate) struct Progress {
    title: &'static str,
    bar: ProgressBar,
    total: usize,
    started: Instant,
    logged: Option<Instant>,
}

impl Progress {
    /// Shows `title` and `total` items to come.
    pub(crate) fn new(title: &'static str, total: usize) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bar = if terminal { ProgressBar::new(total as u64) } else { ProgressBar::hidden() };
        let style =
            ProgressStyle::with_template("{prefix} {bar:30} {pos}/{len} [{elapsed} < {eta}] {msg}")
                .expect("the template is well formed");
        bar.set_style(style);
        bar.set_prefix(title);
        let logged = (!terminal).then(Instant::now);
        Self { title, bar, total, started: Instant::now(), logged }
    }

    /// Advances to `done` items with a few words on how it goes.
    pub(crate) fn update(&mut self, done: usize, message: &str) {
        self.bar.set_position(done as u64);
        self.bar.set_message(message.to_owned());
        if self.logged.is_some_and(|at| at.elapsed() >= LOG_INTERVAL) {
            self.logged = Some(Instant::now());
            let seconds = self.started.elapsed().as_secs();
            eprintln!("{} {done}/{} {seconds}s {message}", self.title, self.total);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
