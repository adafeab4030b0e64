//! `dflash regenerate`: passes the settings to the library.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_decode::{RegenerateData, regenerate};
use dflash_eval::sets::SetRow;
use dflash_hub::{Hub, ModelPart};
use dflash_io::say;
use dflash_prepare::{Input, InputRow};
use dflash_settings::RegenerateSettings;

use super::draft;

pub(crate) fn run(settings: &RegenerateSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let target_dir = Hub::from_env().model(&settings.target, ModelPart::Target, stop)?;
    let draft = draft::optional(settings.draft.as_deref(), stop)?;
    let data = data(settings, stop)?;
    let summary = regenerate(settings, &target_dir, draft, data, stop)?;
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
    if summary.cut > 0 {
        say(format!(
            "{} of {} answers were cut at --max-new-tokens {}; their rows have finished = false",
            summary.cut, summary.answers, settings.max_new_tokens
        ));
    }
    if !summary.unread_columns.is_empty() {
        say(format!("unread columns: {}", summary.unread_columns.listed("row")));
    }
    Ok(())
}

/// The rows, found and read as `dflash prepare` does.
fn data(settings: &RegenerateSettings, stop: &AtomicBool) -> anyhow::Result<RegenerateData> {
    let input = Input::open(&settings.data, stop)?;
    let rows = input.rows(settings.limit);
    let rows = rows.map(|row| row.map(|InputRow { path, line, row }| SetRow { path, line, row }));
    let rows = rows.collect::<Result<_, _>>()?;
    Ok(RegenerateData { files: input.files.clone(), rows })
}
