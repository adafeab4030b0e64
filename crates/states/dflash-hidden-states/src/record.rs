//! The record: one prompt's rows for each selected layer, shared and never copied.

use std::ops::Range;

use bytes::Bytes;
use half::{bf16, f16};

pub use dflash_settings::WireDtype as Dtype;

use crate::error::Error;

/// The hidden states of one prompt.
///
/// Layers ascend by id; each is row-major `[tokens, hidden_size]`. Clones share the bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct HiddenStates {
    /// Layer ids, ascending.
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
    /// Builds a record; `layers` correspond to `layer_ids` one to one.
    ///
    /// # Errors
    /// [`Error::LayerBytes`] if a layer is not `tokens * hidden_size` elements long,
    /// [`Error::Shape`] if the ids do not ascend or do not match the layers.
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

    /// The record restricted to `layer_ids` (ascending); `None` if one is absent.
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

    /// Writes `rows` of layer `id` in `dtype` to `out`, a row every `stride` bytes; false if the
    /// layer is absent. Narrowing rounds to the nearest, ties to even.
    ///
    /// # Panics
    /// If rows do not exist, or `out` is too short.
    #[must_use]
    pub fn write_rows(
        &self,
        id: u32,
        rows: Range<usize>,
        dtype: Dtype,
        out: &mut [u8],
        stride: usize,
    ) -> bool {
        let Some(layer) = self.layer(id) else { return false };
        let (width, written) = (self.row_bytes(), self.hidden_size * dtype.size());
        let write = match (self.dtype, dtype) {
            (Dtype::Bf16, Dtype::F32) => widen,
            (Dtype::F32, Dtype::Bf16) => narrow,
            _ => <[u8]>::copy_from_slice,
        };
        for (index, row) in rows.enumerate() {
            let place = index * stride;
            write(&mut out[place..place + written], &layer[row * width..(row + 1) * width]);
        }
        true
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

/// The result of one pass over a row.
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

/// bf16 values as float32, which holds them exactly.
fn widen(out: &mut [u8], row: &[u8]) {
    for (value, half) in out.chunks_exact_mut(4).zip(row.chunks_exact(2)) {
        value.copy_from_slice(&[0, 0, half[0], half[1]]);
    }
}

/// float32 values as the nearest bf16.
fn narrow(out: &mut [u8], row: &[u8]) {
    for (half, value) in out.chunks_exact_mut(2).zip(row.chunks_exact(4)) {
        let value = f32::from_le_bytes([value[0], value[1], value[2], value[3]]);
        half.copy_from_slice(&bf16::from_f32(value).to_le_bytes());
    }
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
    fn rows_are_written_where_and_as_they_are_wanted() {
        let states = sample(&[2, 5], 4, 3);
        let layer = bf16_to_f32(states.layer(5).unwrap());
        let mut out = vec![0xee; 3 * 20];
        assert!(states.write_rows(5, 1..4, Dtype::F32, &mut out, 20));
        for (row, written) in out.chunks(20).enumerate() {
            assert_eq!(f32s(&written[..12]), layer[3 * (row + 1)..3 * (row + 2)]);
            assert_eq!(written[12..], [0xee; 8], "between the rows nothing is touched");
        }
        assert!(!states.write_rows(3, 0..1, Dtype::F32, &mut out, 20));
        let mut as_they_are = vec![0; 24];
        assert!(states.write_rows(5, 0..4, Dtype::Bf16, &mut as_they_are, 6));
        assert_eq!(as_they_are, states.layer(5).unwrap());
    }

    #[test]
    fn narrowed_rows_are_rounded_to_the_nearest_and_ties_to_even() {
        // Just below, at and just above the middle of two neighbours; a tie that goes down.
        let values = [0x3f80_7fffu32, 0x3f81_8000, 0x3f80_8001, 0x3f80_8000].map(f32::from_bits);
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let states = HiddenStates::new(vec![1], 2, 2, Dtype::F32, vec![bytes.into()]).unwrap();
        let mut out = vec![0; 8];
        assert!(states.write_rows(1, 0..2, Dtype::Bf16, &mut out, 4));
        assert_eq!(out, [0x3f80u16, 0x3f82, 0x3f81, 0x3f80].map(u16::to_le_bytes).concat());
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
