//! File and terminal utilities of all commands: atomic files, lines and progress bars.

mod console;
mod files;

pub use console::{Beat, Progress, Show, Stderr, StepBar, Unit, say};
pub use files::{
    Error, PendingDir, PendingFile, is_absent_or_empty, remove_dir, remove_pending, replace_link,
    write_atomic, write_bytes,
};
