//! Optimizers: AdamW for all parameters, or Muon for matrices and AdamW for the rest.
//!
//! Everything works in place, in float32, on one rank's share of the flat parameter buffer, which
//! is all of it unless the state is split over ranks. [`Groups`] say how each part of the share is
//! treated.

mod adamw;
mod groups;
mod muon;
mod step_gate;

use std::ops::Range;

use dflash_kernels::kernels::Kernels;
use dflash_kernels::optimizer::AdamWBuffer;
use dflash_settings::{OptimizerKind, OptimizerSettings};
use tch::{Kind, Tensor};

pub use adamw::AdamWConfig;
use adamw::Moments;
use groups::{DecayedRate, shrink, spans};
pub use groups::{Groups, Piece, WeightDecay};
use muon::Muon;
pub use muon::{MuonConfig, MuonScale};
pub use step_gate::StepGate;

/// Optimizer configuration except for the learning rate.
#[derive(Clone, Copy, Debug, Default)]
pub struct OptimizerConfig {
    /// Optimizer of the matrices.
    pub algorithm: Algorithm,
    /// AdamW's constants; with Muon they apply to the remaining parameters.
    pub adamw: AdamWConfig,
    /// Weight decay by group.
    pub weight_decay: WeightDecay,
    /// Decay of the averaged copy of the weights; `None` for no copy.
    pub ema_decay: Option<f64>,
}

/// Optimizer of the matrices. Norms always use AdamW.
#[derive(Clone, Copy, Debug, Default)]
pub enum Algorithm {
    /// AdamW.
    #[default]
    AdamW,
    /// Muon.
    Muon(MuonConfig),
}

/// Optimizer state of one rank's share.
#[derive(Debug)]
pub struct Optimizer {
    adamw: AdamWConfig,
    weight_decay: WeightDecay,
    groups: Groups,
    /// AdamW's moments of the whole share, or of its norms only if Muon handles the matrices.
    moments: Moments,
    muon: Option<Muon>,
    /// Number of steps taken, counted on the host.
    steps: i64,
    /// The same counted on the device, if that decides about steps; float32 `[1]`, exact to 16
    /// million.
    device_steps: Tensor,
}

/// The parameters that a state tensor covers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Extent {
    /// The whole share, element by element.
    Share,
    /// Only the share's norms, concatenated.
    Norms,
}

/// A one-dimensional float32 tensor of the state.
#[derive(Debug)]
pub(crate) struct StateTensor<'a> {
    /// Name in a checkpoint.
    pub(crate) name: &'static str,
    pub(crate) extent: Extent,
    pub(crate) tensor: &'a Tensor,
}

impl From<&OptimizerSettings> for OptimizerConfig {
    fn from(settings: &OptimizerSettings) -> Self {
        let (usual, adamw) = (MuonConfig::default(), AdamWConfig::default());
        let rate_ratio = settings.muon_lr.map_or(usual.rate_ratio, |rate| rate / settings.lr);
        let (matrices, norms) = (settings.weight_decay, settings.norm_weight_decay);
        let [beta1, beta2] = settings.adam_betas();
        Self {
            algorithm: match settings.optimizer {
                OptimizerKind::Adamw => Algorithm::AdamW,
                OptimizerKind::Muon => Algorithm::Muon(MuonConfig { rate_ratio, ..usual }),
            },
            adamw: AdamWConfig {
                beta1,
                beta2,
                epsilon: settings.adam_epsilon.unwrap_or(adamw.epsilon),
            },
            weight_decay: WeightDecay { matrices, norms },
            ema_decay: settings.ema_decay,
        }
    }
}

impl Algorithm {
    /// Name on the command line.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::AdamW => "adamw",
            Self::Muon(_) => "muon",
        }
    }
}

impl Optimizer {
    /// Fresh state for a share of the shape of `master_weights`, divided into `groups`.
    ///
    /// # Panics
    /// If Muon is used and the share cuts through a matrix: half a matrix cannot be orthogonalised.
    pub fn new(config: &OptimizerConfig, groups: Groups, master_weights: &Tensor) -> Self {
        let OptimizerConfig { algorithm, adamw, weight_decay, ema_decay: _ } = *config;
        let (muon, elements) = match algorithm {
            Algorithm::AdamW => (None, master_weights.numel() as i64),
            Algorithm::Muon(config) => {
                assert!(groups.matrices.iter().all(Piece::is_whole), "Muon needs whole matrices");
                (
                    Some(Muon { config, momentum: master_weights.zeros_like() }),
                    groups.norm_elements(),
                )
            }
        };
        let moments = Moments::zeros(elements, master_weights.device());
        let device_steps = Tensor::zeros([1], (Kind::Float, master_weights.device()));
        Self { adamw, weight_decay, groups, moments, muon, steps: 0, device_steps }
    }

    /// The same optimizer using `kernels`.
    pub fn with_kernels(mut self, kernels: Kernels) -> Self {
        self.moments.kernels = kernels;
        self
    }

    /// Takes a step along `gradient` at learning rate `rate`, of which Muon's is a fixed multiple.
    pub fn step(&mut self, master_weights: &mut Tensor, gradient: &Tensor, rate: f64) {
        self.steps += 1;
        let Groups { matrices, norms } = &self.groups;
        let matrix_rate = rate * self.muon.as_ref().map_or(1.0, |muon| muon.config.rate_ratio);
        shrink(
            master_weights,
            matrices,
            DecayedRate { rate: matrix_rate, decay: self.weight_decay.matrices },
        );
        shrink(master_weights, norms, DecayedRate { rate, decay: self.weight_decay.norms });
        let step = self.adamw.step(self.steps, rate);
        let Some(muon) = &self.muon else {
            return self.moments.step(master_weights, gradient, step);
        };
        for piece in matrices {
            muon.step(piece, master_weights, gradient, matrix_rate, self.moments.kernels);
        }
        let mut first = 0;
        for piece in norms {
            let moments = self.moments.narrow(first, piece.elements);
            moments.step(&mut piece.of(master_weights), &piece.of(gradient), step);
            first += piece.elements;
        }
    }

    /// As [`Self::step`], with the gradient divided by `gate`'s divisor, and only if `gate` allows
    /// the step. Consumes the gradient and does not synchronise with the host.
    ///
    /// # Errors
    /// Master weights or gradient are not float32 or do not have the share's length.
    pub fn step_on_device(
        &mut self,
        master_weights: &Tensor,
        gradient: &Tensor,
        rate: f64,
        gate: &StepGate,
    ) -> Result<(), dflash_torch_sys::Error> {
        let _ = self.device_steps.g_add_(&gate.share(1.0));
        let Some(muon) = &self.muon else {
            return self.adamw_on_device(master_weights, gradient, rate, gate);
        };
        let Groups { matrices, norms } = &self.groups;
        let matrix_rate = rate * muon.config.rate_ratio;
        if self.weight_decay.matrices != 0.0 {
            let rest = gate.rest(matrix_rate * self.weight_decay.matrices);
            matrices.iter().for_each(|piece| drop(piece.of(master_weights).g_mul_(&rest)));
        }
        for piece in matrices {
            let kernels = self.moments.kernels;
            muon.step_on_device(piece, master_weights, gradient, matrix_rate, gate, kernels);
        }
        let mut first = 0;
        let (mut decaying, mut others) = (Vec::new(), Vec::new());
        for piece in norms {
            let buffer = self.moments.buffer(first, piece.of(master_weights), piece.of(gradient));
            first += piece.elements;
            if piece.decays { decaying.push(buffer) } else { others.push(buffer) }
        }
        let decayed = DecayedRate { rate, decay: self.weight_decay.norms };
        self.parts_on_device(&decaying, decayed, gate)?;
        self.parts_on_device(&others, DecayedRate { rate, decay: 0.0 }, gate)
    }

    /// AdamW on the whole share: one call per weight decay.
    fn adamw_on_device(
        &self,
        master_weights: &Tensor,
        gradient: &Tensor,
        rate: f64,
        gate: &StepGate,
    ) -> Result<(), dflash_torch_sys::Error> {
        let WeightDecay { matrices, norms } = self.weight_decay;
        let whole = 0..master_weights.numel() as i64;
        let of = |decays: bool| spans(self.groups.norms.iter().filter(|it| it.decays == decays));
        let fixed = of(false);
        let calls = if matrices == norms && (norms == 0.0 || fixed.is_empty()) {
            // padding is 0 and stays 0
            vec![(vec![whole], norms)]
        } else {
            vec![(spans(&self.groups.matrices), matrices), (of(true), norms), (fixed, 0.0)]
        };
        for (spans, decay) in calls {
            let part = |span: &Range<i64>| {
                let view = |share: &Tensor| share.narrow(0, span.start, span.end - span.start);
                self.moments.buffer(span.start, view(master_weights), view(gradient))
            };
            let parts: Vec<_> = spans.iter().filter(|span| !span.is_empty()).map(part).collect();
            self.parts_on_device(&parts, DecayedRate { rate, decay }, gate)?;
        }
        Ok(())
    }

    /// AdamW on parts with the same weight decay.
    fn parts_on_device(
        &self,
        parts: &[AdamWBuffer],
        decayed: DecayedRate,
        gate: &StepGate,
    ) -> Result<(), dflash_torch_sys::Error> {
        if parts.is_empty() {
            return Ok(());
        }
        Moments::step_on_device(parts, self.adamw, &self.device_steps, decayed, gate)
    }

    /// Sets the step count of a resumed run.
    pub(crate) fn set_steps(&mut self, steps: i64) {
        self.steps = steps;
        let _ = self.device_steps.fill_(steps as f64);
    }

    /// All tensors needed to resume.
    pub(crate) fn state(&self) -> Vec<StateTensor<'_>> {
        let Moments { mean, variance, .. } = &self.moments;
        let share = |name, tensor| StateTensor { name, extent: Extent::Share, tensor };
        let norms = |name, tensor| StateTensor { name, extent: Extent::Norms, tensor };
        match &self.muon {
            None => vec![share("mean", mean), share("variance", variance)],
            Some(Muon { momentum, .. }) => vec![
                share("momentum", momentum),
                norms("norm_mean", mean),
                norms("norm_variance", variance),
            ],
        }
    }
}

/// Global L2 norm of a flat gradient, a float32 scalar on the gradient's device.
pub fn gradient_norm(gradient: &Tensor) -> Tensor {
    gradient.norm_scalaropt_dtype(2.0, Kind::Float)
}

#[cfg(test)]
mod tests;
