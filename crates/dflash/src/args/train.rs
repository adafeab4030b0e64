//! The flags of `dflash train`.

use std::path::PathBuf;

use clap::Args;

/// Train a drafter against a running hidden-state server.
#[derive(Debug, Clone, Args)]
pub struct TrainArgs {
    /// Directory of the target model.
    #[arg(long, value_name = "DIR")]
    pub verifier_name_or_path: PathBuf,
}
