//! Settings of the rows that a step trains on.

use dflash_settings_derive::Classed;
use serde::{Deserialize, Serialize};

use crate::check::{Invalid, MOST_STEPS, MOST_TOKENS, within};

/// Epochs in the DFlash paper's recipe.
const DEFAULT_EPOCHS: u64 = 6;

/// Default tokens per row: the longest document that `dflash prepare` keeps by default, so that
/// none is cut again.
const DEFAULT_ROW: usize = 8192;

/// Default anchors per row. Activations grow with them: a rank training for Qwen3-8B at 8,192
/// tokens needs 57 GB with 3,072 anchors and 28 GB with 512 (docs/plan.md), which leaves room on a
/// 40 GB GPU.
const DEFAULT_ANCHORS: usize = 512;

/// Maximum epochs: each is planned before the first step, which takes time and memory.
const MOST_EPOCHS: u64 = 100_000;
/// Maximum number of rows per rank and step.
const MOST_MICRO_BATCHES: u64 = 100_000;

/// Packed rows and their anchors.
#[derive(Debug, Clone, Serialize, Deserialize, Classed)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct RowSettings {
    /// Tokens of a packed row. Longer documents are cut. Default: 8192.
    #[cfg_attr(feature = "clap", arg(long, value_name = "T"))]
    #[setting(lasting, recipe)]
    pub total_seq_len: Option<usize>,
    /// Maximum number of anchors per document.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 512))]
    #[setting(compared, recipe)]
    pub anchors_per_sequence: usize,
    /// Maximum number of anchors per packed row: memory and time of a step grow with them. Default: 512.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    #[setting(compared, recipe)]
    pub max_anchors: Option<usize>,
    /// Packed rows per rank and optimizer step.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 1))]
    // Counted in the recorded rows_per_step.
    #[setting(free, recipe)]
    pub gradient_accumulation_steps: usize,
    /// Passes over the data. Default: 6, or what --max-steps needs.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    #[setting(compared, recipe)]
    pub epochs: Option<u64>,
    /// Stop after N optimizer steps, where the schedule ends.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    #[setting(compared, recipe)]
    pub max_steps: Option<u64>,
    /// Seed of initial weights, order and anchors.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 0))]
    #[setting(lasting, recipe)]
    pub seed: u64,
}

impl RowSettings {
    /// Tokens of a packed row.
    pub fn total_seq_len(&self) -> usize {
        self.total_seq_len.unwrap_or(DEFAULT_ROW)
    }

    /// Maximum number of anchors per packed row.
    pub fn max_anchors(&self) -> usize {
        self.max_anchors.unwrap_or(DEFAULT_ANCHORS)
    }

    /// Passes over the data; `None` for as many as --max-steps needs.
    pub fn whole_epochs(&self) -> Option<u64> {
        self.epochs.or(if self.max_steps.is_some() { None } else { Some(DEFAULT_EPOCHS) })
    }

    /// Replaces unset settings by their defaults.
    pub(crate) fn settle(&mut self) {
        self.total_seq_len = Some(self.total_seq_len());
        self.max_anchors = Some(self.max_anchors());
    }

    /// # Errors
    /// A number out of its range.
    pub fn check(&self) -> Result<(), Invalid> {
        let micro_batches = self.gradient_accumulation_steps as u64;
        within([
            // a row needs room for an anchor and a token to predict
            ("total_seq_len", self.total_seq_len() as u64, 2..=MOST_TOKENS),
            ("anchors_per_sequence", self.anchors_per_sequence as u64, 1..=MOST_TOKENS),
            ("max_anchors", self.max_anchors() as u64, 1..=MOST_TOKENS),
            ("gradient_accumulation_steps", micro_batches, 1..=MOST_MICRO_BATCHES),
            ("epochs", self.epochs.unwrap_or(1), 1..=MOST_EPOCHS),
            ("max_steps", self.max_steps.unwrap_or(1), 1..=MOST_STEPS),
        ])
    }
}
