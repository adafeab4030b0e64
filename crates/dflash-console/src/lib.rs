//! What people see on stderr: lines, and progress on long work.
//!
//! A reader that is gone, or a full disk behind it, must not end the work: what cannot be written is
//! dropped and counted.

mod progress;

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};

pub use progress::{Progress, Show, Unit};

static LOST_WRITES: AtomicU64 = AtomicU64::new(0);

/// Stderr, but for its failures: they are counted and nobody hears of them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if io::stderr().write_all(bytes).is_err() {
            LOST_WRITES.fetch_add(1, Ordering::Relaxed);
        }
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

/// How many writes to stderr failed so far.
pub fn lost_writes() -> u64 {
    LOST_WRITES.load(Ordering::Relaxed)
}
