//! The record: one prompt's rows for each captured layer, shared and never copied.

use bytes::Bytes;
use half::{bf16, f16};

pub use dflash_settings::WireDtype as Dtype;

use crate::error::Error;

/// The hidden states of one prompt.
///
/// Layers ascend by id; each is row-major `[tokens, hidden_size]`. Clones share the bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct HiddenStates {
    /// Captured layers, ascending.
    pub layer_ids: Vec<u32>,
    /// Rows per layer.
    pub tokens: usize,
    /// Elements per row.
    pub hidden_size: usize,
    /// Element type.
    pub dtype: Dtype,
    layers: Vec<Bytes>,
}

impl HiddenStates {
    /// Puts a record together; `layers` go with `layer_ids` one to one.
    ///
    /// # Errors
    /// [`Error::LayerBytes`] when a layer is not `tokens * hidden_size` elements long,
    /// [`Error::Shape`] when the ids do not ascend or do not go with the layers.
    pub fn new(
        layer_ids: Vec<u32>,
        tokens: usize,
        hidden_size: usize,
        dtype: Dtype,
        layers: Vec<Bytes>,
    ) -> Result<Self, Error> {
        if layer_ids.len() != layers.len() || !layer_ids.is_sorted_by(|a, b| a < b) {
            return Err(Error::Shape {
                origin: "the record".into(),
                expected: format!("{} ascending layer ids", layers.len()),
                got: format!("{layer_ids:?}"),
            });
        }
        let expected = tokens * hidden_size * dtype.size();
        for (&layer, bytes) in layer_ids.iter().zip(&layers) {
            if bytes.len() != expected {
                return Err(Error::LayerBytes { layer, expected, got: bytes.len(), dtype });
            }
        }
        Ok(Self { layer_ids, tokens, hidden_size, dtype, layers })
    }

    /// The rows of one layer, row-major, little-endian.
    pub fn layer(&self, id: u32) -> Option<&[u8]> {
        self.layer_bytes(id).map(AsRef::as_ref)
    }

    /// The same as a shared handle.
    pub fn layer_bytes(&self, id: u32) -> Option<&Bytes> {
        let index = self.layer_ids.binary_search(&id).ok()?;
        self.layers.get(index)
    }

    /// Bytes of all layers.
    pub fn byte_len(&self) -> usize {
        self.layers.iter().map(Bytes::len).sum()
    }

    /// The record restricted to `layer_ids` (ascending); `None` when one is absent.
    pub fn select(&self, layer_ids: &[u32]) -> Option<Self> {
        let layers = layer_ids
            .iter()
            .map(|&id| self.layer_bytes(id).cloned())
            .collect::<Option<Vec<_>>>()?;
        Some(Self { layer_ids: layer_ids.to_vec(), layers, ..*self })
    }

    /// The first `tokens` rows. Targets are causal, so a prefix's states are the states' prefix.
    #[must_use]
    pub fn prefix(mut self, tokens: usize) -> Self {
        let tokens = tokens.min(self.tokens);
        let bytes = tokens * self.row_bytes();
        for layer in &mut self.layers {
            layer.truncate(bytes);
        }
        self.tokens = tokens;
        self
    }

    /// Bytes of one row of one layer.
    pub fn row_bytes(&self) -> usize {
        self.hidden_size * self.dtype.size()
    }

    /// Refuses rows that cannot come from a target: all zero, NaN, infinite.
    ///
    /// One pass over the bytes. Layer 0 may hold zero rows, because checkpoints zero the
    /// embedding of padding and reserved tokens.
    ///
    /// # Errors
    /// [`Error::ZeroRow`] or [`Error::NonFinite`], naming `origin`.
    pub fn check_rows(&self, origin: &str) -> Result<(), Error> {
        for (&layer, bytes) in self.layer_ids.iter().zip(&self.layers) {
            for (row, row_bytes) in bytes.chunks_exact(self.row_bytes().max(1)).enumerate() {
                let found = match self.dtype {
                    Dtype::Bf16 => scan_bf16(row_bytes),
                    Dtype::F32 => scan_f32(row_bytes),
                };
                let origin = || origin.to_owned();
                if !found.finite {
                    return Err(Error::NonFinite { origin: origin(), layer, row });
                }
                if found.zero && layer > 0 {
                    return Err(Error::ZeroRow { origin: origin(), layer, row });
                }
            }
        }
        Ok(())
    }
}

/// What one pass over a row finds.
struct RowScan {
    zero: bool,
    finite: bool,
}

/// Branch-free over the row, so that the compiler vectorises it: gigabytes per second.
fn scan_bf16(row: &[u8]) -> RowScan {
    const EXPONENT: u16 = 0x7f80;
    let (mut seen, mut special) = (0u16, 0u16);
    for pair in row.chunks_exact(2) {
        let bits = u16::from_le_bytes([pair[0], pair[1]]);
        seen |= bits & 0x7fff;
        special |= u16::from(bits & EXPONENT == EXPONENT);
    }
    RowScan { zero: seen == 0, finite: special == 0 }
}

/// As [`scan_bf16`], for float32.
fn scan_f32(row: &[u8]) -> RowScan {
    const EXPONENT: u32 = 0x7f80_0000;
    let (mut seen, mut special) = (0u32, 0u32);
    for quad in row.chunks_exact(4) {
        let bits = u32::from_le_bytes([quad[0], quad[1], quad[2], quad[3]]);
        seen |= bits & 0x7fff_ffff;
        special |= u32::from(bits & EXPONENT == EXPONENT);
    }
    RowScan { zero: seen == 0, finite: special == 0 }
}

/// float16 rows as float32, which holds them exactly: a record has no float16.
pub(crate) fn f16_to_f32(bytes: &[u8]) -> Vec<u8> {
    bytes
        .chunks_exact(2)
        .flat_map(|pair| f32::from(f16::from_le_bytes([pair[0], pair[1]])).to_le_bytes())
        .collect()
}

/// bf16 values as float32.
pub(crate) fn bf16_to_f32(bytes: &[u8]) -> Vec<f32> {
    let value = |pair: &[u8]| bf16::from_le_bytes([pair[0], pair[1]]).to_f32();
    bytes.chunks_exact(2).map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{f32s, sample};

    fn with_value(dtype: Dtype, layer: u32, value: f32) -> Result<(), Error> {
        let element = |value: f32| match dtype {
            Dtype::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
            Dtype::F32 => value.to_le_bytes().to_vec(),
        };
        // Row 0 is ordinary, row 1 holds `value` and a zero.
        let bytes = [element(1.0), element(2.0), element(value), element(0.0)].concat();
        HiddenStates::new(vec![layer], 2, 2, dtype, vec![bytes.into()])?.check_rows("here")
    }

    #[test]
    fn bad_rows_are_named() {
        for dtype in [Dtype::Bf16, Dtype::F32] {
            assert!(with_value(dtype, 3, -1e-30).is_ok());
            assert!(matches!(
                with_value(dtype, 3, 0.0),
                Err(Error::ZeroRow { layer: 3, row: 1, .. })
            ));
            assert!(matches!(with_value(dtype, 3, -0.0), Err(Error::ZeroRow { .. })));
            assert!(with_value(dtype, 0, 0.0).is_ok(), "embeddings may be zero");
            for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let found = with_value(dtype, 0, value);
                assert!(matches!(found, Err(Error::NonFinite { row: 1, .. })), "{dtype} {value}");
            }
        }
    }

    #[test]
    fn records_refuse_bytes_of_another_shape() {
        let make = |ids: &[u32], bytes: usize| {
            let layers = ids.iter().map(|_| Bytes::from(vec![0; bytes])).collect();
            HiddenStates::new(ids.to_vec(), 2, 3, Dtype::Bf16, layers)
        };
        assert!(make(&[1, 4], 12).is_ok());
        assert!(matches!(make(&[1], 14), Err(Error::LayerBytes { expected: 12, got: 14, .. })));
        assert!(matches!(make(&[4, 1], 12), Err(Error::Shape { .. })));
        assert!(matches!(make(&[4, 4], 12), Err(Error::Shape { .. })));
    }

    #[test]
    fn selections_and_prefixes_share_the_rows() {
        let states = sample(&[0, 2, 5], 4, 3);
        let chosen = states.select(&[2, 5]).unwrap().prefix(2);
        assert_eq!(chosen.layer(2).unwrap(), &states.layer(2).unwrap()[..12]);
        assert_eq!(chosen.layer(2).unwrap().as_ptr(), states.layer(2).unwrap().as_ptr());
        assert_eq!((chosen.layer(0), chosen.tokens, chosen.byte_len()), (None, 2, 24));
        assert!(states.select(&[2, 3]).is_none());
    }

    #[test]
    fn float16_becomes_float32_exactly() {
        let bytes: Vec<u8> =
            [0.1f32, -2.5, 6e-8].iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect();
        assert_eq!(
            f32s(&f16_to_f32(&bytes)),
            [0.1f32, -2.5, 6e-8].map(|v| f16::from_f32(v).to_f32())
        );
    }
}
