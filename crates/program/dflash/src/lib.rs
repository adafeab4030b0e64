//! Shared by both programs: command line, exit codes, signals, logs, the search for libtorch.
//!
//! `dflash` (the front program) runs the commands that need no libtorch; for the rest it finds
//! libtorch and replaces itself with `dflash-engine`, which parses the same arguments again and
//! takes a run file's settings from the front program.

mod error;
mod run_file;

pub mod cli;
pub mod command_line;
pub mod engine;
pub mod exit;
pub mod libtorch;
pub mod logging;
pub mod name;
pub mod namesakes;
pub mod places;
pub mod signals;

pub use cli::{Cli, Command};
pub use error::Error;
pub use exit::Ending;
pub use signals::{OnSignal, SAVE_GRACE, Signals, set_save_grace};
