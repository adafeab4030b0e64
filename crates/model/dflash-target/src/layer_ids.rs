//! Numbering of the hidden states that condition the draft.
//!
//! Id 0 is the embedding output, id k the residual stream after k decoder layers, id n (the number
//! of layers) the state before the final norm. Published checkpoints' `target_layer_ids` count
//! layers from 0 and are one less.

use dflash_tensor::{Error, Result};

/// Checks that `ids` are strictly ascending and exist in a target of `num_layers` layers.
///
/// # Errors
/// [`Error::LayerId`] for the first id out of range; [`Error::LayerIdOrder`] for an empty, unsorted
/// or repeating list.
pub fn check_layer_ids(ids: &[u32], num_layers: usize) -> Result<()> {
    if let Some(&id) = ids.iter().find(|&&id| id as usize > num_layers) {
        return Err(Error::LayerId { id, layers: num_layers });
    }
    if ids.is_empty() || !ids.is_sorted_by(|a, b| a < b) {
        return Err(Error::LayerIdOrder { ids: ids.to_vec() });
    }
    Ok(())
}

/// The published choice of `aux_layers` layers for a target of `num_layers`: evenly spaced from the
/// second layer to the third from last, or the middle one for a single auxiliary layer.
///
/// A target with too few layers for distinct ids gets fewer.
pub fn default_layer_ids(num_layers: usize, aux_layers: usize) -> Vec<u32> {
    if aux_layers == 1 {
        return vec![num_layers as u32 / 2 + 1];
    }
    let last = aux_layers.saturating_sub(1) as f64;
    let span = num_layers as f64 - 4.0;
    let mut ids: Vec<u32> = (0..aux_layers)
        .map(|aux_layer| (1.0 + aux_layer as f64 * span / last).round_ties_even())
        .map(|id| (id.max(0.0) as u32 + 1).min(num_layers as u32))
        .collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_the_published_ones() {
        let check = |layers, aux_layers, published: &[u32]| {
            let ours: Vec<u32> = published.iter().map(|id| id + 1).collect();
            assert_eq!(default_layer_ids(layers, aux_layers), ours, "({layers}, {aux_layers})");
        };
        check(36, 5, &[1, 9, 17, 25, 33]);
        check(28, 5, &[1, 7, 13, 19, 25]);
        check(32, 5, &[1, 8, 15, 22, 29]);
        check(64, 6, &[1, 13, 25, 37, 49, 61]);
        check(8, 4, &[1, 2, 4, 5]);
        check(8, 1, &[4]);
    }

    #[test]
    fn defaults_of_shallow_targets_are_valid_ids() {
        for layers in 1..12 {
            for aux_layers in 1..6 {
                let ids = default_layer_ids(layers, aux_layers);
                assert!(check_layer_ids(&ids, layers).is_ok(), "({layers}, {aux_layers}): {ids:?}");
            }
        }
    }

    #[test]
    fn a_bad_list_is_named() {
        let message = |ids: &[u32]| check_layer_ids(ids, 8).unwrap_err().to_string();
        assert!(check_layer_ids(&[0, 3, 8], 8).is_ok());
        assert!(
            message(&[2, 9]).starts_with("target layer id 9 is out of range: the target has 8")
        );
        assert!(message(&[3, 2]).contains("[3, 2] must be ascending"));
        assert!(message(&[2, 2]).contains("without repetition"));
        assert!(message(&[]).contains("[]"));
    }
}
