//! The shape of the draft.

use serde::{Deserialize, Serialize};

use crate::check::{Invalid, at_least_one};

/// Default captured layers of a draft: the paper's.
pub const DEFAULT_CAPTURES: usize = 5;
/// Default layers of a draft: the paper's.
pub const DEFAULT_LAYERS: usize = 5;
/// Default slots of a block: the paper's.
pub const DEFAULT_BLOCK_SIZE: usize = 16;

/// Far beyond what any draft guesses right; each anchor costs memory in proportion.
const MAX_BLOCK_SIZE: usize = 1024;

/// Shape of the draft; the rest is copied from the target.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct DraftSettings {
    /// Start from the weights of this draft: a checkpoint directory written by dflash,
    /// z-lab or speculators, a run's directory (its best checkpoint, or the newest where nothing was
    /// validated), RUN_DIR/latest or RUN_DIR/best, or its name OWNER/NAME on the Hub. The flags below
    /// default to its values.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR|REPO"))]
    pub from_pretrained: Option<String>,
    /// Layers of the draft. Default: 5.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub num_layers: Option<usize>,
    /// Slots of a block: the anchor and the tokens predicted at once. Default: 16.
    #[cfg_attr(feature = "clap", arg(long, value_name = "B"))]
    pub block_size: Option<usize>,
    /// Captured layers: 0 = embedding output, k = after k layers. Default: five spread evenly.
    #[cfg_attr(feature = "clap", arg(long, value_name = "ID", action = clap::ArgAction::Set, num_args = 1.., value_delimiter = ','))]
    pub target_layer_ids: Option<Vec<u32>>,
    /// Token of the slots to be predicted. Default: the tokenizer's mask token, else the first
    /// embedding row that the tokenizer does not use.
    #[cfg_attr(feature = "clap", arg(long, value_name = "ID"))]
    pub mask_token_id: Option<i64>,
    /// Sliding-window attention over the last N tokens in every layer (causal within the block, as
    /// it is served).
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub sliding_window: Option<usize>,
    /// Predict only the N tokens that are most often supervised in the data.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub draft_vocab_size: Option<usize>,
}

impl DraftSettings {
    /// # Errors
    /// A number out of its range.
    pub fn check(&self) -> Result<(), Invalid> {
        at_least_one([
            ("num_layers", self.num_layers.unwrap_or(1) as u64),
            ("sliding_window", self.sliding_window.unwrap_or(1) as u64),
            ("draft_vocab_size", self.draft_vocab_size.unwrap_or(1) as u64),
        ])?;
        match self.block_size {
            Some(slots @ (0 | 1)) => {
                let expected = "a block holds the anchor and at least one token to predict";
                Err(Invalid::new("block_size", slots, expected))
            }
            Some(slots) if slots > MAX_BLOCK_SIZE => {
                let expected = format!("blocks have at most {MAX_BLOCK_SIZE} slots");
                Err(Invalid::new("block_size", slots, expected))
            }
            _ => Ok(()),
        }
    }
}
