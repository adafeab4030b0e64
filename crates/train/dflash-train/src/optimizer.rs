//! How parameters move: AdamW for all of them, or Muon for the matrices and AdamW for the rest: norms,
//! biases and embeddings.
//!
//! Everything works on one rank's share of the flat parameter buffer (all of it, unless the state
//! is split over the ranks), in float32 and in place. [`Groups`] say which part of the share is
//! treated how.

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

/// Everything that decides how parameters move, besides the learning rate.
#[derive(Clone, Copy, Debug, Default)]
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

/// What moves the matrices. Norms always use AdamW.
#[derive(Clone, Copy, Debug, Default)]
pub enum Algorithm {
    /// AdamW too.
    #[default]
    AdamW,
    /// Muon.
    Muon(MuonConfig),
}

/// The state of one rank's share.
#[derive(Debug)]
pub struct Optimizer {
    adamw: AdamWConfig,
    weight_decay: WeightDecay,
    groups: Groups,
    /// AdamW's, of the whole share; of its norms alone where Muon moves the matrices.
    moments: Moments,
    muon: Option<Muon>,
    /// Steps taken, as the host counts them.
    steps: i64,
    /// The same where the device decides which are taken; float32 `[1]`, exact to 16 million.
    device_steps: Tensor,
}

/// Which parameters a state tensor covers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Extent {
    /// Element by element the whole share.
    Share,
    /// The share's norms alone, one after the other.
    Norms,
}

/// A tensor of the state: one-dimensional, float32.
#[derive(Debug)]
pub(crate) struct StateTensor<'a> {
    /// In a checkpoint.
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
    /// As the user types it.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::AdamW => "adamw",
            Self::Muon(_) => "muon",
        }
    }
}

impl Optimizer {
    /// Fresh state for a share like `master_weights`, which `groups` divides.
    ///
    /// # Panics
    /// With Muon when a share cuts through a matrix: half a matrix cannot be orthogonalised.
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

    /// The same optimizer, computed by `kernels`.
    pub fn with_kernels(mut self, kernels: Kernels) -> Self {
        self.moments.kernels = kernels;
        self
    }

    /// One step of size `rate` along `gradient`; Muon's rate is a fixed multiple of it.
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

    /// As [`Self::step`], along the gradient that `gate` divides, if it lets the step happen.
    /// Consumes the gradient. Does not synchronise with the host.
    ///
    /// # Errors
    /// A buffer of master weights or gradients that is not float32 and of the share's length.
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

    /// All of the share by AdamW: a call for each decay that there is.
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

    /// Parts that decay alike, by AdamW.
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

    /// Goes on after so many steps.
    pub(crate) fn set_steps(&mut self, steps: i64) {
        self.steps = steps;
        let _ = self.device_steps.fill_(steps as f64);
    }

    /// All tensors that a resumed run needs.
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

/// Global L2 norm of a flat gradient, a float32 scalar on its device.
pub fn gradient_norm(gradient: &Tensor) -> Tensor {
    gradient.norm_scalaropt_dtype(2.0, Kind::Float)
}

#[cfg(test)]
mod tests;
