//! `dflash hidden-server`: arguments to settings to one library call.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash::args::HiddenServerArgs;

/// Runs the command.
pub(crate) fn run(args: HiddenServerArgs, _stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    anyhow::bail!("{} is not served yet", args.model.display())
}
