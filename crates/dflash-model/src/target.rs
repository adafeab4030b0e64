//! The target model: the verifier whose hidden states condition the draft.
//!
//! Three ways to run it share one stack of layers: [`Target::forward_packed`] over whole documents
//! (training, the hidden-state server), [`Target::forward_cached`] over one growing sequence
//! (decoding), and [`Target::decode_batch`] over many (regeneration). Hidden states are named by
//! our layer ids: 0 = embedding output, k = after k layers, n = before the final norm. Shapes: `t`
//! tokens, `h` hidden, `v` vocabulary.

mod batch;
mod cache;
mod config;
mod few_rows;
mod head;
mod layer;
mod layer_ids;
mod mask_token;
mod packed;
mod parameters;
mod rotary;
mod weights;

use std::cell::OnceCell;
use std::path::Path;

use dflash_torch_sys::kernels::Kernels;
use tch::{Device, Kind, Tensor, no_grad};

use self::cache::CachedAttention;
use self::head::{EMBEDDING, FINAL_NORM, LM_HEAD};
use self::layer::{Attend, DecoderLayer, norm};
use self::packed::PackedAttention;
use self::parameters::{Init, Linear, LinearSpec};
use self::rotary::{HeadTables, scale_frequencies};
use crate::checkpoint::write_safetensors_as;
use crate::fused::Norm;
use crate::ops::{Rotary, most_likely, rms_norm};
use crate::{Error, Result};

pub use self::batch::BatchCache;
pub use self::cache::{KvCache, SequencePart};
pub use self::config::{Family, Llama3Scaling, RopeConfig, TargetConfig};
pub use self::few_rows::{FewRows, PrunedRows};
pub use self::head::TargetHead;
pub use self::layer_ids::{check_layer_ids, default_layer_ids};
pub use self::mask_token::{TokenizerFacts, resolve_mask_token};
pub use self::weights::Weights;

/// Where and in what precision a target runs.
#[derive(Debug, Clone, Copy)]
pub struct TargetOptions {
    /// The device.
    pub device: Device,
    /// Kind of weights and activations, whatever the checkpoint stores.
    pub dtype: Kind,
}

/// A causal language model.
#[derive(Debug)]
pub struct Target {
    config: TargetConfig,
    embedding_vh: Tensor,
    layers: Vec<DecoderLayer>,
    norm_h: Tensor,
    lm_head: LmHead,
    rotary: Rotary,
    kernels: Kernels,
    /// What few rows go through on a CPU; `None` inside where they do not.
    few_rows: OnceCell<Option<FewRows>>,
}

/// The output projection.
#[derive(Debug)]
enum LmHead {
    /// The embedding, with a transposed copy where that is worth its memory.
    Tied { transposed_hv: Option<Tensor> },
    /// A matrix of its own.
    Own(Linear),
}

/// What a cached forward pass returns: of the target's kind, or float32 where it comes from few packed
/// rows.
#[derive(Debug)]
pub struct CachedOutput {
    /// Residual stream of the new tokens before the final norm [T, H].
    pub hidden_td: Tensor,
    /// The captured states, one [T, H] for each id asked for, in the order asked.
    pub captures: Vec<Tensor>,
}

/// A tied lm_head up to this many elements is also kept transposed: few-row products with it take
/// half the time, for at most 256 MiB.
const TRANSPOSED_HEAD_ELEMENTS: usize = 64 << 20;

impl Target {
    /// Loads a Hugging Face directory.
    ///
    /// # Errors
    /// No config.json, an unsupported architecture, a missing or damaged shard, a tensor that is
    /// missing or of another shape than config.json says: each named.
    pub fn load(dir: &Path, options: &TargetOptions) -> Result<Self> {
        let config = TargetConfig::load(dir)?;
        let weights = Weights::open(dir)?;
        let init = Init { weights: Some(&weights), options: (options.dtype, options.device) };
        no_grad(|| {
            let mut target = Self::build(config, &init)?;
            target.transpose_tied_head();
            Ok(target)
        })
    }

    /// A fresh trainable target: float32 weights that require gradients, drawn from `seed`.
    pub fn random(config: TargetConfig, seed: i64, device: Device) -> Self {
        tch::manual_seed(seed);
        let init = Init { weights: None, options: (Kind::Float, device) };
        Self::build(config, &init).expect("fresh weights come from no file")
    }

    fn build(config: TargetConfig, init: &Init) -> Result<Self> {
        let (rows, hidden) = (config.vocab_size, config.hidden_size);
        let embedding_vh = init.matrix(EMBEDDING, &[rows, hidden])?;
        let lm_head = match config.tie_word_embeddings {
            true => LmHead::Tied { transposed_hv: None },
            false => LmHead::Own(init.linear(&LinearSpec {
                module: "",
                name: LM_HEAD,
                parts: &[(LM_HEAD, rows)],
                input: hidden,
                bias: false,
            })?),
        };
        let layers = (0..config.num_hidden_layers)
            .map(|layer| DecoderLayer::new(&config, layer, init))
            .collect::<Result<_>>()?;
        let norm_h = init.norm(FINAL_NORM, hidden)?;
        let rotary = Rotary::new(config.head_dim, config.rope.theta, init.options.1)
            .map_frequencies(|frequency| scale_frequencies(&config.rope, frequency));
        let kernels = Kernels::Fast;
        let few_rows = OnceCell::new();
        Ok(Self { config, embedding_vh, layers, norm_h, lm_head, rotary, kernels, few_rows })
    }

    /// The same target, computed by `kernels`.
    pub fn with_kernels(mut self, kernels: Kernels) -> Self {
        self.kernels = kernels;
        self.few_rows = OnceCell::new();
        self.layers.iter_mut().for_each(|layer| layer.kernels = kernels);
        self
    }

    fn transpose_tied_head(&mut self) {
        let embedding_vh = &self.embedding_vh;
        let small = embedding_vh.numel() <= TRANSPOSED_HEAD_ELEMENTS;
        if let LmHead::Tied { transposed_hv } = &mut self.lm_head {
            *transposed_hv = small.then(|| embedding_vh.tr().contiguous());
        }
    }

    /// The configuration.
    pub fn config(&self) -> &TargetConfig {
        &self.config
    }

    /// Decoder layers, and the layer id of the last hidden state.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Width H of the residual stream.
    pub fn hidden_size(&self) -> i64 {
        self.config.hidden_size
    }

    /// Rows of the embedding.
    pub fn vocab_size(&self) -> i64 {
        self.config.vocab_size
    }

    /// The device the target runs on.
    pub fn device(&self) -> Device {
        self.embedding_vh.device()
    }

    /// Kind of its activations.
    pub fn dtype(&self) -> Kind {
        self.embedding_vh.kind()
    }

    /// Embeddings [T, H] of `ids_t` `[T]` (int64, on the target's device).
    pub fn embed(&self, ids_t: &Tensor) -> Tensor {
        self.embedding_vh.index_select(0, ids_t)
    }

    /// The final norm of `hidden_td` [T, H], of the target's kind.
    pub fn normed(&self, hidden_td: &Tensor) -> Tensor {
        let (weight, eps, kernels) = (&self.norm_h, self.config.rms_norm_eps, self.kernels);
        norm(&hidden_td.to_kind(self.dtype()), Norm { weight, eps, kernels })
    }

    /// Logits [T, V] of `hidden_td` [T, H], the residual stream before the final norm.
    pub fn logits(&self, hidden_td: &Tensor) -> Tensor {
        let few = self.few_logits(hidden_td, false);
        few.unwrap_or_else(|| self.lm_head(&self.normed(hidden_td)))
    }

    /// The most likely token `[T]` (int64) after each row of `hidden_td` [T, H], the residual stream
    /// before the final norm; of equally likely ones the first.
    pub fn most_likely(&self, hidden_td: &Tensor) -> Tensor {
        let few = self.few_most_likely(hidden_td, false);
        few.unwrap_or_else(|| most_likely(&self.logits(hidden_td)))
    }

    /// As [`Self::most_likely`], of states that are normed already.
    pub fn most_likely_of_normed(&self, normed_td: &Tensor) -> Tensor {
        let few = self.few_most_likely(normed_td, true);
        few.unwrap_or_else(|| most_likely(&self.lm_head(normed_td)))
    }

    /// Logits [T, V] of states that are normed already: the target's or the draft's.
    pub fn lm_head(&self, normed_td: &Tensor) -> Tensor {
        if let Some(logits_tv) = self.few_logits(normed_td, true) {
            return logits_tv;
        }
        match &self.lm_head {
            LmHead::Own(linear) => linear.apply(normed_td),
            LmHead::Tied { transposed_hv: Some(lm_head_hv) } => normed_td.mm(lm_head_hv),
            LmHead::Tied { transposed_hv: None } => normed_td.mm(&self.embedding_vh.tr()),
        }
    }

    /// The lm_head's columns [H, v] of `ids_v` `[v]` (int64, on the target's device): the output
    /// projection of a draft that says only these tokens. A copy, since few-row products with a
    /// matrix in one piece take half the time.
    pub fn lm_head_columns(&self, ids_v: &Tensor) -> Tensor {
        match &self.lm_head {
            LmHead::Own(linear) => linear.columns(ids_v),
            LmHead::Tied { .. } => self.embedding_vh.index_select(0, ids_v).tr().contiguous(),
        }
    }

    /// Logits [T, v] of the tokens `ids_v` alone, in float32 whatever the target runs in: nothing
    /// is rounded further than the states `hidden_td` [T, H] are.
    pub fn logits_f32(&self, hidden_td: &Tensor, ids_v: &Tensor) -> Tensor {
        let f32 = |tensor: &Tensor| tensor.to_kind(Kind::Float);
        let normed_td = rms_norm(&f32(hidden_td), &f32(&self.norm_h), self.config.rms_norm_eps);
        normed_td.mm(&f32(&self.lm_head_columns(ids_v)))
    }

    /// Hidden states of packed documents: one [T, H] for each id of `captures`, in its order.
    ///
    /// `ids_t` `[T]`; `document_starts` holds the first token of each document and, last, T. A
    /// document attends to itself only and counts its positions from 0. Layers beyond the highest
    /// id are not run. Differentiable when the weights require gradients.
    ///
    /// # Panics
    /// When an id exceeds the number of layers (see [`check_layer_ids`]).
    pub fn forward_packed(
        &self,
        ids_t: &Tensor,
        document_starts: &[i64],
        captures: &[u32],
    ) -> Vec<Tensor> {
        let positions = document_positions(document_starts, self.device());
        let tables = HeadTables::new(&self.rotary, &positions, self.dtype());
        let until = captures.iter().copied().max().unwrap_or(0) as usize;
        self.run(ids_t, &tables, &mut PackedAttention { document_starts }, captures, until).captures
    }

    /// An empty cache for a sequence of at most `max_tokens`.
    pub fn new_cache(&self, max_tokens: usize) -> KvCache {
        let few = self.few_rows().map(FewRows::stack);
        KvCache::new(&self.config, &self.rotary, (&self.embedding_vh, few), max_tokens)
    }

    /// Appends `ids_t` `[T]` to the cached sequence. Never records gradients.
    ///
    /// # Panics
    /// When the cache is too small, or an id of `captures` exceeds the number of layers.
    pub fn forward_cached(
        &self,
        ids_t: &Tensor,
        cache: &mut KvCache,
        captures: &[u32],
    ) -> CachedOutput {
        let tokens = ids_t.size()[0];
        no_grad(|| {
            if let Some(few) = self.few_rows().filter(|_| cache.few_rows(tokens).is_some()) {
                return self.forward_few(few, ids_t, &mut [(cache, tokens as usize)], captures);
            }
            let mut attention = CachedAttention::new(cache, tokens);
            let tables = attention.tables(tokens);
            let output = self.run(ids_t, &tables, &mut attention, captures, self.num_layers());
            cache.advance(tokens);
            output
        })
    }

    fn run(
        &self,
        ids_t: &Tensor,
        tables: &HeadTables,
        attention: &mut dyn Attend,
        captures: &[u32],
        until: usize,
    ) -> CachedOutput {
        let wanted = |id: usize| captures.iter().any(|&capture| capture as usize == id);
        let mut x_th = self.embed(ids_t);
        let mut states = vec![wanted(0).then(|| x_th.shallow_clone())];
        for layer in &self.layers[..until] {
            x_th = layer.forward(&x_th, tables, attention);
            states.push(wanted(states.len()).then(|| x_th.shallow_clone()));
        }
        let state =
            |&id: &u32| states[id as usize].as_ref().expect("captured above").shallow_clone();
        CachedOutput { captures: captures.iter().map(state).collect(), hidden_td: x_th }
    }

    /// Every trainable tensor with its name; q/k/v and gate/up are fused, as they are computed.
    pub fn parameters(&self) -> Vec<(String, Tensor)> {
        let mut parameters = self.outer_tensors();
        parameters.extend(self.layers.iter().flat_map(DecoderLayer::parameters));
        if let LmHead::Own(linear) = &self.lm_head {
            parameters.extend(linear.parameters());
        }
        parameters
    }

    /// Writes config.json and model.safetensors as Hugging Face names them, weights in `kind`
    /// (float32 or bf16). Each file appears whole or not at all.
    ///
    /// # Errors
    /// I/O.
    pub fn save(&self, dir: &Path, kind: Kind) -> Result<()> {
        std::fs::create_dir_all(dir).map_err(dflash_files::Error::io("create", dir))?;
        let mut tensors = self.outer_tensors();
        tensors.extend(self.layers.iter().flat_map(DecoderLayer::checkpoint));
        if let LmHead::Own(linear) = &self.lm_head {
            tensors.extend(linear.checkpoint());
        }
        write_safetensors_as(&dir.join("model.safetensors"), &tensors, Some(kind))?;
        let dtype = if kind == Kind::BFloat16 { "bfloat16" } else { "float32" };
        let path = dir.join("config.json");
        let config = serde_json::to_string_pretty(&self.config.to_json(dtype))
            .map_err(|source| Error::Json { path: path.clone(), source })?;
        Ok(dflash_files::write_bytes(&path, config.as_bytes())?)
    }

    fn outer_tensors(&self) -> Vec<(String, Tensor)> {
        vec![
            (EMBEDDING.to_owned(), self.embedding_vh.shallow_clone()),
            (FINAL_NORM.to_owned(), self.norm_h.shallow_clone()),
        ]
    }
}

/// Position of every token in its document `[T]`.
fn document_positions(document_starts: &[i64], device: Device) -> Tensor {
    let positions: Vec<i64> =
        document_starts.windows(2).flat_map(|bounds| 0..bounds[1] - bounds[0]).collect();
    Tensor::from_slice(&positions).to_device(device)
}
