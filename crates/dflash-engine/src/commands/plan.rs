//! `dflash plan`: settings to one library call, and its table.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_hub::{Hub, Part};
use dflash_settings::PlanSettings;
use dflash_train::plan;

use super::draft::Draft;

/// Runs the command; the plan goes to stdout.
pub(crate) fn run(settings: &PlanSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let target_dir = Hub::from_env().model(&settings.target, Part::Config, stop)?;
    let draft = Draft::locate(&settings.draft, stop)?;
    let plan = plan::plan(settings, &target_dir, &draft.shape(&settings.draft, &target_dir)?)?;
    if settings.json {
        println!("{}", serde_json::to_string_pretty(&plan)?);
    } else {
        print!("{plan}");
    }
    Ok(())
}
