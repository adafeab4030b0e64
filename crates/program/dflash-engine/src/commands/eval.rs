//! `dflash eval`: passes the settings to the library.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use dflash_decode::evaluate;
use dflash_hub::{Hub, ModelPart};
use dflash_settings::EvalSettings;

use super::draft;

pub(crate) fn run(settings: &EvalSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let target = settings.target.as_deref().context("eval without --endpoint has a --target")?;
    let target_dir = Hub::from_env().model(target, ModelPart::Target, stop)?;
    let sources = settings.draft.iter().map(|name| draft::source(name, stop));
    let sources = sources.collect::<anyhow::Result<Vec<_>>>()?;
    let report = evaluate(settings, &target_dir, &sources, stop)?;
    write!(std::io::stdout(), "{report}").context("cannot write to standard output")?;
    Ok(report.check()?)
}
