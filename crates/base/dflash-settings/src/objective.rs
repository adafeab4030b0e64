//! Settings of the training objective.

use dflash_settings_derive::Classed;
use serde::{Deserialize, Serialize};

use crate::check::{Invalid, MOST_MIB, positive, shares, within};
use crate::loss::LossTerm;

/// Default size of a chunk of logits on a CPU, in MiB: it fits the caches.
const CPU_LOSS_CHUNK_MIB: usize = 8;

/// Maximum on a GPU: 3,500 slots of 152k tokens, enough for full matmul throughput.
const GPU_LOSS_CHUNK_MIB: usize = 2048;

/// Minimum on a GPU: below this, launch overhead outweighs the memory saved.
const LEAST_GPU_LOSS_CHUNK_MIB: usize = 64;

/// Divisor of a GPU's free memory that gives the default chunk: activations need most of it.
const LOSS_CHUNK_SHARE: u64 = 16;

/// With this gamma the last slot of the longest block has about the weight of the first.
const MOST_GAMMA: f64 = 1e6;

/// The loss and the weights of slots.
#[derive(Debug, Clone, Serialize, Deserialize, Classed)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct ObjectiveSettings {
    /// Loss terms `name` or `name=coefficient`, comma separated: ce, kl, rkl, jsd, tv, nla, lk.
    #[cfg_attr(feature = "clap", arg(long, value_name = "TERMS", action = clap::ArgAction::Set, value_delimiter = ',', default_value = "ce"))]
    #[setting(compared, recipe)]
    pub loss: Vec<LossTerm>,
    /// Use the target's argmax as the label instead of the data's token.
    #[cfg_attr(feature = "clap", arg(long))]
    #[setting(compared, recipe)]
    pub teacher_labels: bool,
    /// Slots after which a slot's weight has decayed to 1/e. Default: 7, 5, 4 for blocks of 16, 10,
    /// 8.
    #[cfg_attr(feature = "clap", arg(long, value_name = "G"))]
    #[setting(compared, recipe)]
    pub gamma: Option<f64>,
    /// Weight slots by D-PACE with this smoothing instead of by distance.
    #[cfg_attr(feature = "clap", arg(long, value_name = "ALPHA", conflicts_with = "gamma"))]
    #[setting(compared, recipe)]
    pub dpace_alpha: Option<f64>,
    /// Memory of one chunk of logits, MiB. Default: 8 on a CPU; on a GPU a sixteenth of its free memory,
    /// at most 2048.
    #[cfg_attr(feature = "clap", arg(long, hide = true, value_name = "MIB"))]
    #[setting(told)]
    pub loss_chunk_mib: Option<usize>,
}

impl ObjectiveSettings {
    /// Whether the target distribution is needed.
    pub fn needs_target_distribution(&self) -> bool {
        self.teacher_labels || self.loss.iter().any(|term| term.loss.needs_target_distribution())
    }

    /// Loss in nats of a draft that gives each of `tokens` tokens the same probability, or an upper
    /// bound where a term depends on the target.
    pub fn loss_of_guesses(&self, tokens: usize) -> f64 {
        self.loss.iter().map(|term| term.coefficient * term.loss.of_guesses(tokens)).sum()
    }

    /// [`Self::gamma`], by default the paper's values for blocks of 16, 10 and 8; for other sizes
    /// that of the nearest.
    pub fn gamma(&self, block_size: usize) -> f64 {
        self.gamma.unwrap_or(match block_size {
            0..=8 => 4.0,
            9..=12 => 5.0,
            _ => 7.0,
        })
    }

    /// Bytes of one chunk of logits on a CPU, or on a GPU with this much free memory.
    pub fn chunk_bytes(&self, gpu_free_bytes: Option<u64>) -> usize {
        loss_chunk_bytes(self.loss_chunk_mib, gpu_free_bytes)
    }

    /// # Errors
    /// A number out of its range.
    pub fn check(&self) -> Result<(), Invalid> {
        positive([("gamma", self.gamma.unwrap_or(1.0), MOST_GAMMA)])?;
        check_loss_chunk(self.loss_chunk_mib)?;
        shares([("dpace_alpha", self.dpace_alpha.unwrap_or(1.0))])
    }
}

/// Bytes of one chunk of logits: `mib` if given, otherwise a default for the CPU or for a GPU with
/// this much free memory.
pub fn loss_chunk_bytes(mib: Option<usize>, gpu_free_bytes: Option<u64>) -> usize {
    match (mib, gpu_free_bytes) {
        (Some(mib), _) => mib << 20,
        (None, None) => CPU_LOSS_CHUNK_MIB << 20,
        (None, Some(free)) => usize::try_from(free / LOSS_CHUNK_SHARE)
            .unwrap_or(usize::MAX)
            .clamp(LEAST_GPU_LOSS_CHUNK_MIB << 20, GPU_LOSS_CHUNK_MIB << 20),
    }
}

/// # Errors
/// The chunk has size 0 or exceeds the memory of any machine.
pub(crate) fn check_loss_chunk(mib: Option<usize>) -> Result<(), Invalid> {
    within([("loss_chunk_mib", mib.unwrap_or(1) as u64, 1..=MOST_MIB)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chunk_follows_the_device_unless_it_is_asked_for() {
        let mib = |asked, free_gib: Option<u64>| {
            loss_chunk_bytes(asked, free_gib.map(|gib| gib << 30)) >> 20
        };
        assert_eq!(mib(None, None), 8);
        assert_eq!(
            [0, 8, 24, 70, 140].map(|gib| mib(None, Some(gib))),
            [64, 512, 1536, 2048, 2048]
        );
        assert_eq!((mib(Some(3), None), mib(Some(3), Some(70))), (3, 3));
        assert!(check_loss_chunk(Some(0)).is_err());
        assert!(check_loss_chunk(None).is_ok());
    }
}
