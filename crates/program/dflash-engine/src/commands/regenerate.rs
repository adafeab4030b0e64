//! `dflash regenerate`: settings to one library call.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_decode::regenerate;
use dflash_hub::{Hub, ModelPart};
use dflash_io::say;
use dflash_settings::RegenerateSettings;

use super::draft;

/// Runs the command.
pub(crate) fn run(settings: &RegenerateSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let target_dir = Hub::from_env().model(&settings.target, ModelPart::Target, stop)?;
    let draft = draft::optional(settings.draft.as_deref(), stop)?;
    let summary = regenerate(settings, &target_dir, draft, stop)?;
    say(format!(
        "{}: {} rows ({} from an earlier run), {} skipped as too long, {} ended early, \
         {} tokens in {:.1} s",
        settings.output.display(),
        summary.rows,
        summary.resumed,
        summary.skipped,
        summary.shortened,
        summary.tokens,
        summary.seconds
    ));
    if !summary.unread_columns.is_empty() {
        say(format!("unread columns: {}", summary.unread_columns.listed("row")));
    }
    Ok(())
}
