//! `dflash prepare`: settings to one library call.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_prepare::prepare;
use dflash_settings::PrepareSettings;

/// Runs the command: progress to stderr, the summary to stdout.
pub(crate) fn run(settings: &PrepareSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    if settings.target.is_none() {
        eprintln!("no --target given: preparing for {}", settings.target());
    }
    println!("{}", prepare(settings, stop)?);
    Ok(())
}
