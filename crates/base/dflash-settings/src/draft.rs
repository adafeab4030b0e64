//! The shape of the draft.

use dflash_settings_derive::Classed;
use serde::{Deserialize, Serialize};

use crate::check::{Invalid, MOST_TOKENS, MOST_VOCABULARY, block_size, layer_ids, within};
use crate::choices::SpeculatorType;
use crate::markov::MarkovSettings;

/// Default number of auxiliary layers of a draft: the paper's.
pub const DEFAULT_AUX_LAYERS: usize = 5;
/// Default layers of a draft: the paper's.
pub const DEFAULT_LAYERS: usize = 5;
/// Default slots of a block: the paper's.
pub const DEFAULT_BLOCK_SIZE: usize = 16;

/// More layers than targets have.
pub(crate) const MOST_DRAFT_LAYERS: u64 = 128;

/// Shape of the draft; the rest is copied from the target.
#[derive(Debug, Clone, Serialize, Deserialize, Classed)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct DraftSettings {
    /// Start from the weights of this draft, a directory or OWNER/NAME on the Hub. The flags below default
    /// to its values.
    ///
    /// The directory is a checkpoint written by dflash, z-lab or speculators, a run's (its best
    /// checkpoint, or the newest if nothing was validated), or RUN_DIR/latest or RUN_DIR/best.
    #[cfg_attr(feature = "clap", arg(long, value_name = "DIR|REPO"))]
    // The initial draft is compared by its content.
    #[setting(free, may_differ)]
    pub from_pretrained: Option<String>,
    /// Kind of drafter. Default: that of the draft or the run to start from, else dflash.
    #[cfg_attr(feature = "clap", arg(long, value_enum))]
    #[setting(lasting, recipe)]
    pub speculator_type: Option<SpeculatorType>,
    /// Layers of the draft. Default: 5.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    #[setting(lasting, recipe)]
    pub num_layers: Option<usize>,
    /// Slots of a block: the anchor and the tokens predicted at once. Default: 16.
    #[cfg_attr(feature = "clap", arg(long, value_name = "B"))]
    #[setting(lasting, recipe)]
    pub block_size: Option<usize>,
    /// Target layers whose hidden states the draft takes as context: 0 = embedding output, k =
    /// after k layers. Default: five spread evenly.
    #[cfg_attr(feature = "clap", arg(long, value_name = "ID", action = clap::ArgAction::Set, num_args = 1.., value_delimiter = ','))]
    #[setting(lasting)]
    pub target_layer_ids: Option<Vec<u32>>,
    /// Mask token, which fills the slots to be predicted. Default: the tokenizer's mask token, else
    /// the first embedding row that the tokenizer does not use.
    #[cfg_attr(feature = "clap", arg(long, value_name = "ID"))]
    #[setting(lasting)]
    pub mask_token_id: Option<i64>,
    /// Sliding-window attention over the last N tokens in every layer (causal within the block, as
    /// it is served).
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    #[setting(lasting)]
    pub sliding_window: Option<usize>,
    /// Predict only the N tokens that are most often supervised in the data.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    #[setting(lasting, recipe)]
    pub draft_vocab_size: Option<usize>,
    /// The Markov head.
    #[serde(flatten)]
    #[cfg_attr(feature = "clap", command(flatten))]
    #[setting(flatten)]
    pub markov: MarkovSettings,
}

impl DraftSettings {
    /// # Errors
    /// A number out of its range.
    pub fn check(&self) -> Result<(), Invalid> {
        let mask = self.mask_token_id.unwrap_or_default();
        if !(0..MOST_VOCABULARY as i64).contains(&mask) {
            let expected = format!("token ids are from 0 to {}", MOST_VOCABULARY - 1);
            return Err(Invalid::new("mask_token_id", mask, expected));
        }
        layer_ids(self.target_layer_ids.as_deref())?;
        block_size("block_size", self.block_size.unwrap_or(DEFAULT_BLOCK_SIZE))?;
        self.markov.check()?;
        let vocabulary = self.draft_vocab_size.unwrap_or(1) as u64;
        within([
            ("num_layers", self.num_layers.unwrap_or(1) as u64, 1..=MOST_DRAFT_LAYERS),
            ("sliding_window", self.sliding_window.unwrap_or(1) as u64, 1..=MOST_TOKENS),
            ("draft_vocab_size", vocabulary, 1..=MOST_VOCABULARY),
        ])
    }
}
