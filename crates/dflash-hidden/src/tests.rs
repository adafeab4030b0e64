//! What the tests of several modules share.

use bytes::Bytes;
use half::bf16;

use crate::{Dtype, HiddenStates};

/// Rows whose every value tells its layer, row and column; all exact in bf16.
pub(crate) fn sample(layer_ids: &[u32], tokens: usize, hidden: usize) -> HiddenStates {
    let layer = |&id: &u32| -> Bytes {
        let value = |index: usize| bf16::from_f32(1.0 + id as f32 + (index % 64) as f32 / 64.0);
        (0..tokens * hidden).flat_map(|index| value(index).to_le_bytes()).collect::<Vec<_>>().into()
    };
    let layers = layer_ids.iter().map(layer).collect();
    HiddenStates::new(layer_ids.to_vec(), tokens, hidden, Dtype::Bf16, layers).unwrap()
}

/// Little-endian float32 values.
pub(crate) fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect()
}
