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
        Self {
            half: self.half.narrow(start, length),
            cos_t1d: self.cos_t1d.narrow(0, start, length),
            sin_t1d: self.sin_t1d.narrow(0, start, length),
        }
    }

    /// Rows at `positions` `[T]`.
    pub(crate) fn select(&self, positions: &Tensor) -> Self {
        let rows = |table: &Tensor| table.index_select(0, positions);
        Self {
            half: RotaryTables { cos_td: rows(&self.half.cos_td), sin_td: rows(&self.half.sin_td) },
            cos_t1d: rows(&self.cos_t1d),
            sin_t1d: rows(&self.sin_t1d),
        }
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
    fn the_short_form_is_rotate_half() {
        let _draws = seeded(tch::manual_seed);
        let rotary = Rotary::new(8, 10_000.0, Device::Cpu);
        let positions = Tensor::from_slice(&[3i64, 0, 500]);
        let x_tnd = Tensor::randn([3, 2, 8], (Kind::Float, Device::Cpu));
        let expected = rotate(&x_tnd, &rotary.tables(&positions));
        let rotated = HeadTables::new(&rotary, &positions, Kind::Float).rotate(&x_tnd);
        assert!(rotated.allclose(&expected, 1e-6, 1e-6, false));
    }

    #[test]
    fn a_selection_of_a_table_is_the_table_of_the_selection() {
        let _draws = seeded(tch::manual_seed);
        let rotary = Rotary::new(8, 10_000.0, Device::Cpu);
        let all = Tensor::arange(20, (Kind::Int64, Device::Cpu));
        let some = Tensor::from_slice(&[7i64, 19]);
        let x_tnd = Tensor::randn([2, 2, 8], (Kind::Float, Device::Cpu));
        let whole = HeadTables::new(&rotary, &all, Kind::Float);
        let direct = HeadTables::new(&rotary, &some, Kind::Float).rotate(&x_tnd);
        assert_eq!(whole.select(&some).rotate(&x_tnd), direct);
        let tail = x_tnd.narrow(0, 1, 1);
        assert_eq!(whole.narrow(19, 1).rotate(&tail), direct.narrow(0, 1, 1));
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
