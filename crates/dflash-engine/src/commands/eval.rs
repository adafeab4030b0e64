//! `dflash eval`: settings to one library call.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use dflash_decode::evaluate;
use dflash_hub::{Hub, Part};
use dflash_settings::EvalSettings;

use super::draft;

/// Runs the command.
pub(crate) fn run(settings: &EvalSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let target_dir = Hub::from_env().model(&settings.target, Part::Target, stop)?;
    let draft_dir = draft::find(&settings.draft, stop)?;
    let report = evaluate(settings, (&target_dir, &draft_dir), stop)?;
    write!(std::io::stdout(), "{report}").context("cannot write to standard output")?;
    Ok(report.check()?)
}
