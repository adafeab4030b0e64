//! Embedding rows as float32.

use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::matrix::Matrix;

/// Token embeddings on the CPU.
#[derive(Debug)]
pub enum Embedding {
    /// Contiguous table [V, H] in float32 or bfloat16.
    Table(Tensor),
    /// The output projection, if weights are tied.
    Shared(Arc<Matrix>),
}

impl Embedding {
    /// Writes the embeddings of `ids` to `x` [R, H].
    ///
    /// # Panics
    /// When an id is out of range: a bug of the caller.
    pub fn rows(&self, ids: &[i64], x: &mut [f32]) {
        match self {
            Self::Table(table_vh) => rows_of_table(table_vh, ids, x),
            Self::Shared(matrix) => matrix.rows(ids, x),
        }
    }
}

fn rows_of_table(table_vh: &Tensor, ids: &[i64], x: &mut [f32]) {
    assert!(table_vh.device() == Device::Cpu && table_vh.is_contiguous());
    let size = table_vh.size();
    let (tokens, width) = (size[0] as usize, size[1] as usize);
    assert_eq!(x.len(), ids.len() * width, "a row for each token");
    let (elements, data) = (tokens * width, table_vh.data_ptr());
    let row = |id: i64| {
        assert!((0..tokens as i64).contains(&id), "token {id} of {tokens}");
        id as usize * width..(id as usize + 1) * width
    };
    let out = x.chunks_exact_mut(width).zip(ids);
    match table_vh.kind() {
        Kind::Float => {
            // SAFETY: the borrowed tensor is contiguous float32 with this many elements.
            let table = unsafe { std::slice::from_raw_parts(data.cast::<f32>(), elements) };
            out.for_each(|(out, &id)| out.copy_from_slice(&table[row(id)]));
        }
        Kind::BFloat16 => {
            // SAFETY: as above, with two bytes per element.
            let table = unsafe { std::slice::from_raw_parts(data.cast::<u16>(), elements) };
            for (out, &id) in out {
                let halves = out.iter_mut().zip(&table[row(id)]);
                halves.for_each(|(out, &half)| *out = f32::from_bits(u32::from(half) << 16));
            }
        }
        kind => panic!("a table of embeddings in {kind:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::decode::Products;

    #[test]
    fn rows_are_those_of_the_table() {
        for kind in [Kind::Float, Kind::BFloat16] {
            let table =
                (Tensor::arange(15, (Kind::Float, Device::Cpu)).view([5, 3]) / 3).to_kind(kind);
            let ids = [4i64, 0, 4, 2];
            let mut x = [0.0; 12];
            let products = Products::of([&table]);
            let shared = Embedding::Shared(Matrix::pack(&table.tr(), products).into());
            let expected = table.index_select(0, &Tensor::from_slice(&ids)).to_kind(Kind::Float);
            for embedding in [Embedding::Table(table), shared] {
                embedding.rows(&ids, &mut x);
                assert_eq!(Tensor::from_slice(&x).view([4, 3]), expected, "{embedding:?}");
            }
        }
    }
}
