//! Many sequences decoded together: one product for all of them, a cache row for each.
//!
//! Used to answer many prompts (regeneration). Sequences sit in slots `0..len()`; a finished one is
//! removed by moving the last slot into its place, so the products always run over live sequences
//! only. Shapes: `b` slots, `n` query heads, `m` key heads, `s` capacity, `d` head dimension.

use tch::{Kind, Tensor};

use super::Target;
use super::layer::{Attend, Place, Projected};
use super::packed::{Masks, causal, causal_mask, heads_first};
use super::rotary::HeadTables;
use crate::ops::attention;

/// Keys and values of up to a fixed number of sequences.
#[derive(Debug)]
pub struct BatchCache {
    layers: Vec<(Tensor, Tensor)>,
    tables: HeadTables,
    lengths: Vec<i64>,
    slots: usize,
    capacity: i64,
}

impl BatchCache {
    /// Sequences held.
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// Whether no sequence is held.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// Sequences that fit.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Tokens that fit into one sequence.
    pub fn capacity(&self) -> usize {
        self.capacity as usize
    }

    /// Drops the sequence in `slot`; the last one takes its place, as in `Vec::swap_remove`.
    pub fn swap_remove(&mut self, slot: usize) {
        let last = self.lengths.len() - 1;
        let length = self.lengths[last];
        self.lengths.swap_remove(slot);
        if slot == last {
            return;
        }
        for (k_bmsd, v_bmsd) in &self.layers {
            for x in [k_bmsd, v_bmsd] {
                let row = |slot: usize| x.get(slot as i64).narrow(1, 0, length);
                row(slot).copy_(&row(last));
            }
        }
    }
}

impl Target {
    /// An empty cache for `slots` sequences of at most `capacity` tokens.
    pub fn new_batch_cache(&self, slots: usize, capacity: usize) -> BatchCache {
        let (kind, device) = (self.embedding_vh.kind(), self.embedding_vh.device());
        let shape =
            [slots as i64, self.config.num_key_value_heads, capacity as i64, self.config.head_dim];
        // Zeros, not garbage: rows beyond a sequence's end get weight 0, and 0 * NaN is NaN.
        let zeros = || Tensor::zeros(shape, (kind, device));
        let positions = Tensor::arange(capacity as i64, (Kind::Int64, device));
        BatchCache {
            layers: (0..self.config.num_hidden_layers).map(|_| (zeros(), zeros())).collect(),
            tables: HeadTables::new(&self.rotary, &positions, kind),
            lengths: Vec::new(),
            slots,
            capacity: capacity as i64,
        }
    }

    /// Makes room for `capacity` tokens in every sequence; what is held stays.
    pub fn grow_batch_cache(&self, cache: &mut BatchCache, capacity: usize) {
        let mut grown = self.new_batch_cache(cache.slots, capacity);
        let live = cache.len() as i64;
        let longest = cache.lengths.iter().copied().max().unwrap_or(0);
        for (old, new) in cache.layers.drain(..).zip(&grown.layers) {
            for (old, new) in [(old.0, &new.0), (old.1, &new.1)] {
                let held = |x: &Tensor| x.narrow(0, 0, live).narrow(2, 0, longest);
                tch::no_grad(|| held(new).copy_(&held(&old)));
            }
        }
        grown.lengths = std::mem::take(&mut cache.lengths);
        *cache = grown;
    }

    /// Adds `prompts` as new sequences and returns the logits after the last token of each [P, V].
    ///
    /// # Panics
    /// When a prompt is empty, or the prompts do not fit.
    pub fn prefill_batch(&self, prompts: &[&[i64]], cache: &mut BatchCache) -> Tensor {
        let lengths: Vec<i64> = prompts.iter().map(|prompt| prompt.len() as i64).collect();
        assert!(cache.len() + prompts.len() <= cache.slots, "more prompts than free slots");
        assert!(lengths.iter().all(|&length| (1..=cache.capacity).contains(&length)));
        let mut starts = vec![0i64];
        starts.extend(lengths.iter().scan(0, |end, length| {
            *end += length;
            Some(*end)
        }));
        let device = self.embedding_vh.device();
        let ids_t = Tensor::from_slice(&prompts.concat()).to_device(device);
        let last = Tensor::from_slice(&starts[1..]).to_device(device) - 1;
        tch::no_grad(|| {
            let tables = cache.tables.select(&super::document_positions(&starts, device));
            let mut attention = PrefillAttention { cache, starts: &starts };
            let run = self.run(&ids_t, &tables, &mut attention, &[], self.num_layers());
            cache.lengths.extend(lengths);
            self.logits(&run.hidden_td.index_select(0, &last))
        })
    }

    /// Appends one token to every sequence: `ids_b` in slot order. Returns their logits [B, V].
    ///
    /// # Panics
    /// When a sequence is full.
    pub fn decode_batch(&self, ids_b: &[i64], cache: &mut BatchCache) -> Tensor {
        assert_eq!(ids_b.len(), cache.len(), "one token per sequence");
        let longest = cache.lengths.iter().copied().max().unwrap_or(0);
        assert!(longest < cache.capacity, "a sequence is full");
        let device = self.embedding_vh.device();
        let ids = Tensor::from_slice(ids_b).to_device(device);
        tch::no_grad(|| {
            let positions_b = Tensor::from_slice(&cache.lengths).to_device(device);
            let tables = cache.tables.select(&positions_b);
            let slots_b = Tensor::arange(ids_b.len() as i64, (Kind::Int64, device));
            let mut attention = DecodeAttention {
                cache,
                positions_b,
                slots_b,
                keys: longest + 1,
                masks: Masks::default(),
            };
            let run = self.run(&ids, &tables, &mut attention, &[], self.num_layers());
            cache.lengths.iter_mut().for_each(|length| *length += 1);
            self.logits(&run.hidden_td)
        })
    }
}

/// Prompts see themselves; their keys and values go to the next free slots.
struct PrefillAttention<'a> {
    cache: &'a BatchCache,
    starts: &'a [i64],
}

impl Attend for PrefillAttention<'_> {
    fn attend(&mut self, place: Place, projected: &Projected) -> Tensor {
        let (k_bmsd, v_bmsd) = &self.cache.layers[place.layer];
        let first_slot = self.cache.lengths.len() as i64;
        let documents: Vec<Tensor> = self
            .starts
            .windows(2)
            .enumerate()
            .map(|(number, bounds)| {
                let length = bounds[1] - bounds[0];
                let document = projected.narrow(bounds[0], length);
                for (x, rows) in [(k_bmsd, &document.k_tmd), (v_bmsd, &document.v_tmd)] {
                    let slot = x.narrow(0, first_slot + number as i64, 1);
                    slot.narrow(2, 0, length).copy_(&heads_first(rows));
                }
                causal(&document, place.window)
            })
            .collect();
        Tensor::cat(&documents, 0)
    }
}

/// One token of each sequence sees its own cache row.
struct DecodeAttention<'a> {
    cache: &'a BatchCache,
    positions_b: Tensor,
    slots_b: Tensor,
    /// Keys of the longest sequence, the new token included.
    keys: i64,
    masks: Masks,
}

impl Attend for DecodeAttention<'_> {
    fn attend(&mut self, place: Place, projected: &Projected) -> Tensor {
        let (k_bmsd, v_bmsd) = &self.cache.layers[place.layer];
        let at = [Some(&self.slots_b), None, Some(&self.positions_b)];
        for (x, rows) in [(k_bmsd, &projected.k_tmd), (v_bmsd, &projected.v_tmd)] {
            let _ = x.shallow_clone().index_put_(&at, rows, false);
        }
        let (size, key_heads) = (projected.q_tnd.size(), k_bmsd.size()[1]);
        let groups = size[1] / key_heads;
        // [B, 1, groups, keys]: a sequence ends at its own position.
        let mask = self.masks.of(place.window, || {
            let key = Tensor::arange(self.keys, (Kind::Int64, k_bmsd.device()));
            causal_mask(&self.positions_b, &key, place.window, k_bmsd.kind())
                .view([-1, 1, 1, self.keys])
                .expand([-1, -1, groups, -1], false)
        });
        let live = |x: &Tensor| x.narrow(0, 0, size[0]).narrow(2, 0, self.keys);
        let q = projected.q_tnd.reshape([size[0], key_heads, groups, size[2]]);
        attention(&q, &live(k_bmsd), &live(v_bmsd), (Some(&mask), false), projected.kernels)
            .reshape([size[0], size[1] * size[2]])
    }
}
