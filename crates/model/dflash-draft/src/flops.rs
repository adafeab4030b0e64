//! Arithmetic of a packed row as plain numbers, without tensors.
//!
//! A product of [m, k] and [k, n] counts 2mnk. Only necessary work is counted: visible pairs in
//! attention, and the lm_head only for supervised slots; masked scores, recomputation, norms and
//! other elementwise work count nothing. The gradient of a product takes two products of the same
//! size, or one if its input needs no gradient (the context's features, and in the first layer the
//! slots, whose embeddings are frozen) or its weight needs none (the lm_head).

use crate::attention::{BlockPlan, Visibility, WindowRule};
use crate::draft::{CHECKED_HEAD, DraftConfig, LayerKind, head_config, visibility};

/// Sizes that determine a packed row's arithmetic. Fractions are for estimates.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RowWork {
    /// C: context rows visible to some block.
    pub context_rows: f64,
    /// N: slots of all blocks.
    pub slots: f64,
    /// Visible pairs of a slot and a position (context and own block) in a full layer.
    pub full_pairs: f64,
    /// Visible pairs in a sliding layer.
    pub sliding_pairs: f64,
    /// Slots whose logits are computed, i.e. those with a label.
    pub active_slots: f64,
    /// Rows of the draft's lm_head.
    pub head_rows: f64,
    /// Slots for which the target's logits are also computed.
    pub distribution_slots: f64,
}

/// Floating-point operations of one packed row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RowFlops {
    /// Forward pass.
    pub forward: f64,
    /// Backward pass.
    pub backward: f64,
}

impl RowFlops {
    /// Both passes.
    pub fn total(&self) -> f64 {
        self.forward + self.backward
    }
}

impl RowWork {
    /// Context, slots and visible pairs of a planned row; the objective's fields are 0.
    pub fn of_plan(config: &DraftConfig, plan: &BlockPlan) -> Self {
        let pairs = |kind: LayerKind| {
            if config.layers.contains(&kind) {
                visible_pairs(plan, &visibility(config, kind, WindowRule::Serving)) as f64
            } else {
                0.0
            }
        };
        Self {
            context_rows: plan.context_rows() as f64,
            slots: plan.slots() as f64,
            full_pairs: pairs(LayerKind::Full),
            sliding_pairs: pairs(LayerKind::Sliding),
            ..Self::default()
        }
    }

    /// Operations in a draft of `config`.
    pub fn flops(&self, config: &DraftConfig) -> RowFlops {
        let (h, i) = (config.hidden_size as f64, config.intermediate_size as f64);
        let q_width = (config.num_attention_heads * config.head_dim) as f64;
        let kv_width = 2.0 * config.kv_width() as f64;
        let layers = config.layers.len() as f64;
        let fusion = 2.0 * self.context_rows * config.aux_layers() as f64 * h * h;
        let slot_projection = 2.0 * self.slots * h * (q_width + kv_width);
        let context_projection = 2.0 * self.context_rows * h * kv_width;
        let output = 2.0 * self.slots * q_width * h;
        let mlp = 6.0 * self.slots * h * i;
        let pairs: f64 = config
            .layers
            .iter()
            .map(|kind| match kind {
                LayerKind::Full => self.full_pairs,
                LayerKind::Sliding => self.sliding_pairs,
            })
            .sum();
        // scores and their product with the values
        let attention = 4.0 * q_width * pairs;
        let head = 2.0 * self.active_slots * h * self.head_rows;
        let target_distribution = 2.0 * self.distribution_slots * h * self.head_rows;
        let stack = layers * (slot_projection + context_projection + output + mlp) + attention;
        let own = head_config(config).expect(CHECKED_HEAD).flops(self);
        RowFlops {
            forward: fusion + stack + head + target_distribution + own.forward,
            backward: fusion + 2.0 * stack - slot_projection + head + own.backward,
        }
    }
}

/// Visible pairs of a slot and a position, over all blocks of a plan.
pub(crate) fn visible_pairs(plan: &BlockPlan, visibility: &Visibility) -> usize {
    let block = plan.block_size();
    let own: usize = (0..block).map(|slot| visibility.own(slot, block).len()).sum();
    let context = |anchor: usize| -> usize {
        match visibility.window {
            None => block * anchor,
            Some(_) => (0..block).map(|slot| visibility.context(anchor, slot).len()).sum(),
        }
    };
    plan.anchor_positions().map(|anchor| own + context(anchor)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::plan_blocks;

    fn config(layer_types: &[&str]) -> DraftConfig {
        let config = serde_json::json!({
            "hidden_size": 4, "intermediate_size": 8, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
            "num_hidden_layers": layer_types.len(), "layer_types": layer_types,
            "sliding_window": 2, "block_size": 2, "vocab_size": 10, "max_position_embeddings": 64,
            "dflash_config": {"mask_token_id": 9, "target_layer_ids": [0]},
        });
        DraftConfig::parse(std::path::Path::new("config.json"), &config.to_string()).unwrap()
    }

    #[test]
    fn a_tiny_row_by_hand() {
        let config = config(&["full_attention"]);
        let plan = plan_blocks(&config, &[0, 5], &[1, 3], WindowRule::Serving);
        let work =
            RowWork { active_slots: 2.0, head_rows: 10.0, ..RowWork::of_plan(&config, &plan) };
        // Context before the last anchor: 3 rows. Two blocks of 2. Slots of the first block see 1
        // context position, those of the second 3, plus 2 in their block: 2 (1 + 2) + 2 (3 + 2) =
        // 16 pairs.
        assert_eq!((work.context_rows, work.slots, work.full_pairs), (3.0, 4.0, 16.0));
        let fusion = 2 * 3 * 4 * 4;
        let qkv = 2 * 4 * 4 * (4 + 2 + 2);
        let context_kv = 2 * 3 * 4 * (2 + 2);
        let output = 2 * 4 * 4 * 4;
        let mlp = 3 * 2 * 4 * 4 * 8;
        let attention = 2 * (2 * 16 * 4);
        let head = 2 * 2 * 4 * 10;
        let forward = fusion + qkv + context_kv + output + mlp + attention + head;
        assert_eq!(forward, 1760);
        // Once: the fusion and the first layer's slots (weights only), the head (input only).
        let backward = fusion + qkv + 2 * context_kv + 2 * output + 2 * mlp + 2 * attention + head;
        assert_eq!(backward, 3008);
        let flops = work.flops(&config);
        assert_eq!((flops.forward, flops.backward), (forward as f64, backward as f64));
        let target_distribution = RowWork { distribution_slots: 2.0, ..work };
        assert_eq!(target_distribution.flops(&config).total(), flops.total() + head as f64);
    }

    #[test]
    fn sliding_layers_count_their_window() {
        let config = config(&["full_attention", "sliding_attention"]);
        let plan = plan_blocks(&config, &[0, 3, 9], &[1, 7], WindowRule::Serving);
        let work = RowWork::of_plan(&config, &plan);
        // Full: anchors at 1 and 4 of their documents: 2 (1 + 2) + 2 (4 + 2).
        assert_eq!(work.full_pairs, 18.0);
        // Window 2, causal: slot 0 sees one position before it, slot 1 only the block: 1 + 3 each.
        assert_eq!(work.sliding_pairs, 8.0);
        let both = work.flops(&config).total();
        let wider = RowWork { sliding_pairs: 9.0, ..work };
        assert_eq!(wider.flops(&config).total() - both, 3.0 * 4.0 * 4.0);
    }
}
