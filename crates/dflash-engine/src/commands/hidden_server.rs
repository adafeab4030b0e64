//! `dflash hidden-server`: settings to one library call.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_console::say;
use dflash_hidden_server::{Loader, Ready, TargetFeaturizer, serve};
use dflash_hub::{Hub, Part};
use dflash_settings::HiddenServerSettings;

/// Runs the command.
pub(crate) fn run(settings: &HiddenServerSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let dir = Hub::from_env().model(&settings.target, Part::Target, stop)?;
    tracing::info!("loading {}", dir.display());
    let own = settings.clone();
    let load: Loader = Box::new(move || Ok(Box::new(TargetFeaturizer::load(&dir, &own)?)));
    // Not a log line: it must be visible at any log level.
    serve(settings, load, stop, |ready: &Ready| say(format!("dflash hidden-server {ready}")))?;
    Ok(())
}
