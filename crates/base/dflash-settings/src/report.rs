//! The settings of `dflash report`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Show a training run as one page: curves, settings, checkpoints.
///
/// Writes one HTML file that needs no other file and no network. The run may still be in progress.
/// The page's path goes to standard output.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct ReportSettings {
    /// Directory of the run: the --save-path of `dflash train`.
    #[cfg_attr(feature = "clap", arg(value_name = "RUN_DIR"))]
    pub run_dir: PathBuf,
    /// The page to write [default: RUN_DIR/report.html].
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE"))]
    pub output: Option<PathBuf>,
}
