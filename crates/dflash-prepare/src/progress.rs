//! How far the run is, on stderr: a bar on a terminal, a line now and then elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Time between two lines where stderr is not a terminal.
const PLAIN_INTERVAL: Duration = Duration::from_secs(10);

/// Progress through the input, measured in bytes.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    is_plain: bool,
    last_line: Instant,
}

impl Progress {
    pub(crate) fn start(total_bytes: u64) -> Self {
        let style = ProgressStyle::with_template(
            "preparing {bar:30} {percent:>3}% {msg} ({elapsed}, {eta} left)",
        );
        let bar = ProgressBar::new(total_bytes).with_style(style.expect("a valid template"));
        let is_plain = !std::io::stderr().is_terminal();
        Self { bar, is_plain, last_line: Instant::now() }
    }

    pub(crate) fn advance(&mut self, bytes: u64, rows: u64, tokens: u64) {
        self.bar.inc(bytes);
        self.bar.set_message(format!("{rows} rows, {tokens} tokens"));
        if self.is_plain && self.last_line.elapsed() >= PLAIN_INTERVAL {
            self.last_line = Instant::now();
            let total = self.bar.length().unwrap_or(0).max(1);
            let percent = (100 * self.bar.position() / total).min(100);
            eprintln!("preparing: {percent}%, {rows} rows, {tokens} tokens");
        }
    }

    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
