//! The flags of `dflash prepare`.

use std::path::PathBuf;

use clap::Args;

/// Turn conversations into a tokenized, masked dataset.
#[derive(Debug, Clone, Args)]
pub struct PrepareArgs {
    /// Directory of the target model: its tokenizer and chat template are used.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// A JSON or JSON Lines file, or the name of a preset.
    #[arg(long, value_name = "FILE|PRESET", required = true)]
    pub data: Vec<String>,
    /// Directory of the new dataset.
    #[arg(long, value_name = "DIR")]
    pub output: PathBuf,
    /// Longest conversation in tokens; longer ones are cut.
    #[arg(long, value_name = "TOKENS", default_value_t = 8192)]
    pub seq_length: usize,
}
