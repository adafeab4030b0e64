//! `dflash export`: passes the settings to the library.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_draft::unservable;
use dflash_export::{Source, export};
use dflash_hub::{Hub, ModelPart};
use dflash_settings::{ExportFormat, ExportSettings};
use dflash_target::TargetFacts;

use super::{described, draft};

/// Runs the command and prints the export's path.
pub(crate) fn run(settings: &ExportSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let target_dir = Hub::from_env().model(&settings.target, ModelPart::Head, stop)?;
    let draft_path = draft_path(&settings.draft, stop)?;
    let described = described::described(settings.target_spec.as_deref(), Some(&draft_path))?;
    let target = TargetFacts::load(&target_dir, described.as_ref())?;
    let source = Source::open(&draft_path)?;
    let tokenizer = draft::tokenizer(&target_dir)?;
    // With another vocabulary the mask token's id means nothing; the export reports the mismatch.
    if source.config().vocab_size == target.vocab_size {
        let checked =
            draft::check_mask_token(tokenizer.as_ref(), &target_dir, &target, source.config());
        checked.map_err(|error| of_export(error, &settings.draft))?;
    }
    // The export reports a head that no engine serves; no flag of this command would help.
    let is_servable = unservable(source.config(), settings.format)?.is_none();
    if settings.format == ExportFormat::Zlab && !settings.without_sglang && is_servable {
        check_sglang(&source, &target)?;
    }
    let exported = export(source, settings, &target_dir, &target, tokenizer.as_ref(), stop)?;
    let near = exported.deviation;
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

/// SGLang reads this layout too, but SGLang 0.5.23 refuses layer id 0 at start-up and returns the
/// last layer's states only for gpt-oss.
fn check_sglang(source: &Source, target: &TargetFacts) -> anyhow::Result<()> {
    let last = target.num_hidden_layers as u32;
    let gives_last = target.architecture == "GptOssForCausalLM";
    let refused = |&&id: &&u32| id == 0 || (id == last && !gives_last);
    match source.config().target_layer_ids.iter().find(refused) {
        None => Ok(()),
        Some(id) => anyhow::bail!(
            "SGLang cannot serve this draft: it returns the states between layers, and the draft uses layer id {id} of 0 to {last}. vLLM and Transformers can: pass --without-sglang to export \
             it for them"
        ),
    }
}

/// Rewords the error: this command cannot choose the mask token, with which the draft was trained.
fn of_export(error: anyhow::Error, draft: &str) -> anyhow::Error {
    match error.downcast_ref() {
        Some(dflash_tensor::Error::MaskToken { id, reason, .. }) => anyhow::anyhow!(
            "{draft} does not fit the target: its mask token {id} {reason} there; name the target that it \
             was trained with"
        ),
        _ => error,
    }
}

/// A draft's directory or file.
fn draft_path(name: &str, stop: &Arc<AtomicBool>) -> anyhow::Result<PathBuf> {
    let path = Path::new(name);
    if path.is_file() { Ok(path.to_owned()) } else { draft::find(name, stop) }
}

fn share(share: f64) -> String {
    if share == 0.0 { "0".to_owned() } else { format!("{share:.2e}") }
}
