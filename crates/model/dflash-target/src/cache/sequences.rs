//! One pass over new tokens of several sequences, each with its own cache.
//!
//! Every product runs over all tokens at once; attention is computed per sequence. Shapes as in
//! [`super`]; `t` counts the concatenated tokens of all sequences.

use dflash_kernels::decode::Cache;
use dflash_tensor::attention_span::AttentionPlace;
use tch::{Device, Kind, Tensor, no_grad};

use super::{CachedAttention, Held, KvCache};
use crate::blocks::latent::Latent;
use crate::layer::{Attend, Pass, Projected, Recurrence};
use crate::rotary::HeadTables;
use crate::{CachedOutput, PackedDecoder, Target};

/// A sequence and its number of tokens in the pass.
#[derive(Debug)]
pub struct SequencePart<'a> {
    /// The sequence's cache, read and written.
    pub cache: &'a mut KvCache,
    /// New tokens, at least one.
    pub tokens: usize,
}

impl KvCache {
    /// Size in bytes: keys and values with spare capacity and padding, states, rotary tables.
    pub fn bytes(&self) -> usize {
        let of = |x: &Tensor| x.numel() * x.kind().elt_size_in_bytes();
        let bytes = |held: &Held| match held {
            // They are views of the packed memory, which is larger than its rows.
            Held::Keys(_) if self.packed_cache.is_some() => 0,
            Held::Keys(layer) => of(&layer.k_1msd) + of(&layer.v_1mse),
            Held::Latent(layer) => of(&layer.k_1msd),
            Held::State(carried) => carried.bytes(),
            Held::Nothing => 0,
        };
        self.layers.iter().map(bytes).sum::<usize>()
            + self.packed_cache.as_ref().map_or(0, Cache::bytes)
            + self.tables.iter().map(HeadTables::bytes).sum::<usize>()
            + dflash_tensor::TENSOR_BYTES * self.tensors()
    }

    /// Approximate number of tensors.
    fn tensors(&self) -> usize {
        let of_layer = if self.packed_cache.is_some() { 6 } else { 2 };
        self.layers.len() * of_layer + 4 * self.tables.len()
    }

    /// Copies the first `tokens` rows of `other` and takes that length.
    fn take_rows(&mut self, other: &Self, tokens: i64) {
        for (own, other) in self.layers.iter_mut().zip(&other.layers) {
            match (own, other) {
                (Held::Keys(own), Held::Keys(other)) => {
                    own.k_1msd.narrow(2, 0, tokens).copy_(&other.k_1msd.narrow(2, 0, tokens));
                    own.v_1mse.narrow(2, 0, tokens).copy_(&other.v_1mse.narrow(2, 0, tokens));
                }
                (Held::Latent(own), Held::Latent(other)) => {
                    own.k_1msd.narrow(2, 0, tokens).copy_(&other.k_1msd.narrow(2, 0, tokens));
                }
                (Held::State(own), Held::State(other)) => *own = other.shared(),
                _ => {}
            }
        }
        self.len = tokens;
    }
}

impl Target {
    /// A cache with room for `max_tokens` that holds the first `tokens` of `cache`.
    ///
    /// # Panics
    /// If `cache` holds fewer, they do not fit, or they are nonzero and less than its
    /// [`KvCache::earliest`].
    pub fn copy_cache(&self, cache: &KvCache, tokens: usize, max_tokens: usize) -> KvCache {
        assert!(tokens <= cache.len() && tokens <= max_tokens, "{tokens} tokens are not there");
        let earliest = cache.earliest();
        assert!(tokens == 0 || tokens >= earliest, "{tokens} tokens are before {earliest}");
        let mut copy = self.new_cache(max_tokens);
        no_grad(|| copy.take_rows(cache, tokens as i64));
        copy
    }

    /// Appends to each sequence its tokens of `ids_t` `[T]`, which concatenates the sequences'
    /// tokens in order. Never records gradients.
    ///
    /// # Panics
    /// If a cache is too small, the numbers do not add up to T, or an id of `aux_layers` exceeds
    /// the number of layers.
    pub fn forward_sequences(
        &self,
        ids_t: &Tensor,
        parts: &mut [SequencePart<'_>],
        aux_layers: &[u32],
    ) -> CachedOutput {
        let total: usize = parts.iter().map(|part| part.tokens).sum();
        assert_eq!(total as i64, ids_t.size()[0], "tokens of all sequences");
        if let [SequencePart { cache, .. }] = parts {
            return self.forward_cached(ids_t, cache, aux_layers);
        }
        if let Some(few) = self.packed_decoder() {
            return no_grad(|| self.forward_groups(few, ids_t, parts, aux_layers));
        }
        no_grad(|| {
            let (tables, positions_t) = tables(parts, self.device());
            let tokens: Vec<i64> = parts.iter().map(|part| part.tokens as i64).collect();
            let sequences = parts.iter_mut().zip(&tokens);
            let sequences =
                sequences.map(|(part, &tokens)| (CachedAttention::new(part.cache, tokens), tokens));
            let mut attention = SequencesAttention { sequences: sequences.collect() };
            let pass = Pass::new(&tables, &positions_t, &mut attention);
            let output = self.run(ids_t, pass, aux_layers, self.num_layers());
            parts.iter_mut().zip(tokens).for_each(|(part, tokens)| part.cache.advance(tokens));
            output
        })
    }
}

impl Target {
    /// [`Self::forward_sequences`] with packed few-row passes: sequences that are few rows together
    /// share a pass; one with more, a piece of a prompt, gets its own.
    fn forward_groups(
        &self,
        few: &PackedDecoder,
        ids_t: &Tensor,
        parts: &mut [SequencePart<'_>],
        aux_layers: &[u32],
    ) -> CachedOutput {
        let (mut outputs, mut start, mut rest) = (Vec::new(), 0, parts);
        while !rest.is_empty() {
            let (group, others) = rest.split_at_mut(group_length(rest));
            rest = others;
            let tokens: usize = group.iter().map(|part| part.tokens).sum();
            let ids_g = ids_t.narrow(0, start, tokens as i64);
            start += tokens as i64;
            outputs.push(match group {
                [SequencePart { cache, .. }] => self.forward_cached(&ids_g, cache, aux_layers),
                group => {
                    let parts = group.iter_mut().map(|part| (&mut *part.cache, part.tokens));
                    self.forward_few(few, &ids_g, &mut parts.collect::<Vec<_>>(), aux_layers)
                }
            });
        }
        let cat = |of: &dyn Fn(&CachedOutput) -> Tensor| {
            let each = outputs.iter().map(|output| of(output).to_kind(Kind::Float));
            Tensor::cat(&each.collect::<Vec<_>>(), 0)
        };
        let state_at = |place: usize| cat(&|output| output.aux_states[place].shallow_clone());
        CachedOutput {
            hidden_td: cat(&|output| output.hidden_td.shallow_clone()),
            aux_states: (0..aux_layers.len()).map(state_at).collect(),
        }
    }
}

/// How many leading parts, at least one, are few rows together.
fn group_length(parts: &[SequencePart<'_>]) -> usize {
    let mut tokens = 0;
    let fit = parts.iter().take_while(|part| {
        tokens += part.tokens;
        tokens <= PackedDecoder::MAX_ROWS
    });
    fit.count().max(1)
}

/// Rotary tables of all new tokens, from the longest cache, and their positions `[T]`.
fn tables(parts: &[SequencePart<'_>], device: Device) -> (Vec<HeadTables>, Tensor) {
    let positions =
        parts.iter().flat_map(|part| part.cache.len..part.cache.len + part.tokens as i64);
    let positions = Tensor::from_slice(&positions.collect::<Vec<i64>>()).to_device(device);
    let longest = parts.iter().max_by_key(|part| part.cache.capacity);
    let tables = &longest.expect("a pass has a sequence").cache.tables;
    let starts = parts.iter().scan(0, |end, part| {
        *end += part.tokens as i64;
        Some((part.cache.len, (*end - part.tokens as i64, part.tokens as i64)))
    });
    let first = starts.filter(|(len, _)| *len == 0).map(|(_, pass)| pass);
    let of = |tables: &HeadTables| tables.select(&positions).with_first_passes(first.clone());
    (tables.iter().map(of).collect(), positions)
}

/// Attention of each sequence over its own tokens.
struct SequencesAttention<'a> {
    sequences: Vec<(CachedAttention<'a>, i64)>,
}

impl Attend for SequencesAttention<'_> {
    fn attend(&mut self, place: AttentionPlace<'_>, projected: &Projected) -> Tensor {
        let mut start = 0;
        let attended = self.sequences.iter_mut().map(|(attention, tokens)| {
            let own = projected.narrow(start, *tokens);
            start += *tokens;
            attention.attend(place, &own)
        });
        Tensor::cat(&attended.collect::<Vec<_>>(), 0)
    }

    fn attend_latent(&mut self, place: AttentionPlace<'_>, latent: &Latent<'_>) -> Tensor {
        let mut start = 0;
        let attended = self.sequences.iter_mut().map(|(attention, tokens)| {
            let own = latent.narrow(start, *tokens);
            start += *tokens;
            attention.attend_latent(place, &own)
        });
        Tensor::cat(&attended.collect::<Vec<_>>(), 0)
    }

    fn scan(&mut self, layer: usize, recurrence: &dyn Recurrence, inputs_tc: &Tensor) -> Tensor {
        let mut start = 0;
        let scanned = self.sequences.iter_mut().map(|(attention, tokens)| {
            let own = inputs_tc.narrow(0, start, *tokens);
            start += *tokens;
            attention.scan(layer, recurrence, &own)
        });
        Tensor::cat(&scanned.collect::<Vec<_>>(), 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TargetConfig;

    fn ids(range: std::ops::Range<i64>) -> Tensor {
        Tensor::from_slice(&range.map(|id| id * 7 % 50).collect::<Vec<i64>>())
    }

    #[test]
    fn sequences_in_company_are_as_alone() {
        let _alone = dflash_test_support::alone();
        let target = Target::random(TargetConfig::qwen3(32, 2, 50), 3, Device::Cpu);
        let (lengths, more) = ([5i64, 1, 12], [3i64, 4, 1]);
        let caches = || {
            lengths.map(|length| {
                let mut cache = target.new_cache(20);
                target.forward_cached(&ids(length..2 * length), &mut cache, &[]);
                cache
            })
        };
        let (mut single, mut together) = (caches(), caches());
        let alone: Vec<CachedOutput> = single
            .iter_mut()
            .zip(more)
            .map(|(cache, more)| target.forward_cached(&ids(0..more), cache, &[1]))
            .collect();
        let mut parts: Vec<SequencePart> = together
            .iter_mut()
            .zip(more)
            .map(|(cache, more)| SequencePart { cache, tokens: more as usize })
            .collect();
        let all = Tensor::cat(&more.map(|more| ids(0..more)), 0);
        let both = target.forward_sequences(&all, &mut parts, &[1]);
        let cat = |of: fn(&CachedOutput) -> &Tensor| {
            Tensor::cat(&alone.iter().map(of).collect::<Vec<_>>(), 0)
        };
        assert!(both.hidden_td.allclose(&cat(|output| &output.hidden_td), 1e-5, 1e-5, false));
        assert!(both.aux_states[0].allclose(
            &cat(|output| &output.aux_states[0]),
            1e-5,
            1e-5,
            false
        ));
        for (cache, (length, more)) in together.iter().zip(lengths.iter().zip(more)) {
            assert_eq!(cache.len() as i64, length + more);
        }
    }

    #[test]
    fn a_copied_cache_goes_on_as_the_first() {
        let _alone = dflash_test_support::alone();
        let target = Target::random(TargetConfig::qwen3(32, 2, 50), 4, Device::Cpu);
        let mut cache = target.new_cache(16);
        target.forward_cached(&ids(0..9), &mut cache, &[]);
        let mut copy = target.copy_cache(&cache, 6, 30);
        assert_eq!((copy.len(), copy.capacity()), (6, 30));
        assert!(copy.bytes() > cache.bytes(), "{} {}", copy.bytes(), cache.bytes());
        cache.truncate(6);
        let [first, second] = [&mut cache, &mut copy]
            .map(|cache| target.forward_cached(&ids(3..7), cache, &[]).hidden_td);
        assert_eq!(first, second);
    }
}
