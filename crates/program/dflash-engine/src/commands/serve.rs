//! `dflash serve`: passes the settings to the library.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_decode::{Models, ModelsConfig};
use dflash_hub::{Hub, ModelPart};
use dflash_io::say;
use dflash_serve::{Loader, Ready, serve};
use dflash_settings::ServeSettings;

use super::draft;

pub(crate) fn run(settings: &ServeSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let target_dir = Hub::from_env().model(&settings.target, ModelPart::Target, stop)?;
    let draft = draft::optional(settings.draft.as_deref(), stop)?;
    tracing::info!("loading {}", target_dir.display());
    let config = ModelsConfig {
        target_dir: target_dir.clone(),
        target_name: settings.target.clone(),
        draft,
        allow_other_target: settings.allow_other_target,
        device: settings.device,
        dtype: settings.dtype,
        threads: settings.threads,
        template_variables: settings.chat_template_kwargs.clone(),
    };
    let load: Loader = Box::new(move || Ok((Models::load(config)?, target_dir)));
    // Not a log line: it must be visible at any log level.
    serve(settings, load, stop, |ready: &Ready| say(format!("dflash serve {ready}")))?;
    Ok(())
}
