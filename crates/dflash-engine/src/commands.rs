//! From a parsed command to the library that does the work.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash::Command;

mod bench;
mod demo_target;
mod eval;
mod hidden_server;
mod launch;
mod plan;
mod regenerate;
mod train;

/// Runs `command` until it is done or `stop` is set.
///
/// # Errors
/// What the command's library reports.
pub(crate) fn run(command: Command, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    match command {
        Command::HiddenServer(args) => hidden_server::run(args, stop),
        Command::Train(args) => train::run(*args, stop),
        Command::Plan(args) => plan::run(*args, stop),
        Command::Eval(args) => eval::run(args, stop),
        Command::Regenerate(args) => regenerate::run(args, stop),
        Command::Bench(args) => bench::run(args),
        Command::DemoTarget(args) => demo_target::run(args, stop),
        Command::Prepare(_) | Command::Report(_) => {
            anyhow::bail!("start `dflash`; its engine does not run this command")
        }
    }
}
