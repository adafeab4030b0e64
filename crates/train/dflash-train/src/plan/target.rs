//! Requirements of a target in the trainer's process (`--colocate`).

use dflash_data::PackedRow;
use dflash_draft::DraftConfig;
use dflash_settings::{Dtype, HiddenStatesSettings};
use dflash_target::{PrefillFlops, TargetConfig};

use super::Planned;
use super::memory::SLACK;

/// The target next to the draft.
pub(super) struct Colocated<'a> {
    config: &'a TargetConfig,
    settings: &'a HiddenStatesSettings,
    /// Number of layers that run: up to the highest auxiliary layer.
    layers: usize,
    aux_layers: f64,
    /// Bytes per number of the target and of the draft.
    widths: (f64, f64),
}

impl<'a> Colocated<'a> {
    /// `None` if hidden states come from elsewhere.
    pub(super) fn of(planned: &'a Planned<'_>, draft: &DraftConfig) -> Option<Self> {
        Self::native(planned, draft).filter(|target| target.settings.colocate)
    }

    /// The run's target, wherever our code runs it; `None` if another engine does.
    pub(super) fn native(planned: &'a Planned<'_>, draft: &DraftConfig) -> Option<Self> {
        let settings = &planned.settings.hidden_states;
        let target = planned.native.as_ref()?;
        let target_distribution = planned.settings.objective.needs_target_distribution();
        let last = target.num_hidden_layers;
        let highest = draft.target_layer_ids.last().map_or(0, |&id| id as usize);
        let is_aux_layer = highest == last;
        Some(Self {
            config: target,
            settings,
            layers: if target_distribution { last } else { highest },
            aux_layers: (draft.aux_layers() + i64::from(target_distribution && !is_aux_layer))
                as f64,
            widths: (width(settings.target_dtype, planned.place.is_gpu()), planned.width()),
        })
    }

    /// Bytes of the layers, and of an embedding that the draft cannot share.
    pub(super) fn weights(&self) -> f64 {
        let (own, draft) = self.widths;
        let embedding = (self.config.vocab_size * self.config.hidden_size) as f64;
        let embedding = if own == draft { 0.0 } else { embedding };
        (self.config.stored_elements(self.layers) + embedding) * own
    }

    /// Bytes of a pass over a row, whose longest document has `longest` tokens: a layer's peak, the
    /// captured states of a batch, and the states of the whole row.
    pub(super) fn pass(&self, tokens: f64, longest: f64) -> f64 {
        let batch = (self.settings.target_batch_tokens as f64).max(longest).min(tokens);
        let h = self.config.hidden_size as f64;
        let numbers = self.config.widest() + self.aux_layers * h;
        let states = tokens * self.aux_layers * h * self.settings.states_dtype.size() as f64;
        SLACK * (batch * numbers * self.widths.0 + states)
    }

    /// Operations of a pass over a row.
    pub(super) fn work(&self, row: &PackedRow) -> PrefillFlops {
        self.config.prefill_work(self.layers, row.documents().map(|document| document.len()))
    }
}

/// Bytes per number of `dtype`.
pub(super) fn width(dtype: Dtype, gpu: bool) -> f64 {
    let bf16 = match dtype {
        Dtype::Auto => gpu,
        dtype => dtype == Dtype::Bfloat16,
    };
    if bf16 { 2.0 } else { 4.0 }
}
