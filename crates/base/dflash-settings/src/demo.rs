//! The settings of `dflash demo`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::check::Invalid;
use crate::processor::ProcessorSettings;

/// Run the whole pipeline on a synthetic corpus: target, answers, dataset, drafter, results.
///
/// Needs no model, no data and no network. Every finished stage is kept in the directory, so an
/// interrupted demo continues where it stopped. The table of `dflash eval`, the drafter's path and
/// the time go to standard output.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct DemoSettings {
    /// Directory for everything that the demo makes.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR", default_value = "demo-run"))]
    pub dir: PathBuf,
    /// Start over: remove what an earlier demo left in the directory.
    #[cfg_attr(feature = "clap", arg(long))]
    pub fresh: bool,
    /// Take fewer steps of everything: the target answers in words, but its drafter is far from the whole
    /// demo's.
    #[cfg_attr(feature = "clap", arg(long))]
    pub quick: bool,
    /// The CPU instruction level.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten))]
    pub processor: ProcessorSettings,
}

impl DemoSettings {
    /// # Errors
    /// A level that this machine's processor does not support.
    pub fn check(&self) -> Result<(), Invalid> {
        self.processor.check()
    }
}
