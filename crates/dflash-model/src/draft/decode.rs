//! The decoding pass: one block at a time over cached keys and values of the accepted context.

mod blocks;

use tch::Tensor;

use super::{Draft, LayerKind, LayerViews};
use crate::fused;
use crate::ops::{RotaryTables, attention};

pub use blocks::ContextPart;

/// Keys and values of the context of every layer, with room for one block behind them.
#[derive(Debug)]
pub struct ContextCache {
    /// Per layer keys and values, [kv heads, capacity + B, D].
    layers: Vec<(Tensor, Tensor)>,
    /// Rotary tables of all positions there is room for.
    rope: RotaryTables,
    capacity: i64,
    length: i64,
}

impl ContextCache {
    /// Context positions held.
    pub fn len(&self) -> i64 {
        self.length
    }

    /// Whether no context is held.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Forgets all positions from `length` on.
    pub fn truncate(&mut self, length: i64) {
        self.length = self.length.min(length);
    }
}

/// Copies of the weights as [in, out]: for the few rows of a block the matrix product is faster
/// that way round than with the [out, in] of the checkpoint.
#[derive(Debug)]
pub(super) struct DecodeWeights {
    layers: Vec<DecodeLayer>,
    /// The context projections of all layers side by side, [H, layers * 2 * kv width].
    context_kv: Tensor,
}

#[derive(Debug)]
struct DecodeLayer {
    qkv: Tensor,
    o: Tensor,
    gate_up: Tensor,
    down: Tensor,
}

impl DecodeWeights {
    fn new(layers: &[LayerViews]) -> Self {
        let turned = |weight: &Tensor| weight.tr().contiguous();
        let context: Vec<Tensor> = layers.iter().map(|layer| layer.kv.tr()).collect();
        let layers = layers
            .iter()
            .map(|layer| DecodeLayer {
                qkv: turned(&layer.qkv),
                o: turned(&layer.o),
                gate_up: turned(&layer.gate_up),
                down: turned(&layer.down),
            })
            .collect();
        Self { layers, context_kv: Tensor::cat(&context, 1) }
    }
}

impl Draft {
    /// Made at the first block; the weights must not change after it.
    fn decode_weights(&self) -> &DecodeWeights {
        self.decode.get_or_init(|| DecodeWeights::new(&self.views.layers))
    }

    /// A cache for up to `capacity` context positions.
    pub fn new_cache(&self, capacity: i64) -> ContextCache {
        let c = &self.config;
        let rows = capacity + c.block_size as i64;
        let shape = [c.num_key_value_heads, rows, c.head_dim];
        let empty = || Tensor::zeros(shape, (self.flat.kind(), self.flat.device()));
        let layers = c.layers.iter().map(|_| (empty(), empty())).collect();
        let positions: Vec<i64> = (0..rows).collect();
        ContextCache { layers, rope: self.tables(&positions), capacity, length: 0 }
    }

    /// Appends the features of accepted tokens: `features_tk` [T, K*H] of the positions that
    /// follow the cache's. The first call passes position 0 of the prompt.
    ///
    /// # Panics
    /// When the cache is full or `first_position` is not the cache's length: bugs of the caller.
    pub fn extend_context(
        &self,
        cache: &mut ContextCache,
        features_tk: &Tensor,
        first_position: i64,
    ) {
        let rows = features_tk.size()[0];
        assert_eq!(first_position, cache.length, "context positions must be contiguous");
        assert!(cache.length + rows <= cache.capacity, "the context cache is full");
        let kv_all = self.context(features_tk).matmul(&self.decode_weights().context_kv);
        let rope = cache.rope.narrow(first_position, rows);
        let width = 2 * self.config.kv_width();
        for (index, (layer, (k, v))) in self.views.layers.iter().zip(&cache.layers).enumerate() {
            let kv =
                self.project_context(layer, &kv_all.narrow(1, index as i64 * width, width), &rope);
            k.narrow(1, cache.length, rows).copy_(&kv.k_jtd);
            v.narrow(1, cache.length, rows).copy_(&kv.v_jtd);
        }
        cache.length += rows;
    }

    /// Runs one block: `block_bh` [B', H] are the embeddings of [bonus token, MASK, ...], the
    /// first at `anchor_position`; up to the block size of them. Returns `norm(x)` [B', H].
    ///
    /// The cache is not changed; its spare rows serve as scratch space.
    pub fn forward_block(
        &self,
        cache: &ContextCache,
        block_bh: &Tensor,
        anchor_position: i64,
    ) -> Tensor {
        let slots = block_bh.size()[0];
        let rope = cache.rope.narrow(anchor_position, slots);
        let mut x = block_bh.shallow_clone();
        for (index, layer) in self.views.layers.iter().enumerate() {
            let mask = self.decode_mask(index, cache.length, slots);
            x = self.decode_layer(layer, (cache, index), &x, (&rope, mask.as_ref()));
        }
        self.norm(&self.views.norm).of(&x)
    }

    fn decode_layer(
        &self,
        layer: &LayerViews,
        (cache, index): (&ContextCache, usize),
        x: &Tensor,
        (rope, mask): (&RotaryTables, Option<&Tensor>),
    ) -> Tensor {
        let slots = x.size()[0];
        let weights = &self.decode_weights().layers[index];
        let qkv = self.norm(&layer.input_norm).of(x).matmul(&weights.qkv);
        let (q_jngd, own) = self.project_slots(layer, &qkv, rope);
        let (k, v) = &cache.layers[index];
        k.narrow(1, cache.length, slots).copy_(&own.k_jtd);
        v.narrow(1, cache.length, slots).copy_(&own.v_jtd);
        let total = cache.length + slots;
        let folded = q_jngd.flatten(1, 2).unsqueeze(0);
        let seen = |x: &Tensor| x.narrow(1, 0, total).unsqueeze(0);
        let out = attention(&folded, &seen(k), &seen(v), (mask, false), self.kernels);
        let out = self.ungroup_queries(&out.squeeze_dim(0).view(q_jngd.size().as_slice()));
        let middle = x.addmm(&out, &weights.o);
        let gate_up = self.norm(&layer.post_norm).of(&middle).matmul(&weights.gate_up);
        middle.addmm(&fused::swiglu(&gate_up, self.kernels), &weights.down)
    }

    /// Additive mask of a sliding layer [slots * queries per kv head, length + slots]; full layers see all.
    fn decode_mask(&self, index: usize, length: i64, slots: i64) -> Option<Tensor> {
        let window = match (self.config.layers[index], self.config.sliding_window) {
            (LayerKind::Sliding, Some(window)) => window as i64,
            _ => return None,
        };
        let group = self.config.queries_per_kv();
        let mut mask = vec![f32::NEG_INFINITY; (slots * group * (length + slots)) as usize];
        for (row, keys) in mask.chunks_mut((length + slots) as usize).enumerate() {
            let position = length + row as i64 / group;
            keys[(position + 1 - window).max(0) as usize..=position as usize].fill(0.0);
        }
        let mask = Tensor::from_slice(&mask).view([slots * group, length + slots]);
        Some(mask.to_device(self.device()).to_kind(self.flat.kind()))
    }
}
