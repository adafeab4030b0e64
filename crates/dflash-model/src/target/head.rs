//! The part of a target that the draft borrows: token embedding, final norm, lm_head.

use std::path::Path;

use tch::{Device, Kind, Tensor};

use super::config::TargetConfig;
use super::weights::Weights;
use crate::Result;
use crate::ops::rms_norm;

/// Embedding, final norm and lm_head of a target: all that training a draft needs of it.
#[derive(Debug)]
pub struct TargetHead {
    /// Token embedding [V, H].
    pub embedding_vh: Tensor,
    /// Weight of the norm before the lm_head `[H]`.
    pub norm_h: Tensor,
    /// Epsilon of that norm.
    pub norm_eps: f64,
    /// Output projection [V, H]; shares storage with the embedding when they are tied.
    pub lm_head_vh: Tensor,
}

/// The checkpoint's name of the embedding.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
/// The checkpoint's name of the final norm.
pub(crate) const FINAL_NORM: &str = "model.norm.weight";
/// The checkpoint's name of the lm_head, a projection.
pub(crate) const LM_HEAD: &str = "lm_head";

impl TargetHead {
    /// Reads these tensors, and no others, of the model in `dir`.
    ///
    /// # Errors
    /// As [`super::Target::load`].
    pub fn load(dir: &Path, device: Device, kind: Kind) -> Result<Self> {
        let config = TargetConfig::load(dir)?;
        let weights = Weights::open(dir)?;
        let (rows, hidden) = (config.vocab_size, config.hidden_size);
        let read = |name: &str, shape: &[i64]| weights.read(name, shape, (kind, device));
        let embedding_vh = read(EMBEDDING, &[rows, hidden])?;
        let lm_head_vh = match config.tie_word_embeddings {
            true => embedding_vh.shallow_clone(),
            false => read(&format!("{LM_HEAD}.weight"), &[rows, hidden])?,
        };
        let norm_h = read(FINAL_NORM, &[hidden])?;
        Ok(Self { embedding_vh, norm_h, norm_eps: config.rms_norm_eps, lm_head_vh })
    }

    /// The logits of the tokens `ids` from one state of the model in `dir` before the final norm, in
    /// float32. Reads only what that needs: the norm, and a row of the lm_head for each token.
    ///
    /// # Errors
    /// As [`super::Target::load`].
    pub fn logits_of(dir: &Path, state_h: &[f32], ids: &[i64]) -> Result<Vec<f32>> {
        let config = TargetConfig::load(dir)?;
        let weights = Weights::open(dir)?;
        let options = (Kind::Float, Device::Cpu);
        let (rows, hidden) = (config.vocab_size, config.hidden_size);
        let own = format!("{LM_HEAD}.weight");
        let name = if config.tie_word_embeddings { EMBEDDING } else { &own };
        weights.check_shape(name, &[rows, hidden])?;
        let row = |&id: &i64| Ok(weights.row(name, id, hidden)?.to_kind(Kind::Float));
        let head_ih = Tensor::stack(&ids.iter().map(row).collect::<Result<Vec<_>>>()?, 0);
        let norm_h = weights.read(FINAL_NORM, &[hidden], options)?;
        let state_th = Tensor::from_slice(state_h).view([1, -1]);
        let logits_ti = rms_norm(&state_th, &norm_h, config.rms_norm_eps).mm(&head_ih.tr());
        Ok(Vec::try_from(logits_ti.squeeze_dim(0))?)
    }

    /// Embeddings of `ids` `[T]` as [T, H].
    pub fn embed(&self, ids: &Tensor) -> Tensor {
        self.embedding_vh.index_select(0, ids)
    }

    /// The target's logits [T, V] of `hidden_td`, the state before the final norm.
    pub fn logits(&self, hidden_td: &Tensor) -> Tensor {
        rms_norm(hidden_td, &self.norm_h, self.norm_eps).mm(&self.lm_head_vh.tr())
    }
}
