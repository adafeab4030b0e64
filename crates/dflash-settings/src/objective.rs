//! What is minimised.

use serde::{Deserialize, Serialize};

use crate::check::{Invalid, MOST_MIB, positive, shares, within};
use crate::loss::LossTerm;

/// Default memory of one chunk of logits, MiB: what fits a CPU's caches.
pub const DEFAULT_LOSS_CHUNK_MIB: usize = 8;

/// The weight of the last slot of the longest block is then that of the first.
const MOST_GAMMA: f64 = 1e6;

/// The loss and the weights of slots.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct ObjectiveSettings {
    /// Loss terms `name` or `name=coefficient`, comma separated: ce, kl, rkl, jsd, tv, nla, lk.
    #[cfg_attr(feature = "clap", arg(long, value_name = "TERMS", action = clap::ArgAction::Set, value_delimiter = ',', default_value = "ce"))]
    pub loss: Vec<LossTerm>,
    /// Use the target's argmax as the label instead of the data's token.
    #[cfg_attr(feature = "clap", arg(long))]
    pub teacher_labels: bool,
    /// Slots after which a slot's weight has decayed to 1/e. Default: 7, 5, 4 for blocks of 16, 10,
    /// 8.
    #[cfg_attr(feature = "clap", arg(long, value_name = "G"))]
    pub gamma: Option<f64>,
    /// Weight slots by D-PACE with this smoothing instead of by distance.
    #[cfg_attr(feature = "clap", arg(long, value_name = "ALPHA", conflicts_with = "gamma"))]
    pub dpace_alpha: Option<f64>,
    /// Memory of one chunk of logits, MiB.
    #[cfg_attr(feature = "clap", arg(long, value_name = "MIB", default_value_t = DEFAULT_LOSS_CHUNK_MIB))]
    pub loss_chunk_mib: usize,
}

impl ObjectiveSettings {
    /// Whether the target's distribution is needed.
    pub fn needs_teacher(&self) -> bool {
        self.teacher_labels || self.loss.iter().any(|term| term.loss.needs_teacher())
    }

    /// [`Self::gamma`], by default the paper's values for blocks of 16, 10 and 8; between and
    /// beyond them the nearest.
    pub fn gamma(&self, block_size: usize) -> f64 {
        self.gamma.unwrap_or(match block_size {
            0..=8 => 4.0,
            9..=12 => 5.0,
            _ => 7.0,
        })
    }

    /// Bytes of one chunk of logits.
    pub fn chunk_bytes(&self) -> usize {
        self.loss_chunk_mib << 20
    }

    /// # Errors
    /// A number out of its range.
    pub fn check(&self) -> Result<(), Invalid> {
        positive([("gamma", self.gamma.unwrap_or(1.0), MOST_GAMMA)])?;
        within([("loss_chunk_mib", self.loss_chunk_mib as u64, 1..=MOST_MIB)])?;
        shares([("dpace_alpha", self.dpace_alpha.unwrap_or(1.0))])
    }
}
