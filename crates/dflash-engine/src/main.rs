//! The engine: every command that needs libtorch, behind the same command line as the front.

mod commands;

use clap::Parser;
use dflash::{Cli, Signals, exit, logging};

fn main() {
    exit::install_panic_hook();
    let cli = Cli::parse();
    let ends_by_signal = cli.command.ends_by_signal();
    let signals = Signals::install().unwrap_or_else(|error| exit::fault(error));
    logging::init(cli.global);
    let outcome = commands::run(cli.command, signals.stop());
    exit::finish(&outcome, &signals, ends_by_signal)
}
