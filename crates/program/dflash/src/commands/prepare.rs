//! `dflash prepare`: passes the settings to the library.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dflash_io::say;
use dflash_prepare::{Error, prepare};
use dflash_settings::PrepareSettings;

/// Runs the command; shows progress on stderr and prints the summary.
pub(crate) fn run(settings: &PrepareSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    if settings.target.is_none() {
        say(format!("no --target given: preparing for {}", settings.target()));
    }
    println!("{}", prepare(settings, stop)?);
    Ok(())
}

/// The key of the setting that an error concerns, if any.
pub(crate) fn about(error: &anyhow::Error) -> Option<String> {
    let key = match error.downcast_ref()? {
        Error::Setting(invalid) => invalid.key,
        Error::Occupied { .. } => "output",
        Error::UnknownData { .. } | Error::UnknownFile { .. } | Error::NoFiles { .. } => "data",
        _ => return None,
    };
    Some(key.to_owned())
}
