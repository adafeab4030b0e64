//! AdamW over the flat parameter buffer, in float32, in place.

use dflash_torch_sys::kernels::{self, AdamWStep};
use tch::{Kind, Tensor};

/// Constants of AdamW.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct AdamWConfig {
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// Added to the root of the latter.
    pub epsilon: f64,
    /// Decoupled decay, as a share of the learning rate.
    pub weight_decay: f64,
}

impl Default for AdamWConfig {
    /// PyTorch's defaults, without weight decay: the recipe of the DFlash paper.
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0 }
    }
}

/// State of AdamW for parameters of one flat buffer.
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    /// Mean of gradients.
    pub mean: Tensor,
    /// Mean of squared gradients.
    pub variance: Tensor,
    /// Steps taken.
    pub steps: i64,
    /// 1 where weight decay applies.
    decay_mask: Option<Tensor>,
}

impl AdamW {
    /// Fresh state for parameters like `flat`; `decayed` are the (offset, elements) that weight
    /// decay applies to.
    pub fn new(config: AdamWConfig, flat: &Tensor, decayed: &[(i64, i64)]) -> Self {
        let decay_mask = (config.weight_decay != 0.0).then(|| {
            let mask = flat.zeros_like();
            for &(offset, elements) in decayed {
                let _ = mask.narrow(0, offset, elements).fill_(1.0);
            }
            mask
        });
        Self { config, mean: flat.zeros_like(), variance: flat.zeros_like(), steps: 0, decay_mask }
    }

    /// One step of size `rate` along `gradient`.
    pub fn step(&mut self, flat: &mut Tensor, gradient: &Tensor, rate: f64) {
        self.steps += 1;
        if let Some(mask) = &self.decay_mask {
            let kept = mask * (-rate * self.config.weight_decay) + 1.0;
            let _ = flat.g_mul_(&kept);
        }
        let correction1 = 1.0 - self.config.beta1.powi(self.steps as i32);
        let correction2 = 1.0 - self.config.beta2.powi(self.steps as i32);
        let (step_size, root_correction2) = (rate / correction1, correction2.sqrt());
        if kernels::supports(flat) {
            let AdamWConfig { beta1, beta2, epsilon, .. } = self.config;
            let step = AdamWStep { beta1, beta2, epsilon, step_size, root_correction2 };
            kernels::adamw(flat, gradient, (&self.mean, &self.variance), step);
        } else {
            self.portable_step(flat, gradient, (step_size, root_correction2));
        }
    }

    fn portable_step(
        &mut self,
        flat: &mut Tensor,
        gradient: &Tensor,
        (step_size, root): (f64, f64),
    ) {
        let AdamWConfig { beta1, beta2, epsilon, .. } = self.config;
        let _ = self.mean.lerp_(gradient, 1.0 - beta1);
        let _ = self.variance.g_mul_scalar_(beta2);
        let _ = self.variance.addcmul_(gradient, &(gradient * (1.0 - beta2)));
        let divisor = (self.variance.sqrt() / root).g_add_scalar_(epsilon);
        let update = (&self.mean / divisor).g_mul_scalar_(-step_size);
        let _ = flat.g_add_(&update);
    }
}

/// Global L2 norm of a flat gradient, a float32 scalar on its device.
pub fn gradient_norm(gradient: &Tensor) -> Tensor {
    gradient.norm_scalaropt_dtype(2.0, Kind::Float)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weight_decay_spares_what_is_not_listed() {
        let mut flat = Tensor::from_slice(&[1.0f32, 1.0]);
        let config = AdamWConfig { weight_decay: 0.5, ..AdamWConfig::default() };
        let mut optimizer = AdamW::new(config, &flat, &[(0, 1)]);
        optimizer.step(&mut flat, &Tensor::from_slice(&[0.0f32, 0.0]), 0.1);
        assert_eq!(Vec::<f32>::try_from(&flat).unwrap(), [0.95, 1.0]);
    }

    #[test]
    fn the_first_step_has_the_size_of_the_rate() {
        let mut flat = Tensor::zeros([2], (Kind::Float, tch::Device::Cpu));
        let mut optimizer = AdamW::new(AdamWConfig::default(), &flat, &[]);
        optimizer.step(&mut flat, &Tensor::from_slice(&[3.0f32, -0.2]), 0.1);
        let moved = Vec::<f32>::try_from(&flat).unwrap();
        assert!((moved[0] + 0.1).abs() < 1e-6 && (moved[1] - 0.1).abs() < 1e-6, "{moved:?}");
    }
}
