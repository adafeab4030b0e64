//! How parameters move: AdamW for all of them, or Muon for the matrices and AdamW for the norms.
//!
//! Everything works on one rank's share of the flat parameter buffer (all of it, unless the state
//! is split over the ranks), in float32 and in place. [`Groups`] say which part of the share is
//! treated how.

mod adamw;
mod average;
mod groups;
mod muon;

use dflash_settings::{OptimizerKind, OptimizerSettings};
use dflash_torch_sys::kernels::Kernels;
use serde::Serialize;
use tch::{Kind, Tensor};

pub use adamw::{AdamW, AdamWConfig};
pub use average::Average;
pub use groups::{Groups, Piece, WeightDecay};
pub use muon::{Muon, MuonConfig, MuonScale};

/// Everything that decides how parameters move, besides the learning rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct OptimizerConfig {
    /// What moves the matrices.
    pub algorithm: Algorithm,
    /// AdamW's constants; with Muon they apply to the norms.
    pub adamw: AdamWConfig,
    /// By group.
    pub weight_decay: WeightDecay,
    /// Share of itself that the averaged copy of the weights keeps at a step; `None` for no copy.
    pub ema_decay: Option<f64>,
}

/// What moves the matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Algorithm {
    /// AdamW, as the norms.
    #[default]
    AdamW,
    /// Muon; the norms stay with AdamW.
    Muon(MuonConfig),
}

impl From<&OptimizerSettings> for OptimizerConfig {
    fn from(settings: &OptimizerSettings) -> Self {
        let (usual, adamw) = (MuonConfig::default(), AdamWConfig::default());
        let rate_ratio = settings.muon_lr.map_or(usual.rate_ratio, |rate| rate / settings.lr);
        let (matrices, norms) = (settings.weight_decay, settings.norm_weight_decay);
        Self {
            algorithm: match settings.optimizer {
                OptimizerKind::Adamw => Algorithm::AdamW,
                OptimizerKind::Muon => Algorithm::Muon(MuonConfig { rate_ratio, ..usual }),
            },
            adamw: AdamWConfig { beta2: settings.adam_beta2.unwrap_or(adamw.beta2), ..adamw },
            weight_decay: WeightDecay { matrices, norms },
            ema_decay: settings.ema_decay,
        }
    }
}

impl Algorithm {
    /// As the user types it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::AdamW => "adamw",
            Self::Muon(_) => "muon",
        }
    }
}

/// The state of one rank's share.
#[derive(Debug)]
pub enum Optimizer {
    /// AdamW on everything.
    AdamW(AdamW),
    /// Muon on matrices, AdamW on norms.
    Muon(Muon),
}

/// What of the parameters a tensor of the state belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Element by element the whole share.
    Share,
    /// The share's norms alone, one behind the other.
    Norms,
}

/// A tensor of the state.
#[derive(Debug)]
pub struct StateTensor<'a> {
    /// Its name in a checkpoint.
    pub name: &'static str,
    /// What it belongs to.
    pub extent: Extent,
    /// One-dimensional, float32.
    pub tensor: &'a Tensor,
}

impl Optimizer {
    /// Fresh state for a share like `masters`, which `groups` divides.
    pub fn new(config: &OptimizerConfig, groups: Groups, masters: &Tensor) -> Self {
        let OptimizerConfig { algorithm, adamw, weight_decay, ema_decay: _ } = *config;
        match algorithm {
            Algorithm::AdamW => Self::AdamW(AdamW::new(adamw, groups, weight_decay, masters)),
            Algorithm::Muon(muon) => {
                Self::Muon(Muon::new((muon, adamw), groups, weight_decay, masters))
            }
        }
    }

    /// The same optimizer, computed by `kernels`.
    pub fn with_kernels(mut self, kernels: Kernels) -> Self {
        let moments = match &mut self {
            Self::AdamW(adamw) => &mut adamw.moments,
            Self::Muon(muon) => &mut muon.norms,
        };
        moments.kernels = kernels;
        self
    }

    /// One step of size `rate` (AdamW's; Muon's stands in a fixed ratio to it).
    pub fn step(&mut self, masters: &mut Tensor, gradient: &Tensor, rate: f64) {
        match self {
            Self::AdamW(adamw) => adamw.step(masters, gradient, rate),
            Self::Muon(muon) => muon.step(masters, gradient, rate),
        }
    }

    /// All tensors that a resumed run needs.
    pub fn state(&self) -> Vec<StateTensor<'_>> {
        match self {
            Self::AdamW(adamw) => adamw.state(),
            Self::Muon(muon) => muon.state(),
        }
    }

    /// Steps taken.
    pub fn steps(&self) -> i64 {
        match self {
            Self::AdamW(adamw) => adamw.steps,
            Self::Muon(muon) => muon.steps,
        }
    }

    /// Goes on as if `steps` had been taken.
    pub fn set_steps(&mut self, steps: i64) {
        match self {
            Self::AdamW(adamw) => adamw.steps = steps,
            Self::Muon(muon) => muon.steps = steps,
        }
    }
}

/// Global L2 norm of a flat gradient, a float32 scalar on its device.
pub fn gradient_norm(gradient: &Tensor) -> Tensor {
    gradient.norm_scalaropt_dtype(2.0, Kind::Float)
}

#[cfg(test)]
mod tests;
