//! Key/value cache of one growing sequence, and the states of recurrent layers.
//!
//! Preallocated for the longest sequence that the caller plans: a step writes its rows in place and
//! attends over a view, so nothing is copied as the sequence grows, and rejecting tokens only
//! changes a length. A recurrent state cannot be truncated that way. Its cache keeps the state
//! before the last pass and that pass's inputs, and recomputes the state after the accepted tokens
//! when the next pass needs it: a few tokens of that layer's recurrence, without reading weights
//! again. It cannot go back further (see [`KvCache::earliest`]).
//!
//! Shapes: `m` key heads, `s` capacity, `d` head dimension.

mod sequences;

use dflash_kernels::decode::{Cache, Stack};
use dflash_kernels::kernels::Kernels;
use dflash_tensor::DeviceKind;
use dflash_tensor::attention_span::{AttentionPlace, Masks};
use dflash_tensor::flash::{self, Calls};
use dflash_tensor::ops::{Scores, dense, scored_attention};
use tch::{Device, Kind, Tensor};

use super::blocks::latent::Latent;
use super::layer::{Attend, Memory, Projected, Recurrence, State};
use super::packed::{Span, causal, heads_first, side_by_side};
use super::rotary::HeadTables;
use super::target::Body;

pub use sequences::SequencePart;

/// Keys and values of one sequence, for every layer of a target.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<Held>,
    /// Backing memory of `layers` if few rows use the compiled passes.
    packed_cache: Option<Cache>,
    tables: Vec<HeadTables>,
    len: i64,
    capacity: i64,
}

/// A layer's cache.
#[derive(Debug)]
enum Held {
    Keys(KvLayer),
    /// Its values are views of its keys.
    Latent(KvLayer),
    State(Carried),
    Nothing,
}

#[derive(Debug)]
struct KvLayer {
    k_1msd: Tensor,
    v_1mse: Tensor,
}

/// The state of a recurrent layer. To allow truncation it keeps the state before the last pass and
/// that pass's inputs.
#[derive(Debug, Default)]
struct Carried {
    /// The state after `at` tokens; `None` before the first pass.
    before: Option<State>,
    at: i64,
    /// The inputs [T, C] of the tokens from `at` on, if they are few.
    inputs_tc: Option<Tensor>,
    /// The state after those tokens, and their number.
    after: Option<(State, i64)>,
}

/// Maximum pass length whose inputs are kept; covers verification passes
/// ([`KvCache::MOST_VERIFIED`]).
const KEPT_INPUTS: i64 = KvCache::MOST_VERIFIED as i64;

impl Carried {
    /// The state after `len` tokens.
    ///
    /// # Panics
    /// If it is no longer known (see [`KvCache::earliest`]).
    fn state(&self, len: i64, recurrence: &dyn Recurrence, like: &Tensor) -> State {
        match (&self.before, &self.after, &self.inputs_tc) {
            _ if len == 0 => recurrence.zero(like),
            (_, Some((after, tokens)), _) if self.at + tokens == len => after.shared(),
            (Some(before), ..) if self.at == len => before.shared(),
            (Some(before), _, Some(inputs_tc)) if (self.at..self.end()).contains(&len) => {
                recurrence.run(&inputs_tc.narrow(0, 0, len - self.at), before).1
            }
            _ => panic!("the state after {len} tokens is not known any more"),
        }
    }

    fn end(&self) -> i64 {
        self.at + self.after.as_ref().map_or(0, |(_, tokens)| *tokens)
    }

    /// The smallest nonzero length whose state is known.
    fn earliest(&self) -> i64 {
        if self.inputs_tc.is_some() { self.at } else { self.end() }
    }

    fn run(&mut self, len: i64, recurrence: &dyn Recurrence, inputs_tc: &Tensor) -> Tensor {
        let state = self.state(len, recurrence, inputs_tc);
        let (output, after) = recurrence.run(inputs_tc, &state);
        let tokens = inputs_tc.size()[0];
        // A copy, since the inputs are a view of a larger product.
        let inputs_tc = (tokens <= KEPT_INPUTS).then(|| inputs_tc.copy());
        *self = Self { before: Some(state), at: len, inputs_tc, after: Some((after, tokens)) };
        output
    }

    fn shared(&self) -> Self {
        Self {
            before: self.before.as_ref().map(State::shared),
            at: self.at,
            inputs_tc: self.inputs_tc.as_ref().map(Tensor::shallow_clone),
            after: self.after.as_ref().map(|(state, tokens)| (state.shared(), *tokens)),
        }
    }

    fn bytes(&self) -> usize {
        let states = self.before.iter().chain(self.after.iter().map(|(state, _)| state));
        let inputs = self.inputs_tc.as_ref();
        states.map(State::bytes).sum::<usize>()
            + inputs.map_or(0, |x| x.numel() * x.kind().elt_size_in_bytes())
    }
}

impl KvCache {
    /// Maximum pass length that can be truncated partially if layers carry a state.
    pub const MOST_VERIFIED: usize = 128;

    pub(crate) fn new(
        body: &Body,
        place: DeviceKind,
        few: Option<&Stack>,
        capacity: usize,
    ) -> Self {
        let capacity = capacity as i64;
        // The operating system allocates pages on first write, so spare capacity is free.
        let empty =
            |heads: i64, dim: i64| Tensor::empty([1, heads, capacity, dim], place.options());
        let positions = Tensor::arange(capacity, (Kind::Int64, place.device));
        let tables = body.tables(&positions, place.kind);
        let packed_cache = few.map(|stack| {
            let half = &tables[0].half;
            stack.new_cache(&half.cos_td, &half.sin_td)
        });
        let layer = |(number, memory): (usize, Memory)| match (memory, &packed_cache) {
            (Memory::Keys { .. }, Some(held)) => {
                let [k_1msd, v_1mse] =
                    [held.keys(number), held.values(number)].map(|x| x.unsqueeze(0));
                Held::Keys(KvLayer { k_1msd, v_1mse })
            }
            (Memory::Keys { heads, key_dim, value_dim }, None) => {
                let (k_1msd, v_1mse) = (empty(heads, key_dim), empty(heads, value_dim));
                Held::Keys(KvLayer { k_1msd, v_1mse })
            }
            (Memory::Latent { key_dim, value_dim }, _) => {
                let k_1msd = empty(1, key_dim);
                let v_1mse = k_1msd.narrow(3, 0, value_dim);
                Held::Latent(KvLayer { k_1msd, v_1mse })
            }
            (Memory::State, _) => Held::State(Carried::default()),
            (Memory::Nothing, _) => Held::Nothing,
        };
        let memories = body.layers.iter().map(|layer| layer.memory());
        Self {
            layers: memories.enumerate().map(layer).collect(),
            packed_cache,
            tables,
            len: 0,
            capacity,
        }
    }

    /// Number of cached tokens.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether no token is cached.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Capacity in tokens.
    pub fn capacity(&self) -> usize {
        self.capacity as usize
    }

    /// Bytes that a step over the cached tokens reads if every layer attends to all of them.
    pub fn bytes_held(&self) -> usize {
        let of = |x: &Tensor| x.narrow(2, 0, self.len).numel() * x.kind().elt_size_in_bytes();
        let held = |held: &Held| match held {
            Held::Keys(layer) => of(&layer.k_1msd) + of(&layer.v_1mse),
            Held::Latent(layer) => of(&layer.k_1msd),
            Held::State(_) | Held::Nothing => 0,
        };
        self.layers.iter().map(held).sum()
    }

    /// Fills the cache with `tokens` random tokens, for timing steps at that length.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn fill_random(&mut self, tokens: usize) {
        let tokens = tokens as i64;
        assert!(tokens <= self.capacity, "{tokens} tokens exceed {}", self.capacity);
        for held in &self.layers {
            if let Held::Keys(layer) | Held::Latent(layer) = held {
                for x in [&layer.k_1msd, &layer.v_1mse] {
                    let _ = x.narrow(2, 0, tokens).uniform_(-1.0, 1.0);
                }
            }
        }
        self.len = tokens;
    }

    /// Drops every token from `len` on. A `len` beyond the current length has no effect.
    ///
    /// # Panics
    /// If `len` is nonzero and less than [`Self::earliest`].
    pub fn truncate(&mut self, len: usize) {
        let earliest = self.earliest();
        assert!(len == 0 || len >= earliest, "{len} tokens are before the earliest, {earliest}");
        self.len = self.len.min(len as i64);
    }

    /// The smallest nonzero length that the cache can be truncated to: 0 without recurrent layers,
    /// otherwise the length before the last pass.
    pub fn earliest(&self) -> usize {
        let earliest =
            |held: &Held| if let Held::State(state) = held { state.earliest() } else { 0 };
        self.layers.iter().map(earliest).max().unwrap_or(0).min(self.len) as usize
    }

    /// The memory of the packed passes, if used, after checking that it has room for `tokens` more.
    ///
    /// # Panics
    /// If they do not fit.
    pub(crate) fn packed_cache(&self, tokens: i64) -> Option<&Cache> {
        self.check_room(tokens);
        self.packed_cache.as_ref()
    }

    /// A caller that grows a sequence past its plan is a bug.
    fn check_room(&self, tokens: i64) {
        let (len, capacity) = (self.len, self.capacity);
        assert!(len + tokens <= capacity, "{len} + {tokens} tokens exceed the cache's {capacity}");
    }

    /// Adds `tokens` rows, already written, to the length.
    pub(crate) fn advance(&mut self, tokens: i64) {
        self.len += tokens;
    }
}

/// Attention of new tokens over a cache and themselves; writes their keys and values to it.
#[derive(Debug)]
pub(crate) struct CachedAttention<'a> {
    cache: &'a mut KvCache,
    masks: Masks,
    calls: Calls,
}

impl<'a> CachedAttention<'a> {
    /// Attention for `tokens` more tokens.
    ///
    /// # Panics
    /// If they do not fit.
    pub(crate) fn new(cache: &'a mut KvCache, tokens: i64) -> Self {
        cache.check_room(tokens);
        Self { cache, masks: Masks::default(), calls: Calls::default() }
    }

    /// Rotary tables of the next `tokens` positions.
    pub(crate) fn tables(&self, tokens: i64) -> Vec<HeadTables> {
        self.cache.tables.iter().map(|tables| tables.narrow(self.cache.len, tokens)).collect()
    }

    /// The next `tokens` positions `[T]`.
    pub(crate) fn positions(&self, tokens: i64, device: Device) -> Tensor {
        let start = self.cache.len;
        Tensor::arange_start(start, start + tokens, (Kind::Int64, device))
    }
}

impl CachedAttention<'_> {
    /// Writes the new tokens' keys and values for `layer`.
    fn store(&self, layer: usize, k_tmd: &Tensor, v_tme: &Tensor) {
        let (start, tokens) = (self.cache.len, k_tmd.size()[0]);
        match &self.cache.layers[layer] {
            Held::Keys(layer) => {
                layer.k_1msd.narrow(2, start, tokens).copy_(&heads_first(k_tmd));
                layer.v_1mse.narrow(2, start, tokens).copy_(&heads_first(v_tme));
            }
            Held::Latent(layer) => {
                layer.k_1msd.narrow(2, start, tokens).copy_(&heads_first(k_tmd));
            }
            Held::State(_) | Held::Nothing => panic!("layer {layer} keeps no keys"),
        }
    }

    /// The cached keys and values in `kind` that the last `tokens` positions attend to in the layer
    /// of `place`, these included, and the position of the first.
    fn seen(&self, place: AttentionPlace<'_>, tokens: i64, kind: Kind) -> (Tensor, Tensor, i64) {
        let (Held::Keys(layer) | Held::Latent(layer)) = &self.cache.layers[place.layer] else {
            panic!("layer {} keeps no keys", place.layer)
        };
        let first_key = place.attention_span.first_key(self.cache.len);
        let keys = self.cache.len + tokens - first_key;
        let [k, v] =
            [&layer.k_1msd, &layer.v_1mse].map(|x| dense(&x.narrow(2, first_key, keys), kind));
        (k, v, first_key)
    }

    /// Attention of queries over keys and values [1, heads, keys, ..] starting at position
    /// `first_key`.
    fn over(
        &mut self,
        place: AttentionPlace<'_>,
        q_tnd: &Tensor,
        kernels: Kernels,
        k: Tensor,
        v: Tensor,
        first_key: i64,
    ) -> Tensor {
        let (start, tokens) = (self.cache.len, q_tnd.size()[0]);
        if let Some(attended) = self.flash(place, q_tnd, kernels, &k, &v) {
            return attended;
        }
        if tokens == 1 {
            return one_token(q_tnd, kernels, &k, &v, place.scores);
        }
        let span = Span { start, tokens, first_key, attention_span: place.attention_span };
        let mask = self.masks.of(place.attention_span, || span.mask(&k));
        let q = heads_first(q_tnd);
        side_by_side(&scored_attention(&q, &k, &v, Some(&mask), false, place.scores, kernels))
    }

    /// [`Self::over`] by GPU kernels, if they support it.
    fn flash(
        &mut self,
        place: AttentionPlace<'_>,
        q_tnd: &Tensor,
        kernels: Kernels,
        k_1msd: &Tensor,
        v_1mse: &Tensor,
    ) -> Option<Tensor> {
        let [k_smd, v_sme] = [k_1msd, v_1mse].map(|x| x.squeeze_dim(0).transpose(0, 1));
        if kernels != Kernels::Fast || !flash::takes(q_tnd, &k_smd, &v_sme) {
            return None;
        }
        let (window, tokens, keys) = (flash::window(place)?, q_tnd.size()[0], k_smd.size()[0]);
        let make = || flash::one(tokens, keys, window, q_tnd.device());
        let sequence = self.calls.of(window, make);
        Some(flash::attend(q_tnd, &k_smd, &v_sme, sequence, place.scores.scale).flatten(1, 2))
    }
}

impl Attend for CachedAttention<'_> {
    fn room(&self, layer: usize, like: &Tensor) -> Option<(Tensor, Tensor)> {
        let Held::Keys(layer) = &self.cache.layers[layer] else { return None };
        let (start, tokens) = (self.cache.len, like.size()[0]);
        let rows = |x: &Tensor| x.squeeze_dim(0).narrow(1, start, tokens).transpose(0, 1);
        // The packed layout differs.
        let fits = self.cache.packed_cache.is_none() && layer.k_1msd.kind() == like.kind();
        fits.then(|| (rows(&layer.k_1msd), rows(&layer.v_1mse)))
    }

    fn attend(&mut self, place: AttentionPlace<'_>, projected: &Projected) -> Tensor {
        if !projected.are_kept {
            self.store(place.layer, &projected.k_tmd, &projected.v_tme);
        }
        if self.cache.len == 0 {
            return causal(projected, place);
        }
        let tokens = projected.q_tnd.size()[0];
        let (k, v, first_key) = self.seen(place, tokens, projected.q_tnd.kind());
        self.over(place, &projected.q_tnd, projected.kernels, k, v, first_key)
    }

    fn attend_latent(&mut self, place: AttentionPlace<'_>, latent: &Latent<'_>) -> Tensor {
        let tokens = latent.q_tnd.size()[0];
        if self.cache.len > 0 && !latent.up.expands(tokens) {
            return latent.up.values(&self.attend(place, &latent.absorbed()));
        }
        self.store(place.layer, &latent.kept_t1c, &latent.kept_t1c);
        if self.cache.len == 0 {
            return causal(&latent.expanded(), place);
        }
        let (kept_11sc, _, first_key) = self.seen(place, tokens, latent.q_tnd.kind());
        let (k_snd, v_snv) = latent.up.expand(&kept_11sc.squeeze_dim(0).transpose(0, 1));
        let (k, v) = (heads_first(&k_snd), heads_first(&v_snv));
        self.over(place, &latent.q_tnd, latent.kernels, k, v, first_key)
    }

    fn scan(&mut self, layer: usize, recurrence: &dyn Recurrence, inputs_tc: &Tensor) -> Tensor {
        let len = self.cache.len;
        let Held::State(carried) = &mut self.cache.layers[layer] else {
            panic!("layer {layer} carries no state")
        };
        carried.run(len, recurrence, inputs_tc)
    }
}

/// A single query attends to all keys, so the query heads of a group can act as a sequence: no
/// mask, and no repeated keys.
fn one_token(
    q_tnd: &Tensor,
    kernels: Kernels,
    k: &Tensor,
    v: &Tensor,
    scores: Scores<'_>,
) -> Tensor {
    let size = q_tnd.size();
    let key_heads = k.size()[1];
    let q = q_tnd.reshape([1, key_heads, size[1] / key_heads, size[2]]);
    scores
        .folded(key_heads, |scores| scored_attention(&q, k, v, None, false, scores, kernels))
        .reshape([1, -1])
}

#[cfg(test)]
mod tests {
    use dflash_test_support::seeded;

    use super::*;
    use crate::blocks::delta::{DeltaHeads, DeltaRule};

    /// In float64, to exclude rounding: after any appends and truncations, outputs equal those of a
    /// run from the start.
    #[test]
    fn a_state_that_was_cut_back_is_that_of_the_tokens_left() {
        let _draws = seeded(tch::manual_seed);
        let random = |shape: &[i64]| Tensor::randn(shape, (Kind::Double, Device::Cpu));
        let below = |most: i64| Tensor::randint(most, [1], (Kind::Int64, Device::Cpu));
        let below = |most: i64| below(most).int64_value(&[0]);
        let heads = DeltaHeads { keys: 1, values: 2, key_dim: 4, value_dim: 3 };
        let weights = [random(&[heads.channels(), 1, 4]), random(&[2]), random(&[2])];
        let rule = DeltaRule::new(heads, &weights[0], &weights[1], &weights[2]);
        let (mut carried, mut held) = (Carried::default(), random(&[0, heads.inputs()]));
        for _ in 0..60 {
            let len = held.size()[0];
            let earliest = carried.earliest().min(len);
            let len = match below(8) {
                0 => 0,
                1 => len,
                _ => earliest + below(len - earliest + 1),
            };
            if below(3) == 0 {
                carried = carried.shared();
            }
            let added = random(&[1 + below(9), heads.inputs()]);
            held = Tensor::cat(&[held.narrow(0, 0, len), added.shallow_clone()], 0);
            let output = carried.run(len, &rule, &added);
            let whole = rule.run(&held, &rule.zero(&held)).0;
            let expected = whole.narrow(0, len, added.size()[0]);
            let difference = (output - expected).abs().max().double_value(&[]);
            assert!(difference < 1e-12, "behind {len} tokens: {difference:e}");
        }
    }
}
