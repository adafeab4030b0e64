//! The projection to tokens of a few rows: logits, or the most likely token alone.

use std::ptr::{null, null_mut};

use tch::{Device, Kind, Tensor};

use super::matrix::{LANES, Matrix};
use super::{MAX_ROWS, data, raw, threads, vector};

/// A projection to tokens, packed.
#[derive(Debug)]
pub struct Head {
    matrix: Matrix,
}

impl Head {
    /// Packs `weight_io` [H, V] as `kind`, float32 or bfloat16.
    pub fn new(weight_io: &Tensor, kind: Kind) -> Self {
        Self { matrix: Matrix::pack(weight_io, kind) }
    }

    /// Logits [R, V] of `x` [R, H] (float32), behind a norm (weight `[H]`, epsilon) where there is one.
    pub fn logits(&self, x: &Tensor, norm: Option<(&Tensor, f64)>) -> Tensor {
        let logits = Tensor::empty([x.size()[0], self.matrix.outputs], (Kind::Float, Device::Cpu));
        self.run(x, norm, (Some(&logits), None));
        logits
    }

    /// The token with the largest logit for each row of `x` `[R]` (int64); of equal ones the first.
    pub fn most_likely(&self, x: &Tensor, norm: Option<(&Tensor, f64)>) -> Tensor {
        let best = Tensor::empty([x.size()[0]], (Kind::Int64, Device::Cpu));
        self.run(x, norm, (None, Some(&best)));
        best
    }

    fn run(
        &self,
        x: &Tensor,
        norm: Option<(&Tensor, f64)>,
        (logits, best): (Option<&Tensor>, Option<&Tensor>),
    ) {
        let Matrix { packed, depth, outputs } = &self.matrix;
        let rows = x.size()[0];
        assert!((1..=MAX_ROWS).contains(&rows), "{rows} rows in one call");
        assert_eq!(x.size(), [rows, *depth]);
        let threads = threads();
        // The best of each lane, value and token, and normed rows.
        let scratch = threads * rows * (2 * LANES + depth);
        let scratch = Tensor::empty([scratch], (Kind::Float, Device::Cpu));
        let head = raw::Head {
            matrix: packed.data_ptr(),
            hidden: *depth,
            outputs: *outputs,
            rows,
            x: data(x),
            norm: norm.map_or(null(), |(weight, _)| vector(weight, *depth)),
            eps: norm.map_or(0.0, |(_, eps)| eps as f32),
            bf16: i32::from(self.matrix.is_bf16()),
            logits: logits.map_or(null_mut(), data),
            best: best.map_or(null_mut(), |best| best.data_ptr().cast()),
            scratch: data(&scratch),
        };
        // SAFETY: shapes, kinds and contiguity are checked above; the scratch memory is made for these
        // rows and threads.
        unsafe { raw::dflash_decode_head(&raw const head, threads) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::storage;

    const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

    #[test]
    fn bfloat16_stores_what_it_says_exactly_and_nothing_else() {
        let exact = Tensor::from_slice(&[1.0f32, -0.5, 3.140625]);
        let other = Tensor::from_slice(&[1.0f32 + 2f32.powi(-9)]);
        assert_eq!(storage([&exact]), Kind::BFloat16);
        assert_eq!(storage([&exact, &other]), Kind::Float);
    }

    #[test]
    fn a_head_of_any_size_multiplies_and_finds_the_first_of_the_largest() {
        for (depth, outputs) in [(1, 1), (7, 31), (16, 32), (33, 100)] {
            let weight = Tensor::randint(9, [depth, outputs], F32) - 4;
            let x = Tensor::randint(9, [32, depth], F32) - 4;
            let expected = x.mm(&weight);
            for kind in [Kind::Float, Kind::BFloat16] {
                let head = Head::new(&weight, kind);
                for rows in [1, 2, 7, 8, 9, 32] {
                    let x = x.narrow(0, 0, rows);
                    let expected = expected.narrow(0, 0, rows);
                    // Small whole numbers: sums are exact in any order, and many logits are equal.
                    assert_eq!(head.logits(&x, None), expected, "{depth} x {outputs}, {rows}");
                    let first = expected.max_dim(-1, false).1;
                    assert_eq!(head.most_likely(&x, None), first, "{depth} x {outputs}, {rows}");
                }
            }
        }
    }
}
