//! The front program: parses the command line, runs what needs no libtorch, and becomes the
//! engine for the rest.

mod commands;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash::cli::GlobalArgs;
use dflash::command_line;
use dflash::{Command, OrdinaryEnd, Signals, engine, exit, logging};

fn main() {
    exit::install_panic_hook();
    let line = command_line::read();
    let global = line.cli.global;
    match &line.cli.command {
        Command::Prepare(settings) => {
            run_here(global, |stop| commands::prepare::run(settings, stop))
        }
        Command::Report(settings) => run_here(global, |_| commands::report::run(settings)),
        // Nothing is installed yet that the engine would have to undo.
        _ => exit::fault(engine::exec(&line)),
    }
}

fn run_here(global: GlobalArgs, run: impl FnOnce(&Arc<AtomicBool>) -> anyhow::Result<()>) -> ! {
    let signals = Signals::install(OrdinaryEnd::Never).unwrap_or_else(|error| exit::fault(error));
    logging::init(global);
    let outcome = run(signals.stop());
    exit::finish(&outcome, &signals, OrdinaryEnd::Never)
}
