//! The projection to tokens of a few rows: logits, or the most likely token alone.

use std::cell::RefCell;
use std::ptr::{null, null_mut};

use tch::Tensor;

use super::matrix::{LANES, Matrix, Products};
use super::scratch::Scratch;
use super::{MAX_ROWS, raw, threads};
use crate::level;

/// A projection to tokens, packed.
#[derive(Debug)]
pub struct Head {
    matrix: Matrix,
    scratch: RefCell<Scratch>,
}

impl Head {
    /// Packs `weight_io` [H, V].
    pub fn new(weight_io: &Tensor, products: Products) -> Self {
        Self { matrix: Matrix::pack(weight_io, products), scratch: RefCell::default() }
    }

    /// Tokens V that it projects to.
    pub fn outputs(&self) -> usize {
        self.matrix.outputs as usize
    }

    /// Writes the logits [R, V] of `x` [R, H], behind a norm (weight `[H]`, epsilon) where there is one.
    pub fn logits(&self, x: &[f32], norm: Option<(&[f32], f64)>, logits: &mut [f32]) {
        let (rows, outputs) = (self.rows(x), self.outputs());
        assert_eq!(logits.len(), rows * outputs, "a logit for each row and token");
        let each = MAX_ROWS as usize;
        let parts = x.chunks(each * self.depth()).zip(logits.chunks_mut(each * outputs));
        parts.for_each(|(x, logits)| self.run(x, norm, (logits.as_mut_ptr(), null_mut())));
    }

    /// Writes the token with the largest logit for each row of `x` [R, H] to `best` `[R]`; of equal
    /// ones the first.
    pub fn most_likely(&self, x: &[f32], norm: Option<(&[f32], f64)>, best: &mut [i64]) {
        assert_eq!(best.len(), self.rows(x), "a token for each row");
        let each = MAX_ROWS as usize;
        let parts = x.chunks(each * self.depth()).zip(best.chunks_mut(each));
        parts.for_each(|(x, best)| self.run(x, norm, (null_mut(), best.as_mut_ptr())));
    }

    fn depth(&self) -> usize {
        self.matrix.depth as usize
    }

    fn rows(&self, x: &[f32]) -> usize {
        assert_eq!(x.len() % self.depth(), 0, "whole rows");
        x.len() / self.depth()
    }

    /// At most [`MAX_ROWS`] rows, whose results have room.
    fn run(&self, x: &[f32], norm: Option<(&[f32], f64)>, (logits, best): (*mut f32, *mut i64)) {
        let &Matrix { ref packed, depth, outputs, products } = &self.matrix;
        let (rows, threads) = (self.rows(x) as i64, threads());
        assert!(norm.is_none_or(|(weight, _)| weight.len() == self.depth()), "a norm's weight");
        // The best of each lane, value and token, and rows as the product takes them.
        let elements = threads * rows * (2 * LANES + depth + depth % 2);
        let mut scratch = self.scratch.borrow_mut();
        let head = raw::Head {
            matrix: packed.data_ptr(),
            hidden: depth,
            outputs,
            rows,
            x: x.as_ptr(),
            norm: norm.map_or(null(), |(weight, _)| weight.as_ptr()),
            eps: norm.map_or(0.0, |(_, eps)| eps as f32),
            products,
            logits,
            best,
            scratch: scratch.floats(elements),
        };
        // SAFETY: sizes are checked here and by the callers; the scratch memory is made for these rows
        // and threads.
        unsafe { raw::dflash_decode_head(level::raw(), &raw const head, threads) };
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::decode::floats;

    const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

    #[test]
    fn bfloat16_stores_what_it_says_exactly_and_nothing_else() {
        let exact = Tensor::from_slice(&[1.0f32, -0.5, 3.140625]);
        let other = Tensor::from_slice(&[1.0f32 + 2f32.powi(-9)]);
        assert_eq!(Products::of([&exact]), Products::Bfloat16Weights);
        assert_eq!(Products::of([&exact, &other]), Products::Float32);
        let half = exact.to_kind(Kind::BFloat16);
        assert_eq!(Products::of([&half]), Products::Bfloat16);
        assert_eq!(Products::of([&half, &exact]), Products::Bfloat16Weights);
    }

    #[test]
    fn a_head_of_any_size_multiplies_and_finds_the_first_of_the_largest() {
        for (depth, outputs) in [(1, 1), (7, 31), (16, 32), (33, 100)] {
            let weight = Tensor::randint(9, [depth, outputs], F32) - 4;
            let x = Tensor::randint(9, [40, depth], F32) - 4;
            let expected = x.mm(&weight);
            for products in [Products::Float32, Products::Bfloat16Weights, Products::Bfloat16] {
                let head = Head::new(&weight, products);
                for rows in [1, 2, 7, 8, 9, 32, 40] {
                    let x = x.narrow(0, 0, rows);
                    let expected = expected.narrow(0, 0, rows);
                    let what = format!("{depth} x {outputs}, {rows} rows, {products:?}");
                    let mut logits = vec![0.0; (rows * outputs) as usize];
                    head.logits(floats(&x), None, &mut logits);
                    // Small whole numbers: sums are exact in any order, and many logits are equal.
                    let found = Tensor::from_slice(&logits).view([rows, outputs]);
                    assert_eq!(found, expected, "{what}");
                    let mut best = vec![0; rows as usize];
                    head.most_likely(floats(&x), None, &mut best);
                    let first = Vec::<i64>::try_from(expected.max_dim(-1, false).1).unwrap();
                    assert_eq!(best, first, "{what}");
                }
            }
        }
    }
}
