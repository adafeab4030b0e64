//! Many sequences decoded together: one product for all of them, a cache row for each.
//!
//! Used to answer many prompts (regeneration). Sequences sit in slots `0..len()`; a finished one is
//! removed by moving the last slot into its place, so the products always run over live sequences
//! only. Shapes: `b` slots, `n` query heads, `m` key heads, `s` capacity, `d` head dimension.

use tch::{Kind, Tensor};

use super::Target;
use super::blocks::latent::Latent;
use super::layer::{Attend, Memory, Pass, Place, Projected, Recurrence, Scores, State};
use super::packed::{Masks, PackedAttention, causal_mask, heads_first};
use super::rotary::HeadTables;
use crate::ops::scored_attention;

/// Keys and values of up to a fixed number of sequences.
#[derive(Debug)]
pub struct BatchCache {
    layers: Vec<Held>,
    tables: Vec<HeadTables>,
    lengths: Vec<i64>,
    slots: usize,
    capacity: i64,
}

/// What it holds for a layer.
#[derive(Debug)]
enum Held {
    /// Keys [slots, heads, capacity, D] and values [slots, heads, capacity, E].
    Keys(Tensor, Tensor),
    /// The state of each sequence.
    States(Vec<State>),
    Nothing,
}

impl Held {
    fn keys(&self) -> (&Tensor, &Tensor) {
        if let Self::Keys(k, v) = self { (k, v) } else { panic!("the layer keeps no keys") }
    }

    fn states(&mut self) -> &mut Vec<State> {
        if let Self::States(states) = self { states } else { panic!("the layer carries no state") }
    }
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

    /// Rotary tables of `positions` `[T]`.
    fn select(&self, positions: &Tensor) -> Vec<HeadTables> {
        self.tables.iter().map(|tables| tables.select(positions)).collect()
    }

    /// Drops the sequence in `slot`; the last one takes its place, as in `Vec::swap_remove`.
    pub fn swap_remove(&mut self, slot: usize) {
        let last = self.lengths.len() - 1;
        let length = self.lengths[last];
        self.lengths.swap_remove(slot);
        for layer in &mut self.layers {
            match layer {
                Held::Keys(k_bmsd, v_bmse) if slot != last => {
                    for x in [k_bmsd, v_bmse] {
                        let row = |slot: usize| x.get(slot as i64).narrow(1, 0, length);
                        row(slot).copy_(&row(last));
                    }
                }
                Held::States(states) => drop(states.swap_remove(slot)),
                _ => {}
            }
        }
    }
}

impl Target {
    /// An empty cache for `slots` sequences of at most `capacity` tokens.
    pub fn new_batch_cache(&self, slots: usize, capacity: usize) -> BatchCache {
        let (kind, device) = (self.dtype(), self.device());
        // Zeros, not garbage: rows beyond a sequence's end get weight 0, and 0 * NaN is NaN.
        let zeros = |heads: i64, dim: i64| {
            Tensor::zeros([slots as i64, heads, capacity as i64, dim], (kind, device))
        };
        let held = |memory: Memory| match memory {
            Memory::Keys { heads, key_dim, value_dim } => {
                Held::Keys(zeros(heads, key_dim), zeros(heads, value_dim))
            }
            Memory::Latent { key_dim, value_dim } => {
                let k_bmsd = zeros(1, key_dim);
                let v_bmse = k_bmsd.narrow(3, 0, value_dim);
                Held::Keys(k_bmsd, v_bmse)
            }
            Memory::State => Held::States(Vec::new()),
            Memory::Nothing => Held::Nothing,
        };
        let positions = Tensor::arange(capacity as i64, (Kind::Int64, device));
        BatchCache {
            layers: self.body.layers.iter().map(|layer| held(layer.memory())).collect(),
            tables: self.body.tables(&positions, kind),
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
        for (old, new) in cache.layers.drain(..).zip(&mut grown.layers) {
            match (old, new) {
                (Held::Keys(old_k, old_v), Held::Keys(k, v)) => {
                    for (old, new) in [(old_k, k), (old_v, v)] {
                        let held = |x: &Tensor| x.narrow(0, 0, live).narrow(2, 0, longest);
                        tch::no_grad(|| held(new).copy_(&held(&old)));
                    }
                }
                (states, new) => *new = states,
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
        let device = self.device();
        let ids_t = Tensor::from_slice(&prompts.concat()).to_device(device);
        let last = Tensor::from_slice(&starts[1..]).to_device(device) - 1;
        tch::no_grad(|| {
            let positions_t = super::document_positions(&starts, device);
            let tables = super::of_documents(cache.select(&positions_t), &starts);
            let mut attention = PrefillAttention { cache, starts: &starts };
            let pass = Pass::new(&tables, &positions_t, &mut attention);
            let run = self.run(&ids_t, pass, &[], self.num_layers());
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
        let device = self.device();
        let ids = Tensor::from_slice(ids_b).to_device(device);
        tch::no_grad(|| {
            let positions_b = Tensor::from_slice(&cache.lengths).to_device(device);
            let tables = cache.select(&positions_b);
            let positions_t = positions_b.shallow_clone();
            let slots_b = Tensor::arange(ids_b.len() as i64, (Kind::Int64, device));
            let mut attention = DecodeAttention {
                cache,
                positions_b,
                slots_b,
                keys: longest + 1,
                masks: Masks::default(),
            };
            let pass = Pass::new(&tables, &positions_t, &mut attention);
            let run = self.run(&ids, pass, &[], self.num_layers());
            cache.lengths.iter_mut().for_each(|length| *length += 1);
            self.logits(&run.hidden_td)
        })
    }
}

/// Prompts see themselves; their keys and values go to the next free slots.
struct PrefillAttention<'a> {
    cache: &'a mut BatchCache,
    starts: &'a [i64],
}

impl PrefillAttention<'_> {
    /// Writes the keys and values of each prompt into its slot.
    fn store(&self, layer: usize, k_tmd: &Tensor, v_tme: &Tensor) {
        let (k_bmsd, v_bmse) = self.cache.layers[layer].keys();
        let first_slot = self.cache.lengths.len() as i64;
        for (number, bounds) in self.starts.windows(2).enumerate() {
            let length = bounds[1] - bounds[0];
            for (x, rows) in [(k_bmsd, k_tmd), (v_bmse, v_tme)] {
                let slot = x.narrow(0, first_slot + number as i64, 1);
                slot.narrow(2, 0, length).copy_(&heads_first(&rows.narrow(0, bounds[0], length)));
            }
        }
    }
}

impl Attend for PrefillAttention<'_> {
    fn attend(&mut self, place: Place<'_>, projected: &Projected) -> Tensor {
        self.store(place.layer, &projected.k_tmd, &projected.v_tme);
        PackedAttention::new(self.starts).attend(place, projected)
    }

    fn attend_latent(&mut self, place: Place<'_>, latent: &Latent<'_>) -> Tensor {
        let kept = &latent.kept_t1c;
        self.store(place.layer, kept, &latent.up.latents(kept));
        PackedAttention::new(self.starts).attend_latent(place, latent)
    }

    fn scan(&mut self, layer: usize, recurrence: &dyn Recurrence, inputs_tc: &Tensor) -> Tensor {
        let states = self.cache.layers[layer].states();
        let zero = recurrence.zero(inputs_tc);
        let documents: Vec<Tensor> = self
            .starts
            .windows(2)
            .map(|bounds| {
                let document = inputs_tc.narrow(0, bounds[0], bounds[1] - bounds[0]);
                let (output, after) = recurrence.run(&document, &zero);
                states.push(after);
                output
            })
            .collect();
        Tensor::cat(&documents, 0)
    }
}

/// One token of each sequence sees its own cache row.
struct DecodeAttention<'a> {
    cache: &'a mut BatchCache,
    positions_b: Tensor,
    slots_b: Tensor,
    /// Keys of the longest sequence, the new token included.
    keys: i64,
    masks: Masks,
}

impl Attend for DecodeAttention<'_> {
    fn attend(&mut self, place: Place<'_>, projected: &Projected) -> Tensor {
        let (k_bmsd, v_bmse) = self.cache.layers[place.layer].keys();
        let at = [Some(&self.slots_b), None, Some(&self.positions_b)];
        for (x, rows) in [(k_bmsd, &projected.k_tmd), (v_bmse, &projected.v_tme)] {
            let _ = x.shallow_clone().index_put_(&at, rows, false);
        }
        let (size, key_heads) = (projected.q_tnd.size(), k_bmsd.size()[1]);
        let groups = size[1] / key_heads;
        // [B, 1, groups, keys]: a sequence ends at its own position.
        let mask = self.masks.of(place.reach, || {
            let key = Tensor::arange(self.keys, (Kind::Int64, k_bmsd.device()));
            causal_mask(&self.positions_b, &key, place.reach, k_bmsd.kind())
                .view([-1, 1, 1, self.keys])
                .expand([-1, -1, groups, -1], false)
        });
        let live = |x: &Tensor| x.narrow(0, 0, size[0]).narrow(2, 0, self.keys);
        let q = projected.q_tnd.reshape([size[0], key_heads, groups, size[2]]);
        let (k, v, mask) = (live(k_bmsd), live(v_bmse), (Some(&mask), false));
        let attend =
            |scores: Scores<'_>| scored_attention(&q, &k, &v, mask, scores, projected.kernels);
        place.scores.folded(key_heads, attend).reshape([size[0], -1])
    }

    fn scan(&mut self, layer: usize, recurrence: &dyn Recurrence, inputs_bc: &Tensor) -> Tensor {
        recurrence.step(inputs_bc, self.cache.layers[layer].states())
    }
}
