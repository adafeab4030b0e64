//! The target's packed CPU path for few rows: the packed layers and lm_head of
//! [`dflash_kernels::decode`].
//!
//! Up to 512 rows of a call over a cache (one token, a block to verify or to draft, accepted
//! context) run through all layers in one C++ call. Each weight is read once, by threads that
//! synchronise at spinning barriers. Each output is summed by one thread in a fixed order, whatever
//! the number of rows and threads, so a verified block equals plain decoding to the bit and near
//! ties cannot make texts differ. A call takes rows of one or several sequences, each with its
//! cache. Rows are float32 in products, unless the model runs in bfloat16 on a CPU with
//! AVX512-BF16; there they are rounded for the product only. Norms, attention, the residual stream
//! and the cache stay float32. Attention sums keys in chunks at fixed positions and merges them in
//! order, so the bits do not depend on how threads share a head.
//!
//! A target loaded for decoding holds only packed weights, in bfloat16 if that represents them
//! exactly. Weights are packed while the file is read, a few rows at a time; a tied embedding is
//! read from the packed output projection. Long prompts multiply the packed weights in tiles of
//! rows. Where libtorch is faster (bfloat16 without AMX), each weight is unpacked for it in
//! cache-sized parts. A target used only for packed documents (training, the hidden-state server)
//! is never packed. Drafts, and targets with plain weights, are packed when their first cache is
//! created.

use dflash_kernels::decode::{
    Embedding, Head, Layout, MAX_ROWS, Matrix, Outputs, Products, RmsWeight, Sequence, Shape,
    Stack, Weight, floats, floats_mut,
};
use dflash_kernels::kernels::Kernels;
use tch::{Kind, Tensor};

use super::packed_weight::FEW;
use super::target::LmHead;
use super::{CachedOutput, KvCache, Target};

/// Longest prompt that is read in pieces if a layer's matrices have at most [`SMALL_LAYER`]
/// elements: for products that small, libtorch's call overhead outweighs the gain from many rows at
/// once. For larger layers one piece; measurements are in LOG.md.
const MOST_TOKENS: i64 = 256;
const SMALL_LAYER: i64 = 4 << 20;

/// Maximum rows whose logits use the packed lm_head; more rows use libtorch's products.
const MAX_HEAD_ROWS: i64 = 256;

/// A target's packed weights. Methods work on slices, so a decoding step creates no tensors.
#[derive(Debug)]
pub struct PackedDecoder {
    stack: Stack,
    embedding: Embedding,
    head: Head,
    products: Products,
    /// The final norm's weight `[H]` and epsilon.
    norm: (Vec<f32>, f64),
    /// Longest prompt of one sequence that is read in pieces.
    most_tokens: i64,
}

impl PackedDecoder {
    /// Maximum rows per call.
    pub const MAX_ROWS: usize = MAX_ROWS as usize;

    /// Whether `tokens` of one sequence are better read in pieces of [`Self::MAX_ROWS`] than all at
    /// once.
    pub(super) fn takes(&self, tokens: i64) -> bool {
        (1..=self.most_tokens).contains(&tokens)
    }

    pub(super) fn stack(&self) -> &Stack {
        &self.stack
    }

    /// Bytes of weights that a step reads: layers and output projection.
    pub fn weight_bytes(&self) -> usize {
        self.matrices().map(Matrix::bytes).sum()
    }

    /// Reads the same bytes with the threads of a step and no other work. Returns their sum.
    pub fn read_weights(&self) -> u64 {
        Matrix::read_all(&self.matrices().collect::<Vec<_>>())
    }

    fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.stack.matrices().chain([self.head.matrix()])
    }

    /// Writes the embeddings [R, H] of `ids`.
    ///
    /// # Panics
    /// If an id is not in the vocabulary.
    pub fn embed(&self, ids: &[i64], x: &mut [f32]) {
        self.embedding.rows(ids, x);
    }

    /// Appends `ids` to cached sequences; `parts` gives each sequence's cache and number of tokens.
    /// `x` [R, H] receives the residual stream before the final norm, `states` [R, K, H] the states
    /// of `aux_layers`.
    ///
    /// # Panics
    /// If a cache is too small, or an id of `aux_layers` exceeds the number of layers.
    pub fn forward(
        &self,
        ids: &[i64],
        parts: &mut [(&mut KvCache, usize)],
        x: &mut [f32],
        aux_layers: &[u32],
        states: &mut [f32],
    ) {
        self.embed(ids, x);
        if let [(cache, _)] = parts {
            return self.run_one(cache, x, aux_layers, states);
        }
        let outputs = Outputs { aux_layers, states, ..Outputs::default() };
        let sequences: Vec<Sequence<'_>> =
            parts.iter().map(|(cache, rows)| sequence(cache, *rows)).collect();
        self.stack.forward(x, &sequences, outputs);
        parts.iter_mut().for_each(|(cache, rows)| cache.advance(*rows as i64));
    }

    /// Runs the embeddings `x` [R, H] of one sequence's tokens, [`Self::MAX_ROWS`] at a time.
    fn run_one(&self, cache: &mut KvCache, x: &mut [f32], aux_layers: &[u32], states: &mut [f32]) {
        let hidden = self.norm.0.len();
        let mut states = states.chunks_mut((Self::MAX_ROWS * hidden * aux_layers.len()).max(1));
        for x in x.chunks_mut(Self::MAX_ROWS * hidden) {
            let (rows, states) = (x.len() / hidden, states.next().unwrap_or_default());
            let outputs = Outputs { aux_layers, states, ..Outputs::default() };
            self.stack.forward(x, &[sequence(cache, rows)], outputs);
            cache.advance(rows as i64);
        }
    }

    /// Writes the argmax token `[R]` for each row of `x` [R, H], the residual stream before the
    /// final norm; the first of equal logits wins.
    pub fn most_likely(&self, x: &[f32], best: &mut [i64]) {
        self.head.most_likely(x, Some(self.norm()), best);
    }

    fn norm(&self) -> RmsWeight<'_> {
        RmsWeight { weight: &self.norm.0, eps: self.norm.1 }
    }

    /// [`Self::most_likely`] for states that are already normed.
    pub fn most_likely_of_normed(&self, normed: &[f32], best: &mut [i64]) {
        self.head.most_likely(normed, None, best);
    }
}

fn sequence(cache: &KvCache, rows: usize) -> Sequence<'_> {
    let held = cache.packed_cache(rows as i64).expect("a cache of packed layers");
    Sequence { cache: held, start: cache.len() as i64, rows: rows as i64 }
}

/// Packed lm_head columns of a draft's pruned vocabulary.
#[derive(Debug)]
pub struct PrunedRows {
    head: Head,
    ids: Vec<i64>,
}

impl PrunedRows {
    /// [`PackedDecoder::most_likely_of_normed`] restricted to these tokens.
    pub fn most_likely(&self, normed: &[f32], best: &mut [i64]) {
        self.head.most_likely(normed, None, best);
        best.iter_mut().for_each(|place| *place = self.ids[*place as usize]);
    }
}

impl Target {
    /// The packed weights, if few rows of this target use them: on a CPU, in float32 or bfloat16.
    pub fn packed_decoder(&self) -> Option<&PackedDecoder> {
        self.packed_decoder.get_or_init(|| self.pack()).as_ref()
    }

    /// Packs the columns `lm_head_hv` [H, v] of the tokens `ids`, if few rows are packed.
    pub fn pruned_rows(&self, lm_head_hv: &Tensor, ids: &[i64]) -> Option<PrunedRows> {
        let few = self.packed_decoder()?;
        Some(PrunedRows { head: Head::new(lm_head_hv, few.products), ids: ids.to_vec() })
    }

    fn pack(&self) -> Option<PackedDecoder> {
        let dense = self.config.family.dense()?;
        let layers = self.body.layers.iter().map(|layer| layer.packed());
        let layers: Vec<_> = layers.collect::<Option<_>>()?;
        let embedding = self.embedding.for_packed_decoder();
        let head_io = match &self.lm_head {
            LmHead::Tied { .. } if self.embedding.matrix().is_none() => self.embedding.whole().tr(),
            LmHead::Tied { .. } | LmHead::Own(_) => Tensor::new(),
        };
        let head = match (&self.lm_head, self.embedding.matrix()) {
            (LmHead::Own(linear), _) => linear.projection().weight,
            (LmHead::Tied { .. }, Some(matrix)) => Weight::Packed(matrix),
            (LmHead::Tied { .. }, None) => Weight::Plain(&head_io),
        };
        let weights = layers
            .iter()
            .flat_map(|layer| [&layer.qkv, &layer.output, &layer.gate_up, &layer.down])
            .map(|projection| projection.weight)
            .chain([head]);
        let weights: Vec<Weight<'_>> = weights.collect();
        if self.kernels != Kernels::Fast || !weights.iter().all(Weight::is_taken) {
            return None;
        }
        let products = Weight::products(&weights);
        let c = &self.config;
        let shape = Shape {
            hidden: c.hidden_size,
            inner: dense.intermediate_size,
            query_heads: dense.num_attention_heads,
            kv_heads: dense.num_key_value_heads,
            head_dim: dense.head_dim,
            eps: c.rms_norm_eps,
            causal: true,
        };
        let norm_h = self.norm.weight.to_kind(Kind::Float);
        let layer = self.config.family.architecture().layer_elements(&self.config, 0);
        let is_small = layer <= SMALL_LAYER as f64;
        Some(PackedDecoder {
            most_tokens: if is_small { MOST_TOKENS } else { FEW },
            stack: Stack::new(shape, &layers, products),
            embedding,
            head: Head::of(head.packed(products, Layout::Plain)),
            products,
            norm: (floats(&norm_h).to_vec(), c.rms_norm_eps),
        })
    }

    /// [`Target::forward_cached`] for the tokens `ids_t` of one sequence, or of several with up to
    /// [`MAX_ROWS`] together.
    pub(super) fn forward_few(
        &self,
        few: &PackedDecoder,
        ids_t: &Tensor,
        parts: &mut [(&mut KvCache, usize)],
        aux_layers: &[u32],
    ) -> CachedOutput {
        let (rows, hidden) = (ids_t.size()[0], self.hidden_size());
        let ids = Vec::<i64>::try_from(ids_t).expect("token ids are integers");
        let empty = |width: i64| Tensor::empty([rows, width], (Kind::Float, self.device()));
        let (mut hidden_td, mut states) = (empty(hidden), empty(aux_layers.len() as i64 * hidden));
        let (x, into) = (floats_mut(&mut hidden_td), floats_mut(&mut states));
        few.forward(&ids, parts, x, aux_layers, into);
        let state = |place: usize| states.narrow(1, place as i64 * hidden, hidden);
        CachedOutput { aux_states: (0..aux_layers.len()).map(state).collect(), hidden_td }
    }

    /// The packed weights, if `x_th` is few rows and they exist, or there are no others.
    fn few_for(&self, x_th: &Tensor) -> Option<&PackedDecoder> {
        let rows = x_th.size()[0];
        let most = if self.is_packed() { i64::MAX } else { MAX_HEAD_ROWS };
        if (1..=most).contains(&rows) { self.packed_decoder() } else { None }
    }

    /// Whether its output projection is only held packed.
    fn is_packed(&self) -> bool {
        match &self.lm_head {
            LmHead::Own(linear) => linear.is_packed(),
            LmHead::Tied { .. } => self.embedding.matrix().is_some(),
        }
    }

    /// Logits [T, V] of `x_th` [T, H] through the packed lm_head, after the final norm unless
    /// `is_normed`.
    pub(super) fn few_logits(&self, x_th: &Tensor, is_normed: bool) -> Option<Tensor> {
        let few = self.few_for(x_th)?;
        let size = [x_th.size()[0], few.head.outputs() as i64];
        let mut logits = Tensor::empty(size, (Kind::Float, self.device()));
        let norm = (!is_normed).then(|| few.norm());
        few.head.logits(floats(&float_rows(x_th)), norm, floats_mut(&mut logits));
        Some(logits.to_kind(self.dtype()))
    }

    /// [`Self::few_logits`] reduced to the argmax token of each row `[T]`.
    pub(super) fn few_most_likely(&self, x_th: &Tensor, is_normed: bool) -> Option<Tensor> {
        let few = self.few_for(x_th)?;
        let (x_th, mut best) = (float_rows(x_th), vec![0; x_th.size()[0] as usize]);
        match is_normed {
            true => few.most_likely_of_normed(floats(&x_th), &mut best),
            false => few.most_likely(floats(&x_th), &mut best),
        }
        Some(Tensor::from_slice(&best))
    }
}

fn float_rows(x_th: &Tensor) -> Tensor {
    x_th.to_kind(Kind::Float).contiguous()
}
