//! What can go wrong with a report.

use std::path::PathBuf;

use dflash_run::{Line, MetricLine, RunDir};

/// Errors name the path and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The directory is not a training run's.
    #[error(
        "{path} is not the directory of a run: it has neither {} nor {}; pass the --save-path of a training run",
        MetricLine::FILE,
        RunDir::PROVENANCE
    )]
    NoRun {
        /// The directory.
        path: PathBuf,
    },
    /// The run's files cannot be read.
    #[error(transparent)]
    Run(#[from] dflash_run::Error),
    /// The page cannot be written.
    #[error(transparent)]
    Files(#[from] dflash_files::Error),
}
