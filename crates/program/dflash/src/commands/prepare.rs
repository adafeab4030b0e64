//! `dflash prepare`: settings to one library call.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_io::say;
use dflash_prepare::{Error, prepare};
use dflash_settings::PrepareSettings;

/// Runs the command: progress to stderr, the summary to stdout.
pub(crate) fn run(settings: &PrepareSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    if settings.target.is_none() {
        say(format!("no --target given: preparing for {}", settings.target()));
    }
    println!("{}", prepare(settings, stop)?);
    Ok(())
}

/// The key of the setting that an error is about, if it is about one.
pub(crate) fn about(error: &anyhow::Error) -> Option<String> {
    let key = match error.downcast_ref()? {
        Error::Setting(invalid) => invalid.key,
        Error::Occupied { .. } => "output",
        Error::UnknownData { .. } | Error::UnknownFile { .. } | Error::NoFiles { .. } => "data",
        _ => return None,
    };
    Some(key.to_owned())
}
