//! `dflash plan`: passes the settings to the library and prints its table.

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_hub::{Hub, ModelPart};
use dflash_settings::{DraftSettings, PlanSettings};
use dflash_target::TargetFacts;
use dflash_train::plan::{self, Typed};

use super::described;
use super::draft::Draft;

/// Runs the command and prints the plan.
pub(crate) fn run(settings: &PlanSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let target_dir = Hub::from_env().model(&settings.target, ModelPart::Config, stop)?;
    let described = described::described(settings.target_spec.as_deref(), None)?;
    let target = TargetFacts::load(&target_dir, described.as_ref())?;
    let draft = Draft::locate(&settings.draft, stop)?;
    if settings.suggest {
        let shape = |of: &DraftSettings| draft.shape(of, &target);
        let typed = typed(settings);
        let suggestion = plan::suggest(settings, (&target_dir, &target), &shape, &typed)?;
        let json = settings.json.then(|| serde_json::to_string_pretty(&suggestion)).transpose()?;
        print(&suggestion, json);
        return Ok(());
    }
    let shape = draft.shape(&settings.draft, &target);
    let plan = plan::plan(settings, &target_dir, &target, &shape)?;
    print(&plan, settings.json.then(|| serde_json::to_string_pretty(&plan)).transpose()?);
    Ok(())
}

/// Prints the table, or with --json the same as JSON.
fn print(table: &dyn Display, json: Option<String>) {
    match json {
        Some(json) => println!("{json}"),
        None => print!("{table}"),
    }
}

/// What the user typed after the command's name.
fn typed(settings: &PlanSettings) -> Typed {
    let arguments = std::env::args().skip_while(|word| word != "plan").skip(1);
    let arguments: Vec<String> = arguments.collect();
    let is_run_file = |word: &String| Path::new(word).extension().is_some_and(|it| it == "toml");
    let has_run_file = [arguments.first(), arguments.last()].into_iter().flatten().any(is_run_file);
    Typed {
        has_run_file,
        colocates_in_file: has_run_file && settings.hidden_states.colocate,
        arguments,
        target: settings.target.clone(),
        // Described documents go before a dataset.
        has_data: settings.data_path.is_some(),
    }
}
