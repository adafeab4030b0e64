//! Rotary embedding of whole heads, in three operations.
//!
//! The decoding path counts kernels, not flops: the rotate-half form is written as one product,
//! one roll by half a head, and one fused multiply-add with a sine whose first half is negated.

use tch::{Kind, Tensor};

use super::config::{Llama3Scaling, RopeConfig};
use crate::ops::{Rotary, RotaryTables};

/// Cosines and signed sines [T, 1, D] of T positions, and the half tables they are made of.
#[derive(Debug)]
pub(crate) struct HeadTables {
    /// [T, D/2], float32: what the compiled kernels take.
    pub(crate) half: RotaryTables,
    cos_t1d: Tensor,
    sin_t1d: Tensor,
}

impl HeadTables {
    /// Tables of `positions` `[T]` for tensors of `kind`.
    pub(crate) fn new(rotary: &Rotary, positions: &Tensor, kind: Kind) -> Self {
        let half = rotary.tables(positions);
        let (cos_td, sin_td) = (&half.cos_td, &half.sin_td);
        let whole =
            |low: &Tensor, high: &Tensor| Tensor::cat(&[low, high], -1).unsqueeze(1).to_kind(kind);
        let (cos_t1d, sin_t1d) = (whole(cos_td, cos_td), whole(&sin_td.neg(), sin_td));
        Self { half, cos_t1d, sin_t1d }
    }

    /// Rows `start .. start + length`.
    pub(crate) fn narrow(&self, start: i64, length: i64) -> Self {
        self.map(|table| table.narrow(0, start, length))
    }

    /// Rows at `positions` `[T]`.
    pub(crate) fn select(&self, positions: &Tensor) -> Self {
        self.map(|table| table.index_select(0, positions))
    }

    fn map(&self, take: impl Fn(&Tensor) -> Tensor) -> Self {
        let (cos_t1d, sin_t1d) = (take(&self.cos_t1d), take(&self.sin_t1d));
        Self { half: self.half.map(take), cos_t1d, sin_t1d }
    }

    /// Rotates `x_tnd` [T, heads, D] by the tables' positions.
    pub(crate) fn rotate(&self, x_tnd: &Tensor) -> Tensor {
        let half = self.cos_t1d.size()[2] / 2;
        (x_tnd * &self.cos_t1d).addcmul(&x_tnd.roll([half], [-1i64]), &self.sin_t1d)
    }
}

/// Llama 3's frequencies: low ones divided by the factor, high ones kept, a ramp between.
pub(crate) fn scale_frequencies(rope: &RopeConfig, inverse_frequency: Tensor) -> Tensor {
    let Some(scaling) = rope.llama3 else { return inverse_frequency };
    let Llama3Scaling { factor, low_freq_factor, high_freq_factor, .. } = scaling;
    let context = scaling.original_max_position_embeddings as f64;
    let turns = &inverse_frequency * (context / std::f64::consts::TAU);
    let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
    &inverse_frequency * (&kept + (1.0 - &kept) / factor)
}

#[cfg(test)]
mod tests {
    use dflash_test_support::seeded;
    use tch::Device;

    use super::*;
    use crate::ops::rotate;

    #[test]
    fn the_short_form_is_rotate_half_and_a_selection_the_table_of_its_positions() {
        let _draws = seeded(tch::manual_seed);
        let rotary = Rotary::new(8, 10_000.0, Device::Cpu);
        let tables = |positions: &Tensor| HeadTables::new(&rotary, positions, Kind::Float);
        let some = Tensor::from_slice(&[7i64, 0, 499]);
        let x_tnd = Tensor::randn([3, 2, 8], (Kind::Float, Device::Cpu));
        let direct = tables(&some).rotate(&x_tnd);
        let expected = rotate(&x_tnd, &rotary.tables(&some));
        assert!(direct.allclose(&expected, 1e-6, 1e-6, false));
        let whole = tables(&Tensor::arange(500, (Kind::Int64, Device::Cpu)));
        assert_eq!(whole.select(&some).rotate(&x_tnd), direct);
        let tail = x_tnd.narrow(0, 2, 1);
        assert_eq!(whole.narrow(499, 1).rotate(&tail), direct.narrow(0, 2, 1));
    }

    #[test]
    fn llama3_keeps_fast_and_stretches_slow_frequencies() {
        let scaling = Llama3Scaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 64,
        };
        let rope = RopeConfig { theta: 500_000.0, llama3: Some(scaling) };
        let scaled = scale_frequencies(&rope, Tensor::from_slice(&[1.0f32, 0.01]));
        assert!(scaled.allclose(&Tensor::from_slice(&[1.0f32, 0.00125]), 1e-6, 0.0, false));
    }
}
