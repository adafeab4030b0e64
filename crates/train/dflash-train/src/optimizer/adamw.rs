//! AdamW over a flat buffer of parameters, in float32, in place.

use dflash_kernels::kernels::{self, AdamWStep, Kernels};
use dflash_kernels::optimizer::{AdamWBuffer, FusedAdamW, Steering, fused_adamw};
use tch::{Device, Kind, Tensor};

use super::groups::DecayedRate;
use super::step_gate::StepGate;

/// AdamW's constants.
#[derive(Clone, Copy, Debug)]
pub struct AdamWConfig {
    /// Decay of the first moment (mean of gradients).
    pub beta1: f64,
    /// Decay of the second moment (mean of squared gradients).
    pub beta2: f64,
    /// Added to the square root of the second moment.
    pub epsilon: f64,
}

impl Default for AdamWConfig {
    /// PyTorch's defaults, also used by the DFlash paper.
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 }
    }
}

impl AdamWConfig {
    /// The kernel's arguments for step `steps`, 1-based.
    pub(super) fn step(&self, steps: i64, rate: f64) -> AdamWStep {
        let Self { beta1, beta2, epsilon } = *self;
        let correction1 = 1.0 - beta1.powi(steps as i32);
        let correction2 = 1.0 - beta2.powi(steps as i32);
        let (step_size, root_correction2) = (rate / correction1, correction2.sqrt());
        AdamWStep { beta1, beta2, epsilon, step_size, root_correction2 }
    }
}

/// First and second moment.
#[derive(Debug)]
pub(super) struct Moments {
    pub(super) mean: Tensor,
    pub(super) variance: Tensor,
    pub(super) kernels: Kernels,
}

impl Moments {
    /// Moments before the first step.
    pub(super) fn zeros(elements: i64, device: Device) -> Self {
        let zeros = || Tensor::zeros([elements], (Kind::Float, device));
        Self { mean: zeros(), variance: zeros(), kernels: Kernels::Fast }
    }

    /// Views of `elements` elements from `first` on.
    pub(super) fn narrow(&self, first: i64, elements: i64) -> Self {
        let view = |x: &Tensor| x.narrow(0, first, elements);
        Self { mean: view(&self.mean), variance: view(&self.variance), kernels: self.kernels }
    }

    /// Updates `parameters`, to which these moments belong.
    pub(super) fn step(&self, parameters: &mut Tensor, gradient: &Tensor, step: AdamWStep) {
        if self.kernels.take(parameters) {
            kernels::adamw(parameters, gradient, &self.mean, &self.variance, step);
        } else {
            self.portable_step(parameters, gradient, step);
        }
    }

    /// Updates `parts`, each with its parameters, gradient and moments, as `gate` allows. Weight
    /// decay is applied in the same pass.
    pub(super) fn step_on_device(
        parts: &[AdamWBuffer],
        config: AdamWConfig,
        steps: &Tensor,
        DecayedRate { rate, decay: weight_decay }: DecayedRate,
        gate: &StepGate,
    ) -> Result<(), dflash_torch_sys::Error> {
        let AdamWConfig { beta1, beta2, epsilon } = config;
        let (divisor, skip) = (&gate.divisor, &gate.skipped());
        let step = FusedAdamW { rate, beta1, beta2, weight_decay, epsilon };
        fused_adamw(parts, Steering { steps, divisor, skip }, step)
    }

    /// The moments of a range starting at `first`, combined with its parameters and gradient.
    pub(super) fn buffer(&self, first: i64, parameters: Tensor, gradient: Tensor) -> AdamWBuffer {
        let Self { mean, variance, .. } = self.narrow(first, parameters.numel() as i64);
        AdamWBuffer { parameters, gradient, mean, variance }
    }

    fn portable_step(&self, parameters: &mut Tensor, gradient: &Tensor, step: AdamWStep) {
        let AdamWStep { beta1, beta2, epsilon, step_size, root_correction2 } = step;
        let (mut mean, mut variance) = (self.mean.shallow_clone(), self.variance.shallow_clone());
        let _ = mean.lerp_(gradient, 1.0 - beta1);
        let _ = variance.g_mul_scalar_(beta2);
        let _ = variance.addcmul_(gradient, &(gradient * (1.0 - beta2)));
        let divisor = (variance.sqrt() / root_correction2).g_add_scalar_(epsilon);
        let update = (mean / divisor).g_mul_scalar_(-step_size);
        let _ = parameters.g_add_(&update);
    }
}
