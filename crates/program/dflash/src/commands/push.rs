//! `dflash push`: passes the settings to the library.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use dflash_hub::Hub;
use dflash_push::push;
use dflash_settings::PushSettings;

/// Runs the command; prints what would be uploaded, or the pages of what was.
pub(crate) fn run(settings: &PushSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let outcome = push(settings, &Hub::from_env(), stop)?;
    write!(std::io::stdout(), "{outcome}").context("cannot write to standard output")
}
