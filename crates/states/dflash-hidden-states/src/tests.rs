//! Helpers for the tests of several modules.

use bytes::Bytes;
use dflash_test_support::{ChaCha8Rng, Rng};
use half::bf16;

use crate::{Dtype, HiddenStates};

/// Rows in which every value encodes its layer, row and column; all exact in bf16.
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

/// A copy with one to three kinds of damage: flipped bits, other bytes, pieces missing, doubled or
/// zeroed.
pub(crate) fn damaged(bytes: &[u8], random: &mut ChaCha8Rng) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..random.random_range(1..=3) {
        if bytes.is_empty() {
            return bytes;
        }
        let at = random.random_range(0..bytes.len());
        let end = (at + random.random_range(1..64)).min(bytes.len());
        match random.random_range(0..8) {
            0..3 => bytes[at] ^= 1 << random.random_range(0..8),
            3 => bytes[at] = random.random(),
            4 => bytes.truncate(at),
            5 => bytes[at..end].fill(0),
            6 => drop(bytes.drain(at..end)),
            _ => {
                let piece = bytes[at..end].to_vec();
                bytes.splice(at..at, piece);
            }
        }
    }
    bytes
}
