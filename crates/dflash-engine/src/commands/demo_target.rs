//! `dflash demo-target`: arguments to settings to one library call.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash::args::DemoTargetArgs;

/// Runs the command.
pub(crate) fn run(args: DemoTargetArgs, _stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    anyhow::bail!("{} is not served yet", args.output.display())
}
