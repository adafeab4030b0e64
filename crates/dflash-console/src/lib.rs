//! What people see on stderr: lines, and progress on long work.
//!
//! A reader that is gone, or a full disk behind it, must not end the work: what cannot be written is
//! dropped.

mod progress;

use std::fmt::Display;
use std::io::{self, Write};

pub use progress::{Progress, Show, Unit};

/// Stderr, but for its failures, of which nobody can be told.
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
