//! AdamW over a list of float32 tensors.

use tch::{Kind, Tensor, no_grad};

/// Averages of gradient and squared gradient. The second forgets faster than the usual 0.999,
/// because the whole run is a few hundred steps.
const BETAS: (f64, f64) = (0.9, 0.98);
const EPS: f64 = 1e-8;
/// Applied to matrices only: norms have nothing to decay towards.
const WEIGHT_DECAY: f64 = 0.05;
/// Gradients longer than this are scaled down.
const MAX_NORM: f64 = 1.0;

/// One parameter with its moments.
#[derive(Debug)]
struct Slot {
    parameter: Tensor,
    mean: Tensor,
    square: Tensor,
}

/// AdamW with gradient clipping.
#[derive(Debug)]
pub(crate) struct AdamW {
    slots: Vec<Slot>,
    step: i32,
}

impl AdamW {
    /// An optimizer of `parameters`, which must require gradients.
    pub(crate) fn new(parameters: impl IntoIterator<Item = Tensor>) -> Self {
        let slot = |parameter: Tensor| Slot {
            mean: parameter.zeros_like().detach(),
            square: parameter.zeros_like().detach(),
            parameter,
        };
        Self { slots: parameters.into_iter().map(slot).collect(), step: 0 }
    }

    /// Clears the gradients, runs `loss` backward and updates every parameter.
    pub(crate) fn backward_step(&mut self, loss: &Tensor, rate: f64) {
        for slot in &mut self.slots {
            slot.parameter.zero_grad();
        }
        loss.backward();
        no_grad(|| self.update(rate));
    }

    fn update(&mut self, rate: f64) {
        self.step += 1;
        let clip = self.clip_factor();
        let correction = |beta: f64| 1.0 - beta.powi(self.step);
        let scale = (rate / correction(BETAS.0), correction(BETAS.1).sqrt());
        for slot in &mut self.slots {
            slot.update(clip, rate, scale);
        }
    }

    fn clip_factor(&self) -> f64 {
        let squares: Vec<Tensor> =
            self.slots.iter().map(|slot| slot.parameter.grad().square().sum(Kind::Float)).collect();
        let norm = Tensor::stack(&squares, 0).sum(Kind::Float).double_value(&[]).sqrt();
        (MAX_NORM / norm).min(1.0)
    }
}

impl Slot {
    fn update(&mut self, clip: f64, rate: f64, (step_size, root_correction): (f64, f64)) {
        let gradient = self.parameter.grad() * clip;
        let _ = self.mean.g_mul_scalar_(BETAS.0).g_add_(&(&gradient * (1.0 - BETAS.0)));
        let _ = self.square.g_mul_scalar_(BETAS.1).g_add_(&(gradient.square() * (1.0 - BETAS.1)));
        if self.parameter.dim() > 1 {
            let _ = self.parameter.g_mul_scalar_(1.0 - rate * WEIGHT_DECAY);
        }
        let size = self.square.sqrt() / root_correction + EPS;
        let _ = self.parameter.g_sub_(&(&self.mean / size * step_size));
    }
}

/// The rate at `step` of `steps`: linear warm-up over a twentieth, then a cosine to a tenth.
pub(crate) fn rate_at(step: usize, steps: usize, peak: f64) -> f64 {
    let warm_up = (steps / 20).max(1);
    if step < warm_up {
        return peak * (step + 1) as f64 / warm_up as f64;
    }
    let done = (step - warm_up) as f64 / (steps - warm_up).max(1) as f64;
    peak * (0.1 + 0.45 * (1.0 + (std::f64::consts::PI * done).cos()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    #[test]
    fn the_first_step_moves_by_the_rate_against_the_gradient() {
        let parameter = Tensor::zeros([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let mut optimizer = AdamW::new([parameter.shallow_clone()]);
        let direction = Tensor::from_slice(&[0.25_f32, -0.5]);
        optimizer.backward_step(&(&parameter * &direction).sum(Kind::Float), 0.125);
        let moved = Vec::<f32>::try_from(parameter.detach()).unwrap();
        assert!((moved[0] + 0.125).abs() < 1e-6 && (moved[1] - 0.125).abs() < 1e-6, "{moved:?}");
    }

    #[test]
    fn a_bowl_is_descended() {
        let parameter = Tensor::from_slice(&[3.0_f32, -2.0]).set_requires_grad(true);
        let mut optimizer = AdamW::new([parameter.shallow_clone()]);
        for _ in 0..200 {
            optimizer.backward_step(&parameter.square().sum(Kind::Float), 0.05);
        }
        let rest = parameter.abs().max().double_value(&[]);
        assert!(rest < 0.05, "{rest}");
    }

    #[test]
    fn the_rate_rises_then_falls_to_a_tenth() {
        assert_eq!(rate_at(0, 100, 1.0), 0.2);
        assert_eq!(rate_at(4, 100, 1.0), 1.0);
        assert_eq!(rate_at(5, 100, 1.0), 1.0);
        assert!((rate_at(100, 100, 1.0) - 0.1).abs() < 1e-9);
    }
}
