//! `dflash regenerate`: arguments to settings to one library call.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash::args::RegenerateArgs;
use dflash_decode::{RegenerateConfig, regenerate};
use dflash_model::target::TargetOptions;

/// Runs the command.
pub(crate) fn run(args: RegenerateArgs, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let RegenerateArgs { model, data, output, max_new_tokens, limit, batch } = args;
    let options = TargetOptions::default();
    let shown = output.display().to_string();
    let config = RegenerateConfig { model, data, output, max_new_tokens, limit, batch, options };
    let summary = regenerate(&config, stop)?;
    eprintln!(
        "{shown}: {} rows ({} from an earlier run), {} skipped as too long, {} tokens in {:.1} s",
        summary.rows, summary.resumed, summary.skipped, summary.tokens, summary.seconds
    );
    Ok(())
}
