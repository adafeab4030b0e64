//! The part of a target that the draft uses: token embedding, final norm, output projection, and
//! their constants.

mod tensors;

use std::path::Path;

use dflash_tensor::ops::rms_norm;
use dflash_tensor::{DeviceKind, LogitTransform, Result};
use tch::{Device, Kind, Tensor};

use super::facts::{HeadNumbers, NormKind, TargetFacts};

pub(crate) use self::tensors::HeadTensors;

/// Embedding, final norm and output projection of a target: everything that draft training needs.
#[derive(Debug)]
pub struct TargetIo {
    /// Token embedding [V, H] as stored, without the target's scale: engines pass drafts the
    /// unscaled rows.
    pub embedding_vh: Tensor,
    /// Output projection [V, H]; shares storage with the embedding if tied.
    pub lm_head_vh: Tensor,
    norm: FinalNorm,
    /// Factor from the embedding to hidden state 0.
    embedding_scale: f64,
    output: LogitTransform,
    /// Whether last states are taken after the final norm.
    normed_states: bool,
}

/// The norm before the output projection, in float32.
#[derive(Debug)]
struct FinalNorm {
    /// `[H]`, with the 1 of 1 + w already added.
    weight_h: Tensor,
    bias_h: Option<Tensor>,
    kind: NormKind,
    eps: f64,
}

/// Tensor name of the final norm.
pub(crate) const FINAL_NORM: &str = "norm.weight";

impl FinalNorm {
    fn new(weight_h: Tensor, bias_h: Option<Tensor>, numbers: &HeadNumbers) -> Self {
        let weight_h = match numbers.norm {
            NormKind::Rms | NormKind::Layer => weight_h,
            NormKind::RmsPlusOne | NormKind::LayerPlusOne => weight_h + 1.0,
        };
        Self { weight_h, bias_h, kind: numbers.norm, eps: numbers.norm_eps }
    }

    /// The norm of `hidden_td` [T, H], in float32.
    fn apply(&self, hidden_td: &Tensor) -> Tensor {
        let hidden_td = hidden_td.to_kind(Kind::Float);
        match self.kind {
            NormKind::Rms | NormKind::RmsPlusOne => rms_norm(&hidden_td, &self.weight_h, self.eps),
            NormKind::Layer | NormKind::LayerPlusOne => hidden_td.layer_norm(
                self.weight_h.size(),
                Some(&self.weight_h),
                self.bias_h.as_ref(),
                self.eps,
                false,
            ),
        }
    }

    fn shared(&self) -> Self {
        let weight_h = self.weight_h.shallow_clone();
        Self { weight_h, bias_h: self.bias_h.as_ref().map(Tensor::shallow_clone), ..*self }
    }
}

impl TargetIo {
    /// Loads only these tensors of the model in `dir`, whose family is known.
    ///
    /// # Errors
    /// As [`TargetFacts::load`] and [`Self::of`].
    pub fn load(dir: &Path, device: Device, kind: Kind) -> Result<Self> {
        Self::of(dir, &TargetFacts::load(dir, None)?, DeviceKind { device, kind })
    }

    /// Loads only these tensors of the model in `dir`; files without them may be absent.
    ///
    /// # Errors
    /// A missing, ambiguous or quantized tensor, a shape that differs from config.json, a missing
    /// or damaged file (each named).
    pub fn of(
        dir: &Path,
        facts: &TargetFacts,
        DeviceKind { device, kind }: DeviceKind,
    ) -> Result<Self> {
        let tensors = HeadTensors::open(dir)?;
        let located = tensors.locate(facts)?;
        let (rows, hidden) = (facts.vocab_size, facts.hidden_size);

        let matrix = |name: &str| {
            tensors.kind(name, facts)?;
            tensors.read(name, &[rows, hidden], device, kind)
        };
        let vector = |name: &String| tensors.read(name, &[hidden], device, Kind::Float);
        let stored = tensors.kind(&located.embedding, facts)?;
        let embedding_vh = matrix(&located.embedding)?;
        let lm_head_vh = match &located.head {
            Some(head) => matrix(head)?,
            None => embedding_vh.shallow_clone(),
        };
        let norm_bias = located.norm_bias.as_ref().map(vector).transpose()?;
        let head_bias = located.head_bias.as_ref();
        let bias_v =
            head_bias.map(|name| tensors.read(name, &[rows], device, Kind::Float)).transpose()?;
        Ok(Self {
            norm: FinalNorm::new(vector(&located.norm)?, norm_bias, &facts.head),
            embedding_scale: facts.head.embedding_scale_in(stored),
            output: facts.head.output(bias_v),
            normed_states: false,
            embedding_vh,
            lm_head_vh,
        })
    }

    /// A head with the given tensors and a plain RMS norm.
    pub fn plain(embedding_vh: Tensor, lm_head_vh: Tensor, norm_h: &Tensor, eps: f64) -> Self {
        let norm = FinalNorm {
            weight_h: norm_h.to_kind(Kind::Float),
            bias_h: None,
            kind: NormKind::Rms,
            eps,
        };
        let output = LogitTransform::identity();
        Self { embedding_vh, lm_head_vh, norm, embedding_scale: 1.0, output, normed_states: false }
    }

    /// Sets whether last states are taken after the final norm, as some servers deliver them.
    #[must_use]
    pub fn with_normed_states(self, normed_states: bool) -> Self {
        Self { normed_states, ..self }
    }

    /// Adds `offset` to the final norm's weight.
    #[must_use]
    pub fn with_norm_offset(mut self, offset: f64) -> Self {
        self.norm.weight_h = &self.norm.weight_h + offset;
        self
    }

    /// Sets or removes the soft cap.
    #[must_use]
    pub fn with_softcap(mut self, softcap: Option<f64>) -> Self {
        self.output.softcap = softcap;
        self
    }

    /// Replaces the output projection [V, H].
    #[must_use]
    pub fn with_lm_head(self, lm_head_vh: Tensor) -> Self {
        Self { lm_head_vh, ..self }
    }

    /// Logits of the tokens `ids` from one last state of the model in `dir` (before the final norm
    /// unless `normed`), in float32. Reads only the norm and one row of the output projection per
    /// token.
    ///
    /// # Errors
    /// As [`Self::of`].
    pub fn logits_of(
        dir: &Path,
        facts: &TargetFacts,
        state_h: &[f32],
        normed: bool,
        ids: &[i64],
    ) -> Result<Vec<f32>> {
        let tensors = HeadTensors::open(dir)?;
        let located = tensors.locate(facts)?;
        let (rows, hidden) = (facts.vocab_size, facts.hidden_size);
        let vector = |name: &String| tensors.read(name, &[hidden], Device::Cpu, Kind::Float);
        let norm_bias = located.norm_bias.as_ref().map(vector).transpose()?;
        let norm = FinalNorm::new(vector(&located.norm)?, norm_bias, &facts.head);
        let head = located.head.as_ref().unwrap_or(&located.embedding);
        tensors.kind(head, facts)?;
        let head_ih = tensors.rows(head, ids, &[rows, hidden])?;
        let bias = located.head_bias.as_ref();
        let bias_i = bias.map(|name| tensors.rows(name, ids, &[rows])).transpose()?;
        let state_th = Tensor::from_slice(state_h).view([1, -1]);
        let normed_th = if normed { state_th } else { norm.apply(&state_th) };
        let logits_ti = facts.head.output(bias_i).apply(normed_th.mm(&head_ih.tr()));
        Ok(Vec::try_from(logits_ti.squeeze_dim(0))?)
    }

    /// A shallow clone.
    #[must_use]
    pub fn shared(&self) -> Self {
        Self {
            embedding_vh: self.embedding_vh.shallow_clone(),
            lm_head_vh: self.lm_head_vh.shallow_clone(),
            norm: self.norm.shared(),
            output: self.output.shared(),
            ..*self
        }
    }

    /// Hidden state 0 [T, H] of `ids` `[T]`: scaled embeddings.
    pub fn embed(&self, ids: &Tensor) -> Tensor {
        let rows_th = self.rows(ids);
        if self.embedding_scale == 1.0 { rows_th } else { rows_th * self.embedding_scale }
    }

    /// Embedding rows [T, H] of `ids` `[T]` as stored, the draft's input.
    pub fn rows(&self, ids: &Tensor) -> Tensor {
        self.embedding_vh.index_select(0, ids)
    }

    /// Applies the final norm to `hidden_td` [T, H], in float32. States from after the norm are
    /// only converted.
    pub fn normed(&self, hidden_td: &Tensor) -> Tensor {
        match self.normed_states {
            true => hidden_td.to_kind(Kind::Float),
            false => self.norm.apply(hidden_td),
        }
    }

    /// The transform from LM-head output to target logits.
    pub fn output(&self) -> &LogitTransform {
        &self.output
    }

    /// The target's logits [T, V] from its last states `hidden_td` [T, H].
    pub fn logits(&self, hidden_td: &Tensor) -> Tensor {
        let normed_td = self.normed(hidden_td).to_kind(self.lm_head_vh.kind());
        self.output.apply(normed_td.mm(&self.lm_head_vh.tr()))
    }
}

impl HeadNumbers {
    /// The embedding's scale for weights stored in `kind`.
    fn embedding_scale_in(&self, kind: Kind) -> f64 {
        match self.rounds_embedding_scale {
            true => Tensor::from(self.embedding_scale as f32).to_kind(kind).double_value(&[]),
            false => self.embedding_scale,
        }
    }

    fn output(&self, bias_v: Option<Tensor>) -> LogitTransform {
        LogitTransform { bias_v, scale: self.logit_scale, softcap: self.softcap }
    }
}
