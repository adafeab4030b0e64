//! `dflash eval --endpoint`: passes the settings to the library.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use dflash_settings::EvalSettings;

/// Runs the command and prints the report.
pub(crate) fn run(settings: &EvalSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let report = dflash_eval::endpoint::evaluate(settings, stop)?;
    write!(std::io::stdout(), "{report}").context("cannot write to standard output")
}
