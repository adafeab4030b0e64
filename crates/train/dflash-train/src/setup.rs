//! Builds a trainer from the settings: the draft's shape, weights, vocabulary, objective.

use std::path::Path;

use dflash_data::{AnchorOptions, Dataset, select_vocabulary};
use dflash_draft::objective::{
    Confidence, Denominator, DraftVocabulary, LabelSource, Objective, Weighting,
};
use dflash_draft::{Draft, DraftConfig, DraftLayout, Keep, LayerKind};
use dflash_settings::{Invalid, ObjectiveSettings, RowSettings, loss_chunk_bytes};
use dflash_target::{DraftAttentionShape, TargetFacts, TargetIo, check_layer_ids};
use dflash_tensor::{DeviceKind, Kernels};
use dflash_torch_sys::trace;
use tch::{Device, Kind, Tensor};

use crate::Error;
use crate::batch::BatchMaker;
use crate::config::{DraftShape, TrainConfig};
use crate::error::{Mismatch, Mismatches};
use crate::master_weights::MasterWeights;
use crate::optimizer::{Algorithm, OptimizerConfig};
use crate::prepared::Prepared;
use crate::shards::{Rank, Shards};
use crate::trainer::Trainer;

/// Standard deviation of fresh matrices: Hugging Face's default for the Qwen family.
const INITIALIZER_RANGE: f64 = 0.02;

/// The draft's configuration: the user's settings, with the remaining dimensions taken from the
/// starting draft or else from the target.
pub(crate) fn draft_config(
    target: &TargetFacts,
    settings: &DraftShape,
) -> Result<DraftConfig, Error> {
    check_layer_ids(&settings.target_layer_ids, target.num_hidden_layers)?;
    let defaults = target.draft_defaults();
    let stored = settings.stored.as_deref();
    let heads = stored.map_or(defaults.heads, |draft| DraftAttentionShape {
        num_attention_heads: draft.num_attention_heads,
        num_key_value_heads: draft.num_key_value_heads,
        head_dim: draft.head_dim,
        intermediate_size: draft.intermediate_size,
    });
    let rope = stored.map_or((defaults.rope_theta, defaults.rope_scaling), |draft| {
        (draft.rope_theta, draft.rope_scaling)
    });
    let layers = layers(settings);
    let slides = layers.contains(&LayerKind::Sliding);
    Ok(DraftConfig {
        hidden_size: target.hidden_size,
        intermediate_size: heads.intermediate_size,
        num_attention_heads: heads.num_attention_heads,
        num_key_value_heads: heads.num_key_value_heads,
        head_dim: heads.head_dim,
        attention_bias: stored.is_some_and(|draft| draft.attention_bias),
        rms_norm_eps: target.head.norm_eps,
        rope_theta: rope.0,
        rope_scaling: rope.1,
        layers,
        sliding_window: settings.sliding_window.filter(|_| slides),
        block_size: settings.block_size,
        mask_token_id: settings.mask_token_id,
        target_layer_ids: settings.target_layer_ids.clone(),
        num_target_layers: Some(target.num_hidden_layers),
        vocab_size: target.vocab_size,
        max_position_embeddings: target.max_position_embeddings,
        initializer_range: INITIALIZER_RANGE,
        eos_token_id: target.eos_token_ids.first().map(|&id| id.into()),
        head: settings.head.clone(),
    })
}

/// The draft's layer kinds: those of the starting draft if the window is unchanged, repeating its
/// last one for additional layers; otherwise all alike.
fn layers(settings: &DraftShape) -> Vec<LayerKind> {
    let usual = match settings.sliding_window {
        Some(_) => LayerKind::Sliding,
        None => LayerKind::Full,
    };
    let stored = settings.stored.as_deref();
    let of_draft = stored.filter(|draft| draft.sliding_window == settings.sliding_window);
    let kinds = of_draft.map_or(&[][..], |draft| &draft.layers);
    let kind = |layer: usize| kinds.get(layer).or(kinds.last()).copied().unwrap_or(usual);
    (0..settings.num_layers).map(kind).collect()
}

/// Builds the trainer of a fresh run using the target's `head`, where the rank computes.
pub(crate) fn trainer(
    prepared: &Prepared<'_>,
    head: TargetIo,
    DeviceKind { device, kind }: DeviceKind,
    rank: Rank,
) -> Result<Trainer, Error> {
    let config = prepared.config;
    let rows = head.embedding_vh.size()[0] as usize;
    let resumed_dir = prepared.resume.as_ref().map(|checkpoint| &*checkpoint.dir);
    let vocabulary = vocabulary(config, resumed_dir, Some(&prepared.dataset), rows)?;
    let anchors = anchors(&config.settings.rows);
    let batches = BatchMaker::new(head, anchors, vocabulary, prepared.distribution_layer());
    let fresh = match prepared.resume {
        // filled from the checkpoint
        Some(_) => Draft::zeros(prepared.draft.clone(), device),
        None => fresh(prepared.draft.clone(), config.settings.rows.seed, device),
    };
    if let (Some(warm_start), None) = (&prepared.warm_start, &prepared.resume) {
        warm_start.copy_into(&fresh)?;
    }
    let optimizer = OptimizerConfig::from(&config.settings.optimizer);
    let splits = config.settings.compute.splits_state();
    let shards = shards(splits, &optimizer, fresh.layout(), rank);
    let (draft, master_weights) = MasterWeights::new(fresh, kind, &optimizer, shards);
    let chunk = chunk_bytes(config.settings.objective.loss_chunk_mib, device)?;
    let objective = objective(&config.settings.objective, prepared.draft.block_size, chunk);
    let mut trainer = Trainer::new(draft, master_weights, objective, batches);
    trainer.keep = if config.settings.compute.recompute { Keep::Inputs } else { Keep::Activations };
    Ok(trainer)
}

/// A run's settings for drawing anchors.
pub(crate) fn anchors(rows: &RowSettings) -> AnchorOptions {
    AnchorOptions {
        per_document: rows.anchors_per_sequence,
        per_row: rows.max_anchors(),
        seed: rows.seed,
        epoch: 0,
    }
}

/// A fresh draft with float32 parameters; the same seed gives the same draft on every device.
pub(crate) fn fresh(config: DraftConfig, seed: u64, device: Device) -> Draft {
    tch::manual_seed(seed as i64);
    Draft::init(config, device, |shape| {
        Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_device(device)
    })
}

/// Bytes of one chunk of logits: `mib` if given. The default depends on the device; on a GPU on the
/// memory now free, so call it after the draft and its optimizer exist.
pub(crate) fn chunk_bytes(mib: Option<usize>, device: Device) -> Result<usize, Error> {
    let free = match device {
        Device::Cuda(_) if trace::is_fake_cuda() => Some(u64::MAX),
        Device::Cuda(index) => Some(dflash_torch_sys::free_device_bytes(index)?),
        _ => None,
    };
    Ok(loss_chunk_bytes(mib, free))
}

/// How the state is divided among the ranks.
fn shards(splits: bool, optimizer: &OptimizerConfig, layout: &DraftLayout, rank: Rank) -> Shards {
    match (splits, optimizer.algorithm) {
        (false, _) => Shards::whole(layout.elements()),
        (true, Algorithm::AdamW) => Shards::even(layout.elements(), rank),
        (true, Algorithm::Muon(_)) => Shards::by_parameter(layout, rank),
    }
}

pub(crate) fn objective(
    settings: &ObjectiveSettings,
    block_size: usize,
    chunk_bytes: usize,
) -> Objective {
    let labels =
        if settings.teacher_labels { LabelSource::TargetArgmax } else { LabelSource::Data };
    let (weighting, denominator) = match settings.dpace_alpha {
        Some(alpha) => {
            (Weighting::Dpace { alpha, confidence: Confidence::CrossEntropy }, Denominator::Blocks)
        }
        None => (Weighting::Decay { gamma: settings.gamma(block_size) }, Denominator::Weights),
    };
    Objective {
        terms: settings.loss.iter().map(|term| (term.loss, term.coefficient)).collect(),
        weighting,
        denominator,
        labels,
        chunk_bytes,
        kernels: Kernels::Fast,
    }
}

/// The reduced vocabulary, or `None` for the target's own: that of the resumed or starting draft,
/// unless another size is requested. The dataset is only read if it decides.
pub(crate) fn vocabulary(
    config: &TrainConfig,
    resumed_dir: Option<&Path>,
    dataset: Option<&Dataset>,
    rows: usize,
) -> Result<Option<DraftVocabulary>, Error> {
    let Some(dir) = resumed_dir.or(config.pretrained_dir.as_deref()) else {
        return selected_vocabulary(config, dataset, rows);
    };
    let stored = DraftVocabulary::load(dir)?;
    if let Some(found) = stored.as_ref().map(DraftVocabulary::target_size)
        && found != rows
    {
        let (path, found, expected) = (dir.into(), found.to_string(), rows.to_string());
        return Err(match resumed_dir {
            Some(_) => {
                let key = "a target whose number of tokens is".to_owned();
                let mismatches = Mismatches(vec![Mismatch { key, found, expected }]);
                Error::ResumeMismatch { path, mismatches, also: String::new() }
            }
            None => {
                let key = "number of target tokens";
                Error::ForeignDraft { path, key, found, expected }
            }
        });
    }
    let size = stored.as_ref().map_or(rows, |stored| stored.selected().len());
    match config.draft.vocab_size {
        Some(asked) if asked != size => selected_vocabulary(config, dataset, rows),
        _ => Ok(stored.filter(|_| size < rows)),
    }
}

/// The requested number of tokens that are most often supervised in the dataset.
fn selected_vocabulary(
    config: &TrainConfig,
    dataset: Option<&Dataset>,
    rows: usize,
) -> Result<Option<DraftVocabulary>, Error> {
    let Some(size) = config.draft.vocab_size.filter(|&size| size != rows) else { return Ok(None) };
    if size > rows {
        let expected = format!("the target's embedding has {rows} rows");
        return Err(Invalid::new("draft_vocab_size", size, expected).into());
    }
    let counts = match dataset {
        Some(dataset) => dataset.token_frequencies()?,
        None => Dataset::open(config.settings.data_path()?)?.token_frequencies()?,
    };
    let selected = select_vocabulary(&counts, size, rows);
    Ok(Some(DraftVocabulary::new(selected, rows)))
}
