//! `dflash train`: arguments to settings to one library call.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash::args::TrainArgs;

/// Runs the command.
pub(crate) fn run(args: TrainArgs, _stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    anyhow::bail!("{} is not served yet", args.verifier_name_or_path.display())
}
