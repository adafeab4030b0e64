//! `dflash export`: settings to one library call.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_export::{Source, export};
use dflash_hub::{Hub, Part};
use dflash_settings::ExportSettings;
use dflash_text::ChatTokenizer;

use super::draft;

/// Runs the command; the export's path goes to stdout.
pub(crate) fn run(settings: &ExportSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let target_dir = Hub::from_env().model(&settings.target, Part::Target, stop)?;
    let source = Source::open(&draft_path(&settings.draft, stop)?)?;
    let tokenizer = ChatTokenizer::load(&target_dir)?;
    draft::check_mask_token(&tokenizer, &target_dir, source.config().mask_token_id)?;
    let exported = export(source, settings, (&target_dir, &tokenizer), stop)?;
    let near = exported.nearness;
    tracing::info!(
        "{} tensors of {} weights read back, {:.1} MiB: the largest difference is {} of its tensor's \
         largest weight, that of a forward pass {} (root mean square)",
        near.tensors,
        near.elements,
        exported.bytes as f64 / f64::from(1 << 20),
        share(near.largest),
        share(near.forward),
    );
    println!("{}", exported.path.display());
    Ok(())
}

/// A draft's directory, or its file.
fn draft_path(name: &str, stop: &Arc<AtomicBool>) -> anyhow::Result<PathBuf> {
    let path = Path::new(name);
    if path.is_file() { Ok(path.to_owned()) } else { draft::find(name, stop) }
}

fn share(share: f64) -> String {
    if share == 0.0 { "0".to_owned() } else { format!("{share:.2e}") }
}
