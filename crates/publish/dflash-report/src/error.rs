//! Errors of a report.

use std::path::PathBuf;

use dflash_run::{Line, MetricLine, RunDir};

/// An error names the path and the remedy.
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "{path} is not the directory of a run: it has neither {} nor {}; pass the --save-path of a training run",
        MetricLine::FILE,
        RunDir::PROVENANCE
    )]
    NoRun { path: PathBuf },
    #[error(transparent)]
    Run(#[from] dflash_run::Error),
    #[error(transparent)]
    Files(#[from] dflash_io::Error),
    #[error(transparent)]
    Server(#[from] dflash_http::Error),
}
