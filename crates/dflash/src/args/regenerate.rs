//! The flags of `dflash regenerate`.

use std::path::PathBuf;

use clap::Args;

use super::eval::at_least_one;

/// Replace the answers of a data set by the target's own.
///
/// Writes one row per question, in order: question, answer, input_ids, loss_mask, finished. A
/// stopped run leaves FILE.partial; the same command continues it.
#[derive(Debug, Clone, Args)]
pub struct RegenerateArgs {
    /// Directory of the target model.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Conversations or questions, JSON or JSONL.
    #[arg(long, value_name = "FILE")]
    pub data: PathBuf,
    /// JSONL file to write.
    #[arg(long, value_name = "FILE")]
    pub output: PathBuf,
    /// Tokens of an answer at most.
    #[arg(long, value_name = "N", default_value_t = 220, value_parser = at_least_one)]
    pub max_new_tokens: usize,
    /// Use the first N rows of the data only.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub limit: Option<usize>,
    /// Sequences decoded together.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = at_least_one)]
    pub batch: usize,
}
