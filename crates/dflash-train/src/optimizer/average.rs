//! An exponential moving average of the weights.

use tch::Tensor;

/// The averaged copy of a share, float32.
#[derive(Debug)]
pub struct Average {
    decay: f64,
    /// As the masters.
    pub weights: Tensor,
}

impl Average {
    /// Begins at `masters`, so that no start at zero has to be corrected for.
    pub fn new(decay: f64, masters: &Tensor) -> Self {
        Self { decay, weights: masters.copy() }
    }

    /// `average = decay * average + (1 - decay) * masters`, after a step was taken.
    pub fn update(&mut self, masters: &Tensor) {
        let _ = self.weights.lerp_(masters, 1.0 - self.decay);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_average_follows_by_its_share() {
        let masters = Tensor::from_slice(&[1.0f32, -4.0]);
        let mut average = Average::new(0.75, &masters);
        let mut masters = masters;
        for next in [[2.0f32, -4.0], [4.0, 0.0]] {
            masters.copy_(&Tensor::from_slice(&next));
            average.update(&masters);
        }
        // by hand: 0.75 * 1 + 0.25 * 2 = 1.25; 0.75 * 1.25 + 0.25 * 4 = 1.9375; and -4 -> -4 -> -3
        assert_eq!(Vec::<f32>::try_from(&average.weights).unwrap(), [1.9375, -3.0]);
    }
}
