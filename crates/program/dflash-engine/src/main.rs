//! The engine: all commands that need libtorch, with the same command line as the front program.

mod commands;
mod loading;

use dflash::command_line;
use dflash::{Command, Signals, engine, exit, libtorch, logging};

fn main() {
    exit::install_panic_hook(dflash_tensor::catch_oom_in);
    let line = command_line::read();
    let (cli, places) = (line.cli, line.places);
    engine::check_level(&cli.command).unwrap_or_else(|error| exit::fault(error));
    let signals = Signals::install(cli.command.on_signal());
    let signals = signals.unwrap_or_else(|error| exit::fault(error));
    logging::init(cli.global);
    for note in line.notes {
        tracing::warn!("{note}");
    }
    dflash_tensor::on_loading(loading::show);
    // a plan uses no GPU and may fake one
    if !matches!(cli.command, Command::Plan(_)) {
        open_cuda();
    }
    let outcome = places.explain(commands::run(cli.command, &signals), commands::about);
    exit::finish(&outcome, &signals)
}

/// Opens the CUDA half of libtorch if there is a driver; without one the attempt would cost a
/// second. A failure is reported to whoever requests a device.
fn open_cuda() {
    if libtorch::has_driver() {
        dflash_torch_sys::load_cuda();
    }
}
