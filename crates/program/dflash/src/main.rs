//! The front program: parses the command line, runs what needs no libtorch, and becomes the
//! engine for the rest.

mod commands;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash::command_line::{self, CommandLine};
use dflash::namesakes::{Namesake, REMEDY};
use dflash::{Command, Ending, Signals, engine, exit, logging};
use dflash_io::say;

fn main() {
    // The front program makes no huge allocations; the engine does.
    exit::install_panic_hook(|_| None);
    let line = command_line::read();
    match &line.cli.command {
        Command::Prepare(settings) => {
            run_here(&line, |stop| commands::prepare::run(settings, stop))
        }
        Command::Eval(settings) if settings.endpoint.is_some() => {
            run_here(&line, |stop| commands::eval::run(settings, stop))
        }
        Command::Report(settings) => run_here(&line, |stop| commands::report::run(settings, stop)),
        Command::Push(settings) => run_here(&line, |stop| commands::push::run(settings, stop)),
        Command::Demo(settings) => run_here(&line, |stop| commands::demo::run(settings, stop)),
        Command::Doctor(settings) => run_here(&line, |stop| commands::doctor::run(settings, stop)),
        Command::Recipes(settings) => run_here(&line, |_| commands::recipes::run(settings)),
        Command::Completions(settings) => {
            run_here(&line, |_| commands::shell_support::completions(settings))
        }
        Command::Man(settings) => run_here(&line, |_| commands::shell_support::man(settings)),
        Command::CpuLevels => run_here(&line, |_| commands::cpu_levels::run()),
        Command::Generate(_) => {
            // Both programs of the name have a command of this name.
            if let Some(other) = Namesake::find() {
                say(format!("note: {other}; {REMEDY}"));
            }
            exit::fault(engine::exec(&line))
        }
        // No signal handler is installed yet that the engine would have to undo.
        _ => exit::fault(engine::exec(&line)),
    }
}

fn run_here(line: &CommandLine, run: impl FnOnce(&Arc<AtomicBool>) -> anyhow::Result<()>) -> ! {
    let signals =
        Signals::install(line.cli.command.on_signal()).unwrap_or_else(|error| exit::fault(error));
    logging::init(line.cli.global);
    let outcome = line.places.explain(run(signals.stop()), commands::prepare::about);
    exit::finish(&outcome.map(|()| Ending::Returned), &signals)
}
