//! Arithmetic of a target as plain numbers, without tensors.
//!
//! A product of [m, k] and [k, n] counts 2mnk. Only necessary work is counted: visible pairs in
//! attention, and no norms or other elementwise operations.

use dflash_tensor::attention_span::AttentionSpan;

use crate::TargetConfig;
use crate::parallel::Shard;

impl TargetConfig {
    /// Stored matrix elements of the first `layers` layers, including per-token inputs that the
    /// family computes for all layers.
    pub fn stored_elements(&self, layers: usize) -> f64 {
        let architecture = self.family.architecture();
        let of_layer = |layer| architecture.stored_elements(self, layer, &Shard::WHOLE);
        architecture.prepared_elements(self) + (0..layers).map(of_layer).sum::<f64>()
    }

    /// Peak activation elements per token in a layer.
    pub fn widest(&self) -> f64 {
        self.family.architecture().widest(self)
    }

    /// Operations of the first `layers` layers on documents of these `lengths`, each of which
    /// attends only to itself.
    pub fn prefill_flops(&self, layers: usize, lengths: impl Iterator<Item = usize>) -> f64 {
        let PrefillFlops { products, attention } = self.prefill_work(layers, lengths);
        products + attention
    }

    /// The same, split into matrix products and attention.
    pub fn prefill_work(
        &self,
        layers: usize,
        lengths: impl Iterator<Item = usize>,
    ) -> PrefillFlops {
        let architecture = self.family.architecture();
        let mut work = PrefillFlops::default();
        for length in lengths {
            for layer in 0..layers.min(self.num_hidden_layers) {
                let elements = architecture.layer_elements(self, layer);
                work.products += 2.0 * length as f64 * elements;
                let pairs = causal_pairs(length, architecture.attention_span(layer));
                work.attention += architecture.pair_flops(layer) * pairs;
            }
        }
        work
    }
}

/// Operations of a target's pass over documents.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PrefillFlops {
    /// Matrix products.
    pub products: f64,
    /// Attention: scores, and their product with the values.
    pub attention: f64,
}

/// Number of visible query-key pairs.
fn causal_pairs(length: usize, attention_span: AttentionSpan) -> f64 {
    let all = |length: f64| length * (length + 1.0) / 2.0;
    let length = length as f64;
    match attention_span {
        AttentionSpan::All => all(length),
        AttentionSpan::Window(window) => {
            let seen = length.min(window as f64);
            all(seen) + (length - seen) * seen
        }
        AttentionSpan::Chunk(chunk) => {
            let (chunk, whole) = (chunk as f64, (length / chunk as f64).floor());
            whole * all(chunk) + all(length - whole * chunk)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefill_by_hand() {
        assert_eq!(
            [
                (5, AttentionSpan::All),
                (5, AttentionSpan::Window(2)),
                (2, AttentionSpan::Window(9)),
                (5, AttentionSpan::Chunk(2))
            ]
            .map(|(n, attention_span)| causal_pairs(n, attention_span)),
            [15.0, 9.0, 3.0, 7.0]
        );
        let config = TargetConfig::qwen3(8, 3, 64);
        // q has 4 heads of 2, k and v 2 each; then o; then three matrices of 8 by 24.
        let layer = (8 * (8 + 4 + 4) + 8 * 8 + 3 * 8 * 24) as f64;
        assert_eq!(config.stored_elements(2), 2.0 * layer);
        let config = config.with_dense(|dense| dense.windows[1] = Some(2));
        let products = 2.0 * 7.0 * layer * 2.0;
        // Documents of 5 and 2 tokens: all pairs in the first layer, a window of 2 in the second.
        let pairs = (15.0 + 3.0) + (9.0 + 3.0);
        let flops = config.prefill_flops(2, [5, 2].into_iter());
        assert_eq!(flops, products + 4.0 * 8.0 * pairs);
    }
}
