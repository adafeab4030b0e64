//! The front program: parses the command line, runs what needs no libtorch, and becomes the
//! engine for the rest.

mod commands;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash::args::GlobalArgs;
use dflash::command_line::{self, CommandLine};
use dflash::{Command, OrdinaryEnd, Signals, engine, exit, logging};

fn main() {
    exit::install_panic_hook();
    let CommandLine { cli, arguments, origins } = command_line::read();
    match cli.command {
        Command::Prepare(args) => run_here(cli.global, |stop| commands::prepare::run(args, stop)),
        Command::Report(args) => run_here(cli.global, |_| commands::report::run(args)),
        // Nothing is installed yet that the engine would have to undo.
        _ => exit::fault(engine::exec(arguments, &origins)),
    }
}

fn run_here(global: GlobalArgs, run: impl FnOnce(&Arc<AtomicBool>) -> anyhow::Result<()>) -> ! {
    let signals = Signals::install(OrdinaryEnd::Never).unwrap_or_else(|error| exit::fault(error));
    logging::init(global);
    let outcome = run(signals.stop());
    exit::finish(&outcome, &signals, OrdinaryEnd::Never)
}
