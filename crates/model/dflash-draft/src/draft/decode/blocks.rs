//! One pass over the blocks of several sequences, each with its own context.
//!
//! Products run over the slots of all blocks; attention is computed per block. Shapes as in
//! [`super`]; `n` counts the concatenated slots of all blocks.

use dflash_kernels::decode::{Outputs, Sequence, floats, floats_mut};
use dflash_tensor::ops::RotaryTables;
use tch::{Tensor, no_grad};

use super::{ContextCache, Draft, PackedDecoder, Shared, float_copy, float_rows};
use crate::attention::KeyValue;
use crate::draft::plus;

/// A sequence's context and its number of rows in the pass.
#[derive(Debug)]
pub struct ContextPart<'a> {
    /// The context to extend.
    pub cache: &'a mut ContextCache,
    /// New context positions, at least one.
    pub rows: usize,
}

impl ContextCache {
    /// Size in bytes: keys and values with spare capacity and padding, and rotary tables.
    pub fn bytes(&self) -> usize {
        let of = |x: &Tensor| x.numel() * x.kind().elt_size_in_bytes();
        let rows = match &self.packed_cache {
            // The layers are views of the packed memory, which is larger than its rows.
            Some(packed) => packed.bytes(),
            None => self.layers.iter().map(|(k, v)| of(k) + of(v)).sum(),
        };
        let tensors = self.layers.len() * if self.packed_cache.is_some() { 4 } else { 2 } + 2;
        rows + of(&self.rope.cos_td) + of(&self.rope.sin_td) + dflash_tensor::TENSOR_BYTES * tensors
    }

    /// Capacity in context positions.
    pub fn capacity(&self) -> i64 {
        self.capacity
    }

    /// Writes `rows` of `own` from `start` on after a layer's context.
    pub(super) fn write(&self, layer: usize, own: &KeyValue, start: i64, rows: i64) {
        let (k, v) = &self.layers[layer];
        k.narrow(1, self.length, rows).copy_(&own.k_jtd.narrow(1, start, rows));
        v.narrow(1, self.length, rows).copy_(&own.v_jtd.narrow(1, start, rows));
    }
}

impl Draft {
    /// A cache with capacity for `capacity` positions that holds the first `length` of `cache`.
    ///
    /// # Panics
    /// If `cache` holds fewer, or they do not fit.
    pub fn copy_cache(&self, cache: &ContextCache, length: i64, capacity: i64) -> ContextCache {
        assert!(length <= cache.length && length <= capacity, "{length} positions are not there");
        let mut copy = self.new_cache(capacity);
        no_grad(|| {
            for (own, other) in copy.layers.iter().zip(&cache.layers) {
                own.0.narrow(1, 0, length).copy_(&other.0.narrow(1, 0, length));
                own.1.narrow(1, 0, length).copy_(&other.1.narrow(1, 0, length));
            }
        });
        copy.length = length;
        copy
    }

    /// Appends the features of accepted tokens to each context: `features_tk` [T, K*H] concatenates
    /// the rows of the contexts in order.
    ///
    /// # Panics
    /// If a cache is full: a bug of the caller.
    pub fn extend_contexts(&self, features_tk: &Tensor, parts: &mut [ContextPart<'_>]) {
        if let [ContextPart { cache, .. }] = parts {
            let first = cache.length;
            return self.extend_context(cache, features_tk, first);
        }
        if let Some(few) = self.packed_decoder() {
            return self.extend_groups(few, features_tk, parts);
        }
        let kv_all = self.context(features_tk).matmul(&self.decode_weights().context_kv);
        let spans = parts.iter().map(|part| (&*part.cache, part.cache.length, part.rows as i64));
        let rope = self.tables_of(spans);
        let width = 2 * self.config.kv_width();
        for (index, layer) in self.views.layers.iter().enumerate() {
            let bias = layer.biases.as_ref().map(|bias| &bias.kv);
            let kv = plus(kv_all.narrow(1, index as i64 * width, width), bias);
            let kv = self.project_context(layer, &kv, &rope);
            let mut start = 0;
            for ContextPart { cache, rows } in &*parts {
                let rows = *rows as i64;
                assert!(cache.length + rows <= cache.capacity, "the context cache is full");
                cache.write(index, &kv, start, rows);
                start += rows;
            }
        }
        parts.iter_mut().for_each(|part| part.cache.length += part.rows as i64);
    }

    /// Runs one block after each context: `blocks_nh` [N, H] concatenates the embeddings of [bonus
    /// token, MASK, ...] of each, all with the same number of slots. Returns `norm(x)` [N, H].
    ///
    /// The caches are not modified; their spare rows serve as scratch space.
    pub fn forward_blocks(&self, caches: &[&ContextCache], blocks_nh: &Tensor) -> Tensor {
        if let [cache] = caches {
            return self.forward_block(cache, blocks_nh, cache.length);
        }
        let slots = blocks_nh.size()[0] / caches.len() as i64;
        if let Some(few) =
            self.packed_decoder().filter(|_| slots as usize <= PackedDecoder::MAX_ROWS)
        {
            return few.forward_groups(caches, blocks_nh).to_kind(self.flat.kind());
        }
        let rope = self.tables_of(caches.iter().map(|cache| (*cache, cache.length, slots)));
        let mut x = blocks_nh.shallow_clone();
        let mut shared: Vec<Shared> = caches.iter().map(|_| Shared::default()).collect();
        for index in 0..self.views.layers.len() {
            x = self.blocks_layer(index, caches, &x, &rope, &mut shared);
        }
        self.norm(&self.views.norm).of(&x)
    }

    /// [`Self::extend_contexts`] with packed few-row passes: contexts whose rows are few together
    /// share a pass, one with more gets its own.
    fn extend_groups(
        &self,
        few: &PackedDecoder,
        features_tk: &Tensor,
        parts: &mut [ContextPart<'_>],
    ) {
        let (mut start, mut rest) = (0, parts);
        while !rest.is_empty() {
            let (group, others) = rest.split_at_mut(group_length(rest));
            rest = others;
            let rows = group.iter().map(|part| part.rows as i64).sum();
            let features_gk = features_tk.narrow(0, start, rows);
            start += rows;
            match group {
                [ContextPart { cache, .. }] => {
                    let first = cache.length;
                    self.extend_context(cache, &features_gk, first);
                }
                group => few.extend(group, floats(&float_rows(&features_gk))),
            }
        }
    }

    fn blocks_layer(
        &self,
        index: usize,
        caches: &[&ContextCache],
        x: &Tensor,
        rope: &RotaryTables,
        shared: &mut [Shared],
    ) -> Tensor {
        let layer = &self.views.layers[index];
        let weights = &self.decode_weights().layers[index];
        let slots = x.size()[0] / caches.len() as i64;
        let qkv = self.decode_qkv(layer, weights, x);
        let (q_jngd, own) = self.project_slots(layer, &qkv, rope);
        let attended = caches.iter().zip(shared).enumerate().map(|(number, (cache, shared))| {
            let start = number as i64 * slots;
            cache.write(index, &own, start, slots);
            self.attend_cached(cache, index, &q_jngd.narrow(1, start, slots), shared)
        });
        let out = Tensor::cat(&attended.collect::<Vec<_>>(), 0);
        self.decode_output(layer, weights, x, &out)
    }

    /// Rotary tables of spans of positions, (cache, first, count) each, from the cache with the
    /// most positions.
    fn tables_of<'a>(
        &self,
        spans: impl Iterator<Item = (&'a ContextCache, i64, i64)>,
    ) -> RotaryTables {
        let spans: Vec<_> = spans.collect();
        let positions: Vec<i64> =
            spans.iter().flat_map(|(_, first, count)| *first..first + count).collect();
        let positions = Tensor::from_slice(&positions).to_device(self.device());
        let longest = spans.iter().max_by_key(|(cache, ..)| cache.capacity);
        let (longest, ..) = longest.expect("a pass has a sequence");
        longest.rope.map(|table| table.index_select(0, &positions))
    }
}

/// How many leading parts, at least one, are few rows together.
fn group_length(parts: &[ContextPart<'_>]) -> usize {
    let mut rows = 0;
    let fit = parts.iter().take_while(|part| {
        rows += part.rows;
        rows <= PackedDecoder::MAX_ROWS
    });
    fit.count().max(1)
}

impl PackedDecoder {
    /// Appends the features [R, K, H] of accepted tokens to contexts, concatenated in order.
    ///
    /// # Panics If a cache is full or not packed, or there are more than [`Self::MAX_ROWS`] rows.
    pub fn extend(&self, parts: &mut [ContextPart<'_>], features: &[f32]) {
        for ContextPart { cache, rows } in &*parts {
            let room = cache.capacity - cache.length;
            assert!(*rows as i64 <= room, "the context cache is full");
        }
        let (fc, norm) = (&self.fc, self.norms.0.as_slice());
        match &*parts {
            [part] => self.stack.extend(features, fc, norm, &[part.cache.rows(part.rows as i64)]),
            parts => {
                let sequences: Vec<Sequence<'_>> =
                    parts.iter().map(|part| part.cache.rows(part.rows as i64)).collect();
                self.stack.extend(features, fc, norm, &sequences);
            }
        }
        parts.iter_mut().for_each(|part| part.cache.length += part.rows as i64);
    }

    /// Runs one block after each context: `x` [S * B', H], the embeddings of [bonus token, MASK,
    /// ...] each, becomes `norm(x)`. The first `unread` rows are not computed.
    ///
    /// # Panics
    /// As [`Self::extend`].
    pub fn forward_blocks(&self, caches: &[&ContextCache], x: &mut [f32], unread: usize) {
        let outputs = Outputs { final_norm: Some(&self.norms.1), unread, ..Outputs::default() };
        let slots = (x.len() / self.hidden() / caches.len()) as i64;
        match caches {
            [cache] => self.stack.forward(x, &[cache.rows(slots)], outputs),
            caches => {
                let sequences: Vec<Sequence<'_>> =
                    caches.iter().map(|cache| cache.rows(slots)).collect();
                self.stack.forward(x, &sequences, outputs);
            }
        }
    }

    /// [`Draft::forward_blocks`] with as many blocks per pass as are few rows together; float32.
    fn forward_groups(&self, caches: &[&ContextCache], blocks_nh: &Tensor) -> Tensor {
        let slots = blocks_nh.size()[0] as usize / caches.len();
        let together = Self::MAX_ROWS / slots;
        let mut x_nh = float_copy(blocks_nh);
        let groups = floats_mut(&mut x_nh).chunks_mut(together * slots * self.hidden());
        for (x, caches) in groups.zip(caches.chunks(together)) {
            self.forward_blocks(caches, x, 0);
        }
        x_nh
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tch::{Device, Kind};

    use super::*;
    use crate::draft::{DraftConfig, Fresh};

    const OPTIONS: (Kind, Device) = (Kind::Float, Device::Cpu);

    fn draft() -> Draft {
        let config = r#"{
            "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
            "rope_theta": 100.0, "vocab_size": 9, "max_position_embeddings": 64, "block_size": 3,
            "sliding_window": 4, "use_sliding_window": true,
            "layer_types": ["full_attention", "sliding_attention"],
            "attention_bias": true,
            "dflash_config": {"mask_token_id": 8, "target_layer_ids": [0, 1]}
        }"#;
        let config = DraftConfig::parse(Path::new("config.json"), config).unwrap();
        let draft = Draft::init(config, Device::Cpu, |shape| Tensor::randn(shape, OPTIONS));
        for bias in
            draft.layout.parameters().iter().filter(|parameter| parameter.fresh == Fresh::Zeros)
        {
            bias.view(&draft.flat).copy_(&Tensor::randn(&*bias.shape, OPTIONS));
        }
        draft
    }

    #[test]
    fn blocks_in_company_are_as_alone() {
        let _draws = dflash_test_support::seeded(tch::manual_seed);
        let draft = draft();
        let lengths = [7i64, 2, 9];
        let features = lengths.map(|length| Tensor::randn([length, 16], OPTIONS));
        let blocks = Tensor::randn([9, 8], OPTIONS);
        let mut single = lengths.map(|length| draft.new_cache(length + 1));
        let alone: Vec<Tensor> = (0..3)
            .map(|at| {
                draft.extend_context(&mut single[at], &features[at], 0);
                draft.forward_block(&single[at], &blocks.narrow(0, 3 * at as i64, 3), lengths[at])
            })
            .collect();
        let mut together = lengths.map(|length| draft.new_cache(length + 1));
        let parts = together.iter_mut().zip(lengths);
        let mut parts: Vec<ContextPart<'_>> =
            parts.map(|(cache, rows)| ContextPart { cache, rows: rows as usize }).collect();
        draft.extend_contexts(&Tensor::cat(&features, 0), &mut parts);
        let caches: Vec<&ContextCache> = together.iter().collect();
        let both = draft.forward_blocks(&caches, &blocks);
        assert!(both.allclose(&Tensor::cat(&alone, 0), 1e-5, 1e-5, false));
    }

    #[test]
    fn a_copied_context_goes_on_as_the_first() {
        let _draws = dflash_test_support::seeded(tch::manual_seed);
        let draft = draft();
        let mut cache = draft.new_cache(8);
        draft.extend_context(&mut cache, &Tensor::randn([8, 16], OPTIONS), 0);
        let copy = draft.copy_cache(&cache, 5, 20);
        assert_eq!((copy.len(), copy.capacity()), (5, 20));
        cache.truncate(5);
        let block = Tensor::randn([3, 8], OPTIONS);
        let [first, second] = [&cache, &copy].map(|cache| draft.forward_block(cache, &block, 5));
        assert_eq!(first, second);
    }
}
