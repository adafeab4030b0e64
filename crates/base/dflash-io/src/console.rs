//! Terminal output: lines on stderr, and progress of long work.
//!
//! A closed reader, or a full disk behind it, must not end the work: output that cannot be written
//! is dropped.

mod progress;
#[cfg(test)]
mod screen;
mod steps;

use std::fmt::Display;
use std::io::{self, Write};

pub use progress::{Beat, Progress, Show, Unit};
pub use steps::StepBar;

/// Stderr that ignores write errors, because there is nowhere to report them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = io::stderr().write_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes a line to stderr.
pub fn say(line: impl Display) {
    // In one piece, so that lines of several processes do not mix.
    let _ = Stderr.write(format!("{line}\n").as_bytes());
}
