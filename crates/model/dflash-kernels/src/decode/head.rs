//! LM head for a few rows: logits, or only the argmax.

use std::cell::RefCell;
use std::ptr::null_mut;
use std::sync::Arc;

use tch::Tensor;

use super::MAX_ROWS;
use super::matrix::{Matrix, Products, Sums};
use super::scratch::Scratch;

/// The weight of an RMS norm, and its epsilon.
#[derive(Clone, Copy, Debug)]
pub struct RmsWeight<'a> {
    /// `[H]`.
    pub weight: &'a [f32],
    /// Added to the mean of the squares.
    pub eps: f64,
}

/// A packed LM head.
#[derive(Debug)]
pub struct Head {
    matrix: Arc<Matrix>,
    scratch: RefCell<Scratch>,
}

impl Head {
    /// Packs `weight_io` [H, V].
    pub fn new(weight_io: &Tensor, products: Products) -> Self {
        Self::of(Matrix::pack(weight_io, products).into())
    }

    /// Wraps a packed matrix, which may be shared.
    pub fn of(matrix: Arc<Matrix>) -> Self {
        Self { matrix, scratch: RefCell::default() }
    }

    /// The packed matrix.
    pub fn matrix(&self) -> &Matrix {
        &self.matrix
    }

    /// Vocabulary size V.
    pub fn outputs(&self) -> usize {
        self.matrix.outputs() as usize
    }

    /// Writes the logits [R, V] of `x` [R, H], after an optional norm.
    pub fn logits(&self, x: &[f32], norm: Option<RmsWeight<'_>>, logits: &mut [f32]) {
        let (rows, outputs) = (self.rows(x), self.outputs());
        assert_eq!(logits.len(), rows * outputs, "a logit for each row and token");
        let each = MAX_ROWS as usize;
        let parts = x.chunks(each * self.depth()).zip(logits.chunks_mut(each * outputs));
        parts.for_each(|(x, logits)| self.run(x, norm, logits.as_mut_ptr(), null_mut()));
    }

    /// Writes the argmax token of each row of `x` [R, H] to `best` `[R]`; ties go to the first.
    pub fn most_likely(&self, x: &[f32], norm: Option<RmsWeight<'_>>, best: &mut [i64]) {
        assert_eq!(best.len(), self.rows(x), "a token for each row");
        let each = MAX_ROWS as usize;
        let parts = x.chunks(each * self.depth()).zip(best.chunks_mut(each));
        parts.for_each(|(x, best)| self.run(x, norm, null_mut(), best.as_mut_ptr()));
    }

    fn depth(&self) -> usize {
        self.matrix.depth() as usize
    }

    fn rows(&self, x: &[f32]) -> usize {
        assert_eq!(x.len() % self.depth(), 0, "whole rows");
        x.len() / self.depth()
    }

    fn run(&self, x: &[f32], norm: Option<RmsWeight<'_>>, logits: *mut f32, best: *mut i64) {
        let to = Sums { logits, best, columns: self.matrix.outputs() };
        self.matrix.run(x, norm, to, &mut self.scratch.borrow_mut());
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
                    // Small integers: sums are exact in any order, and many logits are equal.
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

    #[test]
    fn threads_with_unequal_work_are_not_late() {
        // SAFETY: compares two numbers.
        let is_late = |waited, before| unsafe {
            super::super::raw::dflash_decode_is_late(waited, before) != 0
        };
        let ms = |ms: i64| ms * 1_000_000;
        // A pass over a large model, whose threads progress unevenly.
        assert!(!is_late(ms(5), ms(10)) && !is_late(ms(9), ms(9)));
        // A time slice lost in a pass of a small model.
        assert!(is_late(ms(4), ms(1)) && is_late(ms(1), 50_000));
    }
}
