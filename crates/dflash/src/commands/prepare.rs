//! `dflash prepare`: arguments to settings to one library call.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash::args::PrepareArgs;

/// Runs the command.
pub(crate) fn run(args: PrepareArgs, _stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let PrepareArgs { model, data: _, output: _, seq_length: _ } = args;
    anyhow::bail!("cannot prepare for {} yet", model.display())
}
