//! The target model: the verifier whose hidden states condition the draft.
//!
//! Three ways to run it share one stack of layers: [`Target::forward_packed`] over whole documents
//! (training, the hidden-state server), [`Target::forward_cached`] over one growing sequence, and
//! [`Target::forward_sequences`] over several (decoding). Layer ids: 0 = embedding output, k =
//! after k layers, n = before the final norm. Shapes: `t` tokens, `h` hidden, `v` vocabulary.

use std::cell::OnceCell;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use dflash_kernels::decode::Layout;
use dflash_kernels::kernels::Kernels;
use dflash_tensor::checkpoint::write_safetensors_as;
use dflash_tensor::ops::{Rotary, most_likely, rms_norm};
use dflash_tensor::weights::{DEFAULT_PREFIX, EMBEDDING, LM_HEAD};
use dflash_tensor::{DeviceKind, Result, Weights};
use tch::{Device, Kind, Tensor, no_grad};

use crate::cache::CachedAttention;
use crate::embedding::Embedding;
use crate::families::Prepare;
use crate::head::FINAL_NORM;
use crate::layer::{Layer, Memory, Pass, RmsNorm};
use crate::packed::PackedAttention;
use crate::packed_weight::{PackedWeight, Packing};
use crate::parallel::Shard;
use crate::parameters::{Init, Linear, LinearSpec, Outputs, Split};
use crate::rotary::HeadTables;
use crate::{KvCache, PackedDecoder, TargetConfig};

/// Device and precision of a target.
#[derive(Debug, Clone, Copy)]
pub struct TargetOptions {
    /// The device.
    pub device: Device,
    /// Type of weights and activations, regardless of the checkpoint.
    pub dtype: Kind,
}

/// A causal language model.
#[derive(Debug)]
pub struct Target {
    pub(crate) config: TargetConfig,
    pub(crate) embedding: Embedding,
    pub(crate) body: Body,
    pub(crate) norm: RmsNorm,
    pub(crate) lm_head: LmHead,
    pub(crate) kernels: Kernels,
    /// Packed weights for few rows on a CPU; inner `None` if not supported.
    pub(crate) packed_decoder: OnceCell<Option<PackedDecoder>>,
}

/// The output projection.
#[derive(Debug)]
pub(crate) enum LmHead {
    /// The embedding, with a transposed copy if it is small enough.
    Tied { transposed_hv: Option<Tensor> },
    /// A separate matrix.
    Own(Linear),
}

/// Result of a cached forward pass, in the target's type, or float32 if it comes from the packed
/// path.
#[derive(Debug)]
pub struct CachedOutput {
    /// Residual stream of the new tokens before the final norm [T, H].
    pub hidden_td: Tensor,
    /// Auxiliary hidden states, one [T, H] per requested id, in order.
    pub aux_states: Vec<Tensor>,
}

/// Tied lm_heads up to this size are also kept transposed: halves the time of few-row products for
/// at most 256 MiB.
const TRANSPOSED_HEAD_ELEMENTS: usize = 64 << 20;

impl Target {
    /// Loads a Hugging Face directory for decoding. If few rows can use packed layers, weights are
    /// packed while they are read and held in no other form.
    ///
    /// # Errors
    /// No config.json, an unsupported architecture, a missing or damaged shard, a missing tensor or
    /// one whose shape differs from config.json (each named).
    pub fn load(dir: &Path, options: &TargetOptions) -> Result<Self> {
        let config = TargetConfig::load(dir)?;
        let weights = Weights::open(dir)?;
        let prefix = weights.prefix();
        let place = DeviceKind { device: options.device, kind: options.dtype };
        let wanted = |name: &str| {
            name.starts_with(weights.lm_head())
                || is_of_layers(name, prefix, &(0..config.num_hidden_layers))
        };
        weights.begin_load(wanted)?;
        let packing = Packing::of(&config, &weights, place, wanted)?;
        let (weights, shard) = (Some(&weights), Shard::WHOLE);
        let init = Init { weights, place, prefix, shard, packing };
        no_grad(|| {
            let mut target = Self::build(config, &init)?;
            target.transpose_tied_head();
            Ok(target)
        })
    }

    /// A randomly initialised trainable target: float32 weights that require gradients, drawn from
    /// `seed`.
    pub fn random(config: TargetConfig, seed: i64, device: Device) -> Self {
        tch::manual_seed(seed);
        let (place, prefix) = (DeviceKind { device, kind: Kind::Float }, DEFAULT_PREFIX);
        let (weights, shard, packing) = (None, Shard::WHOLE, None);
        let init = Init { weights, place, prefix, shard, packing };
        Self::build(config, &init).expect("fresh weights come from no file")
    }

    pub(crate) fn build(config: TargetConfig, init: &Init) -> Result<Self> {
        let (rows, hidden) = (config.vocab_size, config.hidden_size);
        let embedding = Self::embedding(&config, init)?;
        let lm_head = match config.tie_word_embeddings {
            true => LmHead::Tied { transposed_hv: None },
            false => {
                let part = init.weights.map_or(LM_HEAD, Weights::lm_head);
                let spec = LinearSpec {
                    module: "",
                    name: LM_HEAD,
                    parts: &[(part, Outputs::Even(rows))],
                    input: hidden,
                    bias: false,
                    split: Split::Whole,
                };
                LmHead::Own(init.packable(&spec, Layout::Plain)?)
            }
        };
        let body = Body::build(&config, 0..config.num_hidden_layers, init)?;
        let norm = init.rms_norm(&init.path(FINAL_NORM), hidden, &config)?;
        let kernels = Kernels::Fast;
        let packed_decoder = OnceCell::new();
        Ok(Self { config, embedding, body, norm, lm_head, kernels, packed_decoder })
    }

    /// The embedding; for a packed target with tied weights, the output projection.
    fn embedding(config: &TargetConfig, init: &Init) -> Result<Embedding> {
        let (name, rows) = (init.path(EMBEDDING), config.vocab_size);
        let shape = [rows, config.hidden_size];
        let DeviceKind { device, kind } = init.place;
        match (init.weights, init.packing) {
            (Some(weights), Some(packing)) if config.tie_word_embeddings => {
                let (rows, input) = (&[(name, rows)][..], config.hidden_size);
                let weight = PackedWeight::read(weights, rows, input, packing, Layout::Plain)?;
                Ok(Embedding::shared(weight.into_matrix(), kind))
            }
            (Some(weights), Some(_)) if weights.is_bfloat16(&name)? => {
                let stored = DeviceKind { device, kind: Kind::BFloat16 };
                let table_vh = weights.read(&name, &shape, stored)?;
                Ok(Embedding::stored_as(table_vh, kind))
            }
            _ => Ok(Embedding::table(init.matrix(&name, &shape)?)),
        }
    }

    /// Selects the kernels. Only the fast ones read packed weights; others get unpacked ones.
    pub fn with_kernels(mut self, kernels: Kernels) -> Self {
        self.kernels = kernels;
        if kernels != Kernels::Fast {
            self.embedding = Embedding::table(self.embedding.whole().contiguous());
            if let LmHead::Own(linear) = &mut self.lm_head {
                linear.unpack();
            }
            self.transpose_tied_head();
        }
        self.packed_decoder = OnceCell::new();
        self.norm.kernels = kernels;
        self.body.layers.iter_mut().for_each(|layer| layer.set_kernels(kernels));
        self
    }

    fn transpose_tied_head(&mut self) {
        let embedding = &self.embedding;
        // A packed embedding is multiplied directly.
        let copied = embedding.matrix().is_none() && embedding.numel() <= TRANSPOSED_HEAD_ELEMENTS;
        if let LmHead::Tied { transposed_hv } = &mut self.lm_head {
            *transposed_hv = copied.then(|| embedding.whole().tr().contiguous());
        }
    }

    /// The configuration.
    pub fn config(&self) -> &TargetConfig {
        &self.config
    }

    /// Number of decoder layers; also the layer id of the last hidden state.
    pub fn num_layers(&self) -> usize {
        self.body.layers.len()
    }

    /// Width H of the residual stream.
    pub fn hidden_size(&self) -> i64 {
        self.config.hidden_size
    }

    /// Number of embedding rows.
    pub fn vocab_size(&self) -> i64 {
        self.config.vocab_size
    }

    /// The device the target runs on.
    pub fn device(&self) -> Device {
        self.embedding.device()
    }

    /// Type of the activations.
    pub fn dtype(&self) -> Kind {
        self.embedding.kind()
    }

    /// Embeddings [T, H] of `ids_t` `[T]` (int64, on the target's device): the state of layer id 0.
    pub fn embed(&self, ids_t: &Tensor) -> Tensor {
        self.stack().embed(ids_t)
    }

    /// Embedding rows [T, H] of `ids_t` `[T]` as stored, the draft's input.
    pub fn rows(&self, ids_t: &Tensor) -> Tensor {
        self.embedding.rows(ids_t)
    }

    /// Final norm of `hidden_td` [T, H], in the target's type.
    pub fn normed(&self, hidden_td: &Tensor) -> Tensor {
        self.norm.of(&hidden_td.to_kind(self.dtype()))
    }

    /// Logits [T, V] of `hidden_td` [T, H], the residual stream before the final norm.
    pub fn logits(&self, hidden_td: &Tensor) -> Tensor {
        let few = self.few_logits(hidden_td, false);
        few.unwrap_or_else(|| self.lm_head(&self.normed(hidden_td)))
    }

    /// Argmax token `[T]` (int64) for each row of `hidden_td` [T, H], the residual stream before
    /// the final norm; the first of equal logits wins.
    pub fn most_likely(&self, hidden_td: &Tensor) -> Tensor {
        let few = self.few_most_likely(hidden_td, false);
        few.unwrap_or_else(|| most_likely(&self.logits(hidden_td)))
    }

    /// [`Self::most_likely`] for states that are already normed.
    pub fn most_likely_of_normed(&self, normed_td: &Tensor) -> Tensor {
        let few = self.few_most_likely(normed_td, true);
        few.unwrap_or_else(|| most_likely(&self.lm_head(normed_td)))
    }

    /// Logits [T, V] of already normed states, the target's or the draft's.
    pub fn lm_head(&self, normed_td: &Tensor) -> Tensor {
        if let Some(logits_tv) = self.few_logits(normed_td, true) {
            return logits_tv;
        }
        let logits_tv = match &self.lm_head {
            LmHead::Own(linear) => linear.apply(normed_td),
            LmHead::Tied { transposed_hv: Some(lm_head_hv) } => normed_td.mm(lm_head_hv),
            LmHead::Tied { transposed_hv: None } => normed_td.mm(&self.embedding.whole().tr()),
        };
        self.config.outer.capped(logits_tv)
    }

    /// lm_head columns [H, v] of `ids_v` `[v]` (int64, on the target's device): the output
    /// projection for a draft's pruned vocabulary. A copy, since contiguous memory halves the time
    /// of few-row products.
    pub fn lm_head_columns(&self, ids_v: &Tensor) -> Tensor {
        match &self.lm_head {
            LmHead::Own(linear) => linear.columns(ids_v),
            LmHead::Tied { .. } => self.embedding.rows(ids_v).tr().contiguous(),
        }
    }

    /// Logits [T, v] of the tokens `ids_v`, in float32 regardless of the target's type, so nothing
    /// is rounded beyond the states `hidden_td` [T, H].
    pub fn logits_f32(&self, hidden_td: &Tensor, ids_v: &Tensor) -> Tensor {
        let f32 = |tensor: &Tensor| tensor.to_kind(Kind::Float);
        let normed_td = rms_norm(&f32(hidden_td), &f32(&self.norm.weight), self.norm.eps);
        self.config.outer.capped(normed_td.mm(&f32(&self.lm_head_columns(ids_v))))
    }

    /// Hidden states of packed documents: one [T, H] for each id of `aux_layers`, in order.
    ///
    /// `ids_t` is `[T]`; `document_starts` holds the first token of each document and, last, T. A
    /// document attends only to itself and counts its positions from 0. Layers beyond the highest
    /// id are not run. Differentiable if the weights require gradients.
    ///
    /// # Panics
    /// If an id exceeds the number of layers (see [`crate::check_layer_ids`]).
    pub fn forward_packed(
        &self,
        ids_t: &Tensor,
        document_starts: &[i64],
        aux_layers: &[u32],
    ) -> Vec<Tensor> {
        self.stack().packed_states(ids_t, document_starts, aux_layers)
    }

    pub(crate) fn stack(&self) -> Stack<'_> {
        Stack { embedding: &self.embedding, body: &self.body, stop: None }
    }

    /// Whether layers carry a recurrent state, so that a cache can be truncated and copied only at
    /// few lengths (see [`KvCache::earliest`]).
    pub fn carries_state(&self) -> bool {
        self.body.layers.iter().any(|layer| layer.memory() == Memory::State)
    }

    /// Longest prompt, in tokens, that may be read in pieces; `None` for no limit. With LongRoPE a
    /// longer prompt needs its length in the first pass to select frequencies.
    pub fn longest_in_pieces(&self) -> Option<usize> {
        let long = self.body.rotaries.iter().filter_map(|rotary| rotary.long.as_ref());
        long.map(|long| long.beyond as usize).min()
    }

    /// An empty cache for at most `max_tokens`.
    pub fn new_cache(&self, max_tokens: usize) -> KvCache {
        let few = self.packed_decoder().map(PackedDecoder::stack);
        let place = DeviceKind { device: self.device(), kind: self.dtype() };
        KvCache::new(&self.body, place, few, max_tokens)
    }

    /// Appends `ids_t` `[T]` to the cached sequence. Never records gradients.
    ///
    /// # Panics
    /// If the cache is too small, or an id of `aux_layers` exceeds the number of layers.
    pub fn forward_cached(
        &self,
        ids_t: &Tensor,
        cache: &mut KvCache,
        aux_layers: &[u32],
    ) -> CachedOutput {
        let tokens = ids_t.size()[0];
        no_grad(|| {
            let few = self
                .packed_decoder()
                .filter(|few| few.takes(tokens) && cache.packed_cache(tokens).is_some());
            if let Some(few) = few {
                return self.forward_few(few, ids_t, &mut [(cache, tokens as usize)], aux_layers);
            }
            let mut attention = CachedAttention::new(cache, tokens);
            let tables = attention.tables(tokens);
            let positions_t = attention.positions(tokens, self.device());
            let pass = Pass::new(&tables, &positions_t, &mut attention);
            let output = self.run(ids_t, pass, aux_layers, self.num_layers());
            cache.advance(tokens);
            output
        })
    }

    pub(crate) fn run(
        &self,
        ids_t: &Tensor,
        pass: Pass<'_>,
        aux_layers: &[u32],
        until: usize,
    ) -> CachedOutput {
        self.stack().run(ids_t, pass, aux_layers, until)
    }

    /// Every trainable tensor with its name; q/k/v and gate/up are fused.
    pub fn parameters(&self) -> Vec<(String, Tensor)> {
        let mut parameters = self.outer_tensors();
        parameters.extend(self.body.layers.iter().flat_map(|layer| layer.parameters()));
        if let LmHead::Own(linear) = &self.lm_head {
            parameters.extend(linear.parameters());
        }
        parameters
    }

    /// Writes config.json and model.safetensors in Hugging Face's format, weights in `kind`
    /// (float32 or bf16). Each file is written atomically.
    ///
    /// # Errors
    /// I/O.
    pub fn save(&self, dir: &Path, kind: Kind) -> Result<()> {
        std::fs::create_dir_all(dir).map_err(dflash_io::Error::io("create", dir))?;
        let mut tensors = self.outer_tensors();
        tensors.extend(self.body.layers.iter().flat_map(|layer| layer.checkpoint()));
        if let LmHead::Own(linear) = &self.lm_head {
            tensors.extend(linear.checkpoint());
        }
        write_safetensors_as(&dir.join("model.safetensors"), &tensors, Some(kind))?;
        let dtype = if kind == Kind::BFloat16 { "bfloat16" } else { "float32" };
        let path = dir.join("config.json");
        let config = format!("{:#}", self.config.to_json(dtype));
        Ok(dflash_io::write_bytes(&path, config.as_bytes())?)
    }

    fn outer_tensors(&self) -> Vec<(String, Tensor)> {
        vec![
            (format!("{DEFAULT_PREFIX}{EMBEDDING}"), self.embedding.whole()),
            (format!("{DEFAULT_PREFIX}{FINAL_NORM}"), self.norm.weight.shallow_clone()),
        ]
    }
}

/// Embedding and layers.
#[derive(Clone, Copy)]
pub(crate) struct Stack<'a> {
    pub(crate) embedding: &'a Embedding,
    pub(crate) body: &'a Body,
    /// Cancels a pass: once set, its result is not used.
    pub(crate) stop: Option<&'a AtomicBool>,
}

/// The layers, and what they share.
#[derive(Debug)]
pub(crate) struct Body {
    pub(crate) layers: Vec<Box<dyn Layer>>,
    pub(crate) rotaries: Vec<Rotary>,
    pub(crate) prepare: Option<Box<dyn Prepare>>,
    pub(crate) embedding_scale: f64,
}

impl Body {
    /// Builds `layers`, counted from 0.
    pub(crate) fn build(config: &TargetConfig, layers: Range<usize>, init: &Init) -> Result<Self> {
        let architecture = config.family.architecture();
        let layer = |number| architecture.layer(config, number, init);
        let first = layers.start == 0;
        Ok(Self {
            layers: layers.map(layer).collect::<Result<_>>()?,
            rotaries: architecture.rotaries(init.place.device),
            // Later stages receive its result from the first stage.
            prepare: if first { architecture.prepare(config, init)? } else { None },
            embedding_scale: config.outer.embedding_scale,
        })
    }

    /// Rotary tables of `positions` `[T]` in `kind`, one per rotary embedding of the layers.
    pub(crate) fn tables(&self, positions: &Tensor, kind: Kind) -> Vec<HeadTables> {
        self.rotaries.iter().map(|rotary| HeadTables::new(rotary, positions, kind)).collect()
    }
}

impl Stack<'_> {
    /// As [`Target::forward_packed`].
    pub(crate) fn packed_states(
        self,
        ids_t: &Tensor,
        document_starts: &[i64],
        aux_layers: &[u32],
    ) -> Vec<Tensor> {
        let positions = document_positions(document_starts, self.embedding.device());
        let tables = self.body.tables(&positions, self.embedding.kind());
        let tables = of_documents(tables, document_starts);
        let until = aux_layers.iter().copied().max().unwrap_or(0) as usize;
        let mut attention = PackedAttention::new(document_starts);
        let pass = Pass::new(&tables, &positions, &mut attention);
        self.run(ids_t, pass, aux_layers, until).aux_states
    }

    /// The state of layer id 0 [T, H].
    pub(crate) fn embed(self, ids_t: &Tensor) -> Tensor {
        let x_th = self.embedding.rows(ids_t);
        if self.body.embedding_scale == 1.0 {
            return x_th;
        }
        let kind = x_th.kind();
        x_th * Tensor::from(self.body.embedding_scale).to_kind(kind)
    }

    pub(crate) fn run(
        self,
        ids_t: &Tensor,
        mut pass: Pass<'_>,
        aux_layers: &[u32],
        until: usize,
    ) -> CachedOutput {
        let wanted = |id: usize| aux_layers.iter().any(|&aux_layer| aux_layer as usize == id);
        let mut x_th = self.embed(ids_t);
        pass.prepared = self.body.prepare.as_ref().map(|prepare| prepare.of(ids_t, &x_th));
        let mut states = vec![wanted(0).then(|| x_th.shallow_clone())];
        for layer in &self.body.layers[..until] {
            // A cancelled pass skips the layers; its result is not used.
            if !self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                x_th = layer.forward(&x_th, &mut pass);
            }
            states.push(wanted(states.len()).then(|| x_th.shallow_clone()));
        }
        let state = |&id: &u32| states[id as usize].as_ref().expect("kept above").shallow_clone();
        CachedOutput { aux_states: aux_layers.iter().map(state).collect(), hidden_td: x_th }
    }
}

/// `tables` for positions of whole documents.
pub(crate) fn of_documents(tables: Vec<HeadTables>, document_starts: &[i64]) -> Vec<HeadTables> {
    let documents = || document_starts.windows(2).map(|bounds| (bounds[0], bounds[1] - bounds[0]));
    tables.into_iter().map(|tables| tables.with_first_passes(documents())).collect()
}

/// Whether tensor `name` is the text model's and belongs to one of `layers`, or to no layer.
fn is_of_layers(name: &str, prefix: &str, layers: &Range<usize>) -> bool {
    let Some(name) = name.strip_prefix(prefix) else { return false };
    layer_of(name).is_none_or(|layer| layers.contains(&layer))
}

/// Whether tensor `name` is needed for `layers`, or is the embedding and that `is_wanted`.
pub(crate) fn is_of_part(
    name: &str,
    prefix: &str,
    config: &TargetConfig,
    layers: &Range<usize>,
    is_wanted: bool,
) -> bool {
    let Some(name) = name.strip_prefix(prefix) else { return false };
    match layer_of(name) {
        Some(layer) => layers.contains(&layer),
        None if name == EMBEDDING => is_wanted,
        None => layers.start == 0 && config.family.architecture().prepared_names().contains(&name),
    }
}

/// The layer of a text model tensor, from its name.
fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("layers.")?.split_once('.')?.0.parse().ok()
}

/// Position of every token within its document `[T]`.
pub(crate) fn document_positions(document_starts: &[i64], device: Device) -> Tensor {
    let positions: Vec<i64> =
        document_starts.windows(2).flat_map(|bounds| 0..bounds[1] - bounds[0]).collect();
    Tensor::from_slice(&positions).to_device(device)
}
