//! What both programs share: the command line, exit codes, signals, logs, the search for libtorch.
//!
//! `dflash` (the front) and `dflash-engine` parse the same [`Cli`]. The front runs what needs no
//! libtorch; for the rest it finds libtorch and replaces itself with the engine, which parses the
//! very same arguments again; with a run file, the arguments that stand for it.

mod error;
mod run_file;

pub mod args;
pub mod command_line;
pub mod engine;
pub mod exit;
pub mod libtorch;
pub mod logging;
pub mod origins;
pub mod signals;

pub use args::{Cli, Command};
pub use error::Error;
pub use signals::{OrdinaryEnd, SAVE_GRACE, Signals, set_save_grace};
