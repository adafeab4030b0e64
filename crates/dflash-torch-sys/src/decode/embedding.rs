//! Rows of an embedding as float32.

use tch::{Device, Kind, Tensor};

/// A table of token embeddings, float32 or bfloat16 on the CPU.
#[derive(Debug)]
pub struct Embedding {
    table_vh: Tensor,
    tokens: usize,
    width: usize,
}

impl Embedding {
    /// Reads from `table_vh` [V, H], contiguous.
    pub fn new(table_vh: &Tensor) -> Self {
        assert!(table_vh.device() == Device::Cpu && table_vh.is_contiguous());
        assert!(matches!(table_vh.kind(), Kind::Float | Kind::BFloat16));
        let size = table_vh.size();
        let (tokens, width) = (size[0] as usize, size[1] as usize);
        Self { table_vh: table_vh.shallow_clone(), tokens, width }
    }

    /// Writes the embeddings of `ids` to `x` [R, H].
    ///
    /// # Panics
    /// When an id is not in the table: a bug of the caller.
    pub fn rows(&self, ids: &[i64], x: &mut [f32]) {
        assert_eq!(x.len(), ids.len() * self.width, "a row for each token");
        let (elements, data) = (self.tokens * self.width, self.table_vh.data_ptr());
        let row = |id: i64| {
            assert!((0..self.tokens as i64).contains(&id), "token {id} of {}", self.tokens);
            id as usize * self.width..(id as usize + 1) * self.width
        };
        let out = x.chunks_exact_mut(self.width).zip(ids);
        match self.table_vh.kind() {
            Kind::Float => {
                // SAFETY: a contiguous float32 tensor that this struct holds has so many elements.
                let table = unsafe { std::slice::from_raw_parts(data.cast::<f32>(), elements) };
                out.for_each(|(out, &id)| out.copy_from_slice(&table[row(id)]));
            }
            _ => {
                // SAFETY: as above, of two bytes each: `new` takes float32 and bfloat16 alone.
                let table = unsafe { std::slice::from_raw_parts(data.cast::<u16>(), elements) };
                for (out, &id) in out {
                    let halves = out.iter_mut().zip(&table[row(id)]);
                    halves.for_each(|(out, &half)| *out = f32::from_bits(u32::from(half) << 16));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_those_of_the_table() {
        for kind in [Kind::Float, Kind::BFloat16] {
            let table =
                (Tensor::arange(15, (Kind::Float, Device::Cpu)).view([5, 3]) / 3).to_kind(kind);
            let ids = [4i64, 0, 4, 2];
            let mut x = [0.0; 12];
            Embedding::new(&table).rows(&ids, &mut x);
            let expected = table.index_select(0, &Tensor::from_slice(&ids)).to_kind(Kind::Float);
            assert_eq!(Tensor::from_slice(&x).view([4, 3]), expected, "{kind:?}");
        }
    }
}
