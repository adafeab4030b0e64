//! Choosing tokens, greedily or at a temperature, so that the target's distribution is kept.
//!
//! Random numbers come from a seeded generator on the host and are turned into tokens by inverting
//! the cumulative distribution on the device: the same seed gives the same text, and only the
//! chosen tokens travel. Shapes: `r` rows (positions), `v` vocabulary.

use dflash_model::ops::most_likely;
use dflash_model::target::Target;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use tch::{Kind, Tensor};

/// Chooses tokens, and owns the random state.
#[derive(Debug, Clone)]
pub struct Sampler {
    /// Divisor of the logits; 0 chooses the most likely token.
    temperature: f64,
    random: ChaCha8Rng,
}

impl Sampler {
    /// Greedy at temperature 0, else random by `seed`.
    pub fn new(temperature: f64, seed: u64) -> Self {
        Self { temperature, random: ChaCha8Rng::seed_from_u64(seed) }
    }

    /// Whether tokens are the most likely ones.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// A token for one row of logits [1, V].
    pub fn choose(&mut self, logits_1v: &Tensor) -> i64 {
        if self.is_greedy() {
            return most_likely(logits_1v).int64_value(&[0]);
        }
        self.draw(&self.distributions(logits_1v))[0]
    }

    /// The token after one row [1, H] of the target's residual stream.
    pub(crate) fn next(&mut self, target: &Target, hidden_1d: &Tensor) -> i64 {
        if self.is_greedy() {
            return target.most_likely(hidden_1d).int64_value(&[0]);
        }
        self.choose(&target.logits(hidden_1d))
    }

    /// Distributions [R, V] of logits [R, V], float64. Greedy sampling has none.
    pub(crate) fn distributions(&self, logits_rv: &Tensor) -> Tensor {
        debug_assert!(!self.is_greedy(), "greedy decoding compares tokens, not distributions");
        (logits_rv.to_kind(Kind::Double) / self.temperature).softmax(-1, Kind::Double)
    }

    /// One token for each row of non-negative weights [R, V], drawn in proportion to them.
    pub(crate) fn draw(&mut self, weights_rv: &Tensor) -> Vec<i64> {
        let size = weights_rv.size();
        let uniform: Vec<f64> = (0..size[0]).map(|_| self.uniform()).collect();
        let cumulative_rv = weights_rv.cumsum(-1, Kind::Double);
        let total_r1 = cumulative_rv.narrow(1, size[1] - 1, 1);
        let at_r1 = Tensor::from_slice(&uniform).to_device(weights_rv.device()).unsqueeze(1);
        // The first token whose cumulative weight exceeds the draw; one of weight 0 never does.
        let chosen =
            (at_r1 * total_r1).searchsorted(&cumulative_rv, false, true, "right", None::<&Tensor>);
        let chosen = chosen.flatten(0, -1).clamp_max(size[1] - 1);
        Vec::try_from(chosen).expect("token ids are integers")
    }

    /// A number in [0, 1) with 53 random bits.
    pub(crate) fn uniform(&mut self) -> f64 {
        (self.random.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_the_weights_and_never_pick_a_zero() {
        let mut sampler = Sampler::new(1.0, 7);
        let weights = Tensor::from_slice(&[0.0, 0.2, 0.0, 0.6, 0.0]).unsqueeze(0);
        let draws = sampler.draw(&weights.expand([20_000, 5], false));
        let share = |id| draws.iter().filter(|&&draw| draw == id).count() as f64 / 20_000.0;
        // Three standard deviations of 20,000 draws are below 0.01.
        assert!((share(1) - 0.25).abs() < 0.01 && (share(3) - 0.75).abs() < 0.01);
        assert_eq!(share(1) + share(3), 1.0);
    }

    #[test]
    fn a_seed_fixes_the_draws_and_temperature_sharpens_them() {
        let logits = Tensor::from_slice(&[1.0f32, 2.0, 0.0]).unsqueeze(0);
        let draw = |temperature: f64| -> Vec<i64> {
            let mut sampler = Sampler::new(temperature, 7);
            (0..50).map(|_| sampler.choose(&logits)).collect()
        };
        assert_eq!(draw(1.0), draw(1.0));
        assert_ne!(draw(1.0), draw(5.0));
        assert_eq!(draw(0.01), [1; 50]);
        assert_eq!(Sampler::new(0.0, 7).choose(&logits), 1);
    }

    #[test]
    fn the_first_of_equal_logits_is_the_most_likely() {
        let mut logits = vec![0.25f32; 3 * 1000];
        for (row, at) in [(0, 400), (0, 700), (1, 999), (2, 0)] {
            logits[row * 1000 + at] = 2.0;
        }
        let chosen = most_likely(&Tensor::from_slice(&logits).view([3, 1000]));
        assert_eq!(Vec::<i64>::try_from(chosen).unwrap(), [400, 999, 0]);
    }
}
