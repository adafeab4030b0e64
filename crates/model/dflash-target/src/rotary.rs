//! Rotary embedding in three operations.
//!
//! Decoding is bound by the number of kernels, not by flops: the rotate-half form is one product,
//! one roll by half a head, and one fused multiply-add with a sine whose first half is negated.

use dflash_tensor::ops::{Pairs, Rotary, RotaryTables};
use tch::{Kind, Tensor};

/// Cosines and signed sines [T, 1, D] of T positions, and the half-width tables they come from.
#[derive(Debug)]
pub(crate) struct HeadTables {
    /// [T, D/2], float32, as the compiled kernels take them.
    pub(crate) half: RotaryTables,
    cos_t1d: Tensor,
    sin_t1d: Tensor,
    pairs: Pairs,
    /// With LongRoPE: the longest short sequence in tokens, and the tables of the same positions
    /// for long sequences.
    long: Option<(i64, Box<Self>)>,
}

impl HeadTables {
    pub(crate) fn bytes(&self) -> usize {
        let of = |x: &Tensor| x.numel() * x.kind().elt_size_in_bytes();
        let own = [&self.half.cos_td, &self.half.sin_td, &self.cos_t1d, &self.sin_t1d];
        own.into_iter().map(of).sum::<usize>()
            + self.long.as_ref().map_or(0, |(_, long)| long.bytes())
    }

    /// Tables of `positions` `[T]` for tensors of `kind`.
    pub(crate) fn new(rotary: &Rotary, positions: &Tensor, kind: Kind) -> Self {
        let of = |half| Self::of_half(half, rotary.pairs, kind);
        let long = rotary.long.as_ref().zip(rotary.long_tables(positions));
        let long = long.map(|(long, half)| (long.beyond, Box::new(of(half))));
        Self { long, ..of(rotary.tables(positions)) }
    }

    fn of_half(half: RotaryTables, pairs: Pairs, kind: Kind) -> Self {
        let (cos_td, sin_td) = (&half.cos_td, &half.sin_td);
        let whole = |first: &Tensor, second: &Tensor| {
            let both = match pairs {
                Pairs::Halves => Tensor::cat(&[first, second], -1),
                Pairs::Neighbours => Tensor::stack(&[first, second], -1).flatten(1, 2),
            };
            both.unsqueeze(1).to_kind(kind)
        };
        let (cos_t1d, sin_t1d) = (whole(cos_td, cos_td), whole(&sin_td.neg(), sin_td));
        Self { half, cos_t1d, sin_t1d, pairs, long: None }
    }

    /// Rows `start .. start + length`, as a sequence's tokens arrive. A sequence whose first pass
    /// is long uses the long frequencies from its first token on; one that grows long uses them
    /// from there on.
    pub(crate) fn narrow(&self, start: i64, length: i64) -> Self {
        let take = |table: &Tensor| table.narrow(0, start, length);
        match &self.long {
            Some((beyond, long)) if start == 0 && length > *beyond => long.map(take),
            _ => self.map(take),
        }
    }

    /// Rows at `positions` `[T]`.
    pub(crate) fn select(&self, positions: &Tensor) -> Self {
        self.map(|table| table.index_select(0, positions))
    }

    /// Selects long or short frequencies for rows that are first passes: `(first row, tokens)` of
    /// each.
    pub(crate) fn with_first_passes(self, passes: impl Iterator<Item = (i64, i64)>) -> Self {
        let Some((beyond, long)) = &self.long else { return self };
        let rows: Vec<i64> = passes
            .filter(|(_, tokens)| tokens > beyond)
            .flat_map(|(row, tokens)| row..row + tokens)
            .collect();
        let rows = Tensor::from_slice(&rows).to_device(self.cos_t1d.device());
        let mixed =
            |own: &Tensor, other: &Tensor| own.index_copy(0, &rows, &other.index_select(0, &rows));
        let half = RotaryTables {
            cos_td: mixed(&self.half.cos_td, &long.half.cos_td),
            sin_td: mixed(&self.half.sin_td, &long.half.sin_td),
        };
        let cos_t1d = mixed(&self.cos_t1d, &long.cos_t1d);
        let sin_t1d = mixed(&self.sin_t1d, &long.sin_t1d);
        Self { half, cos_t1d, sin_t1d, ..self }
    }

    fn map(&self, take: impl Fn(&Tensor) -> Tensor) -> Self {
        self.map_by(&take)
    }

    fn map_by(&self, take: &dyn Fn(&Tensor) -> Tensor) -> Self {
        let long = self.long.as_ref();
        Self {
            half: self.half.map(take),
            cos_t1d: take(&self.cos_t1d),
            sin_t1d: take(&self.sin_t1d),
            pairs: self.pairs,
            long: long.map(|(beyond, long)| (*beyond, Box::new(long.map_by(take)))),
        }
    }

    /// The half-width tables, if heads of size `dim` rotate whole, in halves, as our GPU kernels
    /// need.
    pub(crate) fn of_whole_heads(&self, dim: i64) -> Option<&RotaryTables> {
        let is_whole = self.pairs == Pairs::Halves && self.cos_t1d.size()[2] == dim;
        is_whole.then_some(&self.half)
    }

    /// Rotates `x_tnd` [T, heads, D] by the tables' positions; if heads are wider than the tables,
    /// only the leading elements.
    pub(crate) fn rotate(&self, x_tnd: &Tensor) -> Tensor {
        let (rotated, width) = (self.cos_t1d.size()[2], x_tnd.size()[2]);
        if rotated < width {
            let kept = x_tnd.narrow(2, rotated, width - rotated);
            return Tensor::cat(&[self.rotate(&x_tnd.narrow(2, 0, rotated)), kept], 2);
        }
        let others = match self.pairs {
            Pairs::Halves => x_tnd.roll([rotated / 2], [-1i64]),
            Pairs::Neighbours => x_tnd.unflatten(2, [rotated / 2, 2]).flip([-1]).flatten(2, 3),
        };
        (x_tnd * &self.cos_t1d).addcmul(&others, &self.sin_t1d)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use dflash_formats::fields::Fields;
    use dflash_tensor::ops::rotate;
    use dflash_tensor::rope::{Rope, RopeKeys};
    use dflash_test_support::seeded;
    use serde_json::{Value, json};
    use tch::Device;

    use super::*;

    fn longrope() -> Value {
        json!({ "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 2, 4, 8, 16, 32],
            "original_max_position_embeddings": 64 })
    }

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
    fn a_sequence_is_long_from_its_first_pass_or_from_where_it_grows_long() {
        let text = json!({ "rope_parameters": longrope(), "max_position_embeddings": 512 });
        let text = Fields::parse(Path::new("config.json"), &text.to_string()).unwrap();
        let rotary = Rope::read(RopeKeys::of(&text, 16).unwrap()).unwrap().rotary(Device::Cpu);
        let positions = Tensor::arange(80, (Kind::Int64, Device::Cpu));
        let whole = HeadTables::new(&rotary, &positions, Kind::Float);
        let at = |tables: &HeadTables, row: i64| tables.half.cos_td.get(row);
        let (short, long) = (rotary.tables(&positions), rotary.long_tables(&positions).unwrap());
        // Sixty tokens, then twenty more.
        assert_eq!(at(&whole.narrow(0, 60), 59), short.cos_td.get(59));
        assert_eq!(at(&whole.narrow(60, 20), 3), short.cos_td.get(63));
        assert_eq!(at(&whole.narrow(60, 20), 4), long.cos_td.get(64));
        // Sixty-five at once.
        assert_eq!(at(&whole.narrow(0, 65), 9), long.cos_td.get(9));
        // Documents of 64 and 66 tokens, concatenated.
        let both = Tensor::cat(&[positions.narrow(0, 0, 64), positions.narrow(0, 0, 66)], 0);
        let mixed = whole.select(&both).with_first_passes([(0, 64), (64, 66)].into_iter());
        assert_eq!(at(&mixed, 63), short.cos_td.get(63));
        assert_eq!(at(&mixed, 64 + 9), long.cos_td.get(9));
    }
}
