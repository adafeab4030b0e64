//! The Markov head, an example of a head other than DFlash's.

use dflash_settings_derive::Classed;
use serde::{Deserialize, Serialize};

use crate::check::{Invalid, within};

/// Default rank. Each token has this many numbers in the table, about a small head dimension.
pub const DEFAULT_MARKOV_RANK: usize = 64;

/// Maximum rank: above the hidden size of any target.
const MOST_RANK: u64 = 1 << 16;

/// Shape of the Markov head.
#[derive(Debug, Clone, Default, Serialize, Deserialize, Classed)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct MarkovSettings {
    /// With --speculator-type markov: numbers through which a token changes the logits of the next.
    /// Default: 64.
    // Hidden in the help: an example that no engine serves.
    #[cfg_attr(feature = "clap", arg(long, hide = true, value_name = "R"))]
    #[setting(lasting, recipe)]
    pub markov_rank: Option<usize>,
}

impl MarkovSettings {
    /// # Errors
    /// A number out of its range.
    pub fn check(&self) -> Result<(), Invalid> {
        within([("markov_rank", self.markov_rank.unwrap_or(1) as u64, 1..=MOST_RANK)])
    }
}
