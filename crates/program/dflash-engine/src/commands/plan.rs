//! `dflash plan`: passes the settings to the library and prints its table.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_hub::{Hub, ModelPart};
use dflash_settings::PlanSettings;
use dflash_target::TargetFacts;
use dflash_train::plan;

use super::described;
use super::draft::Draft;

/// Runs the command and prints the plan.
pub(crate) fn run(settings: &PlanSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let target_dir = Hub::from_env().model(&settings.target, ModelPart::Config, stop)?;
    let described = described::described(settings.target_spec.as_deref(), None)?;
    let target = TargetFacts::load(&target_dir, described.as_ref())?;
    let draft = Draft::locate(&settings.draft, stop)?;
    let shape = draft.shape(&settings.draft, &target);
    let plan = plan::plan(settings, &target_dir, &target, &shape)?;
    if settings.json {
        println!("{}", serde_json::to_string_pretty(&plan)?);
    } else {
        print!("{plan}");
    }
    Ok(())
}
