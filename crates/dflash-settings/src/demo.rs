//! The settings of `dflash demo`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::check::Invalid;
use crate::processor::ProcessorSettings;

/// Run the whole line on a made-up corpus: target, answers, dataset, drafter, figures.
///
/// Needs no model, no data and no network. Every finished stage is kept in the directory, so an
/// interrupted demo goes on where it stopped. The table of `dflash eval`, the drafter's path and the
/// time go to standard output.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct DemoSettings {
    /// Directory of everything that the demo makes.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR", default_value = "demo-run"))]
    pub dir: PathBuf,
    /// Start over: remove what an earlier demo left in the directory.
    #[cfg_attr(feature = "clap", arg(long))]
    pub fresh: bool,
    /// Take a few steps of everything: shows that all parts work, not what a drafter is worth.
    #[cfg_attr(feature = "clap", arg(long))]
    pub quick: bool,
    /// The processor's instructions.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten))]
    pub processor: ProcessorSettings,
}

impl DemoSettings {
    /// # Errors
    /// A level of instructions that this machine's processor lacks.
    pub fn check(&self) -> Result<(), Invalid> {
        self.processor.check()
    }
}
