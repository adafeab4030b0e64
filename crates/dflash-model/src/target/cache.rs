//! Keys and values of one growing sequence.
//!
//! Preallocated for the longest sequence the caller plans: a step writes its rows in place and
//! attends over a view, so nothing is copied as the sequence grows, and rejecting tokens is
//! changing a number. Shapes: `m` key heads, `s` capacity, `d` head dimension.

mod sequences;

use dflash_torch_sys::decode::{Cache, MAX_ROWS, Stack};
use tch::{Kind, Tensor};

use super::config::TargetConfig;
use super::layer::{Attend, Place, Projected};
use super::packed::{Masks, Span, causal, heads_first, side_by_side};
use super::rotary::HeadTables;
use crate::ops::{Rotary, attention, dense};

pub use sequences::SequencePart;

/// Keys and values of one sequence, for every layer of a target.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<KvLayer>,
    /// The memory behind `layers` where few rows take the compiled passes.
    few_rows: Option<Cache>,
    tables: HeadTables,
    len: i64,
    capacity: i64,
}

#[derive(Debug)]
struct KvLayer {
    k_1msd: Tensor,
    v_1msd: Tensor,
}

impl KvCache {
    pub(crate) fn new(
        config: &TargetConfig,
        rotary: &Rotary,
        (like, few): (&Tensor, Option<&Stack>),
        capacity: usize,
    ) -> Self {
        let options = (like.kind(), like.device());
        let capacity = capacity as i64;
        let shape = [1, config.num_key_value_heads, capacity, config.head_dim];
        // The operating system hands out pages as rows are written: spare capacity costs nothing.
        let empty = || Tensor::empty(shape, options);
        let positions = Tensor::arange(capacity, (Kind::Int64, like.device()));
        let tables = HeadTables::new(rotary, &positions, like.kind());
        let few_rows = few.map(|stack| stack.new_cache((&tables.half.cos_td, &tables.half.sin_td)));
        let layer = |layer: usize| match &few_rows {
            None => KvLayer { k_1msd: empty(), v_1msd: empty() },
            Some(held) => {
                let [k_1msd, v_1msd] =
                    [held.keys(layer), held.values(layer)].map(|x| x.unsqueeze(0));
                KvLayer { k_1msd, v_1msd }
            }
        };
        Self {
            layers: (0..config.num_hidden_layers).map(layer).collect(),
            few_rows,
            tables,
            len: 0,
            capacity,
        }
    }

    /// Tokens held.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether no token is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens that fit.
    pub fn capacity(&self) -> usize {
        self.capacity as usize
    }

    /// Forgets every token from `len` on. A longer `len` changes nothing.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len as i64);
    }

    /// The memory for `tokens` more of them, if they are few enough for the compiled passes.
    ///
    /// # Panics
    /// When they do not fit.
    pub(crate) fn few_rows(&self, tokens: i64) -> Option<&Cache> {
        self.check_room(tokens);
        self.few_rows.as_ref().filter(|_| (1..=MAX_ROWS).contains(&tokens))
    }

    /// A caller that grows a sequence past its plan is a bug.
    fn check_room(&self, tokens: i64) {
        let (len, capacity) = (self.len, self.capacity);
        assert!(len + tokens <= capacity, "{len} + {tokens} tokens exceed the cache's {capacity}");
    }

    /// Makes `tokens` rows, already written, part of the sequence.
    pub(crate) fn advance(&mut self, tokens: i64) {
        self.len += tokens;
    }
}

/// Attention of new tokens over a cache and themselves; writes their keys and values into it.
#[derive(Debug)]
pub(crate) struct CachedAttention<'a> {
    cache: &'a mut KvCache,
    masks: Masks,
}

impl<'a> CachedAttention<'a> {
    /// Attention for `tokens` more tokens.
    ///
    /// # Panics
    /// When they do not fit.
    pub(crate) fn new(cache: &'a mut KvCache, tokens: i64) -> Self {
        cache.check_room(tokens);
        Self { cache, masks: Masks::default() }
    }

    /// Rotary tables of the next `tokens` positions.
    pub(crate) fn tables(&self, tokens: i64) -> HeadTables {
        self.cache.tables.narrow(self.cache.len, tokens)
    }
}

impl Attend for CachedAttention<'_> {
    fn attend(&mut self, place: Place, projected: &Projected) -> Tensor {
        let (start, tokens) = (self.cache.len, projected.q_tnd.size()[0]);
        let layer = &self.cache.layers[place.layer];
        layer.k_1msd.narrow(2, start, tokens).copy_(&heads_first(&projected.k_tmd));
        layer.v_1msd.narrow(2, start, tokens).copy_(&heads_first(&projected.v_tmd));
        if start == 0 {
            return causal(projected, place.window);
        }
        let first_key = place.window.map_or(0, |window| (start + 1 - window).max(0));
        let keys = start + tokens - first_key;
        let [k, v] = [&layer.k_1msd, &layer.v_1msd]
            .map(|x| dense(&x.narrow(2, first_key, keys), projected.q_tnd.kind()));
        if tokens == 1 {
            return one_token(projected, &k, &v);
        }
        let span = Span { start, tokens, first_key, window: place.window };
        let mask = self.masks.of(place.window, || span.mask(&k));
        let q = heads_first(&projected.q_tnd);
        side_by_side(&attention(&q, &k, &v, (Some(&mask), false), projected.kernels))
    }
}

/// One token sees all keys, so the query heads of a group can stand in for a sequence: no mask, and
/// no repeated keys.
fn one_token(projected: &Projected, k: &Tensor, v: &Tensor) -> Tensor {
    let size = projected.q_tnd.size();
    let key_heads = k.size()[1];
    let q = projected.q_tnd.reshape([1, key_heads, size[1] / key_heads, size[2]]);
    attention(&q, k, v, (None, false), projected.kernels).reshape([1, size[1] * size[2]])
}
