//! The flags of `dflash hidden-server`.

use std::path::PathBuf;

use clap::Args;

/// Run the target and serve hidden states of chosen layers.
#[derive(Debug, Clone, Args)]
pub struct HiddenServerArgs {
    /// Directory of the target model.
    #[arg(value_name = "DIR")]
    pub model: PathBuf,
    /// Layers to serve: 0 is the embedding output, k the residual stream after k layers.
    #[arg(long, value_name = "ID", num_args = 1..)]
    pub target_layer_ids: Vec<u32>,
    /// Port to listen on.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
}
