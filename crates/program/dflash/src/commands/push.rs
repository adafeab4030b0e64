//! `dflash push`: settings to one library call.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use dflash_hub::Hub;
use dflash_push::push;
use dflash_settings::PushSettings;

/// Runs the command; what would go, or the pages of what went, to stdout.
pub(crate) fn run(settings: &PushSettings, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let outcome = push(settings, &Hub::from_env(), stop)?;
    write!(std::io::stdout(), "{outcome}").context("cannot write to standard output")
}
