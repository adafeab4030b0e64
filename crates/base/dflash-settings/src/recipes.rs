//! The settings of `dflash recipes`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Write the recipes, and a small sample of conversations, into a directory.
///
/// The program carries them, so that the commands of the documentation work without the source tree:
/// `recipes/*.toml` are complete run files, `recipes/run.sh` runs one, and `data/sharegpt_sample.json` has
/// two dozen conversations. Files that exist are left as they are. The paths go to standard output.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct RecipesSettings {
    /// Directory in which `recipes/` and `data/` are made.
    #[cfg_attr(feature = "clap", arg(value_name = "DIR", default_value = "."))]
    pub dir: PathBuf,
}
