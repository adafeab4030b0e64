//! From settings to a trainer: the draft's shape, its weights, its vocabulary, its objective.

use dflash_data::{AnchorOptions, Dataset, select_vocabulary};
use dflash_model::Kernels;
use dflash_model::draft::{Draft, DraftConfig, DraftLayout, Keep, LayerKind};
use dflash_model::objective::{DraftVocabulary, LabelSource, Objective};
use dflash_model::target::{TargetConfig, TargetHead, check_layer_ids};
use tch::{Cuda, Device, Kind, Tensor};

use crate::Error;
use crate::batch::{BatchMaker, BlockMaker};
use crate::config::{
    ComputeKind, DeviceChoice, DraftSettings, ObjectiveSettings, TrainConfig, Zero,
};
use crate::masters::Masters;
use crate::optimizer::Algorithm;
use crate::prepared::Prepared;
use crate::shards::Shards;
use crate::trainer::Trainer;

/// Far beyond what any draft guesses right; each anchor costs memory in proportion.
const MAX_BLOCK_SIZE: usize = 1024;

/// Standard deviation of fresh matrices, Hugging Face's default for the Qwen family.
const INITIALIZER_RANGE: f64 = 0.02;

/// The draft's configuration: the target's dimensions and the user's settings.
///
/// # Errors
/// A layer id that the target does not have, or a setting out of range.
pub(crate) fn draft_config(
    target: &TargetConfig,
    settings: &DraftSettings,
) -> Result<DraftConfig, Error> {
    check_layer_ids(&settings.target_layer_ids, target.num_hidden_layers)?;
    if settings.num_layers == 0 {
        return Err(Error::setting("--num-layers", 0, "a draft needs a layer"));
    }
    if settings.block_size < 2 {
        let expected = "a block holds the anchor and at least one token to predict";
        return Err(Error::setting("--block-size", settings.block_size, expected));
    }
    if settings.block_size > MAX_BLOCK_SIZE {
        let expected = format!("blocks have at most {MAX_BLOCK_SIZE} slots");
        return Err(Error::setting("--block-size", settings.block_size, expected));
    }
    if settings.sliding_window == Some(0) {
        return Err(Error::setting("--sliding-window", 0, "a window holds at least one token"));
    }
    let kind = match settings.sliding_window {
        Some(_) => LayerKind::Sliding,
        None => LayerKind::Full,
    };
    Ok(DraftConfig {
        hidden_size: target.hidden_size,
        intermediate_size: target.intermediate_size,
        num_attention_heads: target.num_attention_heads,
        num_key_value_heads: target.num_key_value_heads,
        head_dim: target.head_dim,
        rms_norm_eps: target.rms_norm_eps,
        rope_theta: target.rope.theta,
        layers: vec![kind; settings.num_layers],
        sliding_window: settings.sliding_window,
        block_size: settings.block_size,
        mask_token_id: settings.mask_token_id,
        target_layer_ids: settings.target_layer_ids.clone(),
        num_target_layers: Some(target.num_hidden_layers),
        vocab_size: target.vocab_size,
        max_position_embeddings: target.max_position_embeddings,
        initializer_range: INITIALIZER_RANGE,
        eos_token_id: target.eos_token_ids.first().map(|&id| id.into()),
    })
}

/// The device of a rank, and the kind it computes in: bfloat16 on a GPU and float32 on a CPU,
/// unless `dtype` says otherwise.
///
/// # Errors
/// CUDA asked for where there is none.
pub(crate) fn device(
    choice: DeviceChoice,
    dtype: Option<ComputeKind>,
    local_rank: usize,
) -> Result<(Device, Kind), Error> {
    let available = Cuda::is_available() && Cuda::device_count() > 0;
    let (device, usual) = match choice {
        DeviceChoice::Cpu => (Device::Cpu, Kind::Float),
        DeviceChoice::Auto if !available => (Device::Cpu, Kind::Float),
        DeviceChoice::Cuda if !available => {
            return Err(Error::setting("--device", "cuda", "libtorch sees no CUDA device here"));
        }
        _ => {
            let devices = Cuda::device_count() as usize;
            (Device::Cuda(local_rank % devices), Kind::BFloat16)
        }
    };
    let kind = dtype.map_or(usual, |dtype| match dtype {
        ComputeKind::Float32 => Kind::Float,
        ComputeKind::Bfloat16 => Kind::BFloat16,
    });
    Ok((device, kind))
}

/// Builds the trainer of a fresh run, at `place` (rank, world size).
///
/// # Errors
/// Unreadable target, impossible vocabulary.
pub(crate) fn trainer(
    prepared: &Prepared<'_>,
    (device, kind): (Device, Kind),
    place: (usize, usize),
) -> Result<Trainer, Error> {
    let config = prepared.config;
    let head = TargetHead::load(&config.target, device, kind)?;
    let rows = head.embedding_vh.size()[0] as usize;
    let vocabulary = vocabulary(prepared, rows)?;
    let lm_head_vh = match &vocabulary {
        Some(vocabulary) => {
            let rows = Tensor::from_slice(vocabulary.selected()).to_device(device);
            head.lm_head_vh.index_select(0, &rows)
        }
        None => head.lm_head_vh.shallow_clone(),
    };
    let blocks = BlockMaker {
        anchors: anchors(config),
        vocabulary,
        head_rows: lm_head_vh.size()[0] as usize,
        teacher: config.objective.needs_teacher(),
    };
    let batches = BatchMaker { blocks, head, lm_head_vh, teacher_layer: prepared.teacher_layer() };
    let fresh = match prepared.resume {
        // what the checkpoint fills needs no other numbers first
        Some(_) => Draft::zeros(prepared.draft.clone(), device),
        None => fresh(prepared.draft.clone(), config.seed, device),
    };
    if let (Some(warm_start), None) = (&prepared.warm_start, &prepared.resume) {
        warm_start.copy_into(&fresh)?;
    }
    let shards = shards(config, fresh.layout(), place);
    let parameters = Masters::new(fresh, kind, &config.optimizer, shards);
    let mut trainer = Trainer::new(parameters, (objective(&config.objective), batches));
    trainer.keep = if config.recompute { Keep::Inputs } else { Keep::Activations };
    Ok(trainer)
}

/// How a run draws its anchors.
fn anchors(config: &TrainConfig) -> AnchorOptions {
    AnchorOptions {
        per_document: config.anchors_per_sequence,
        per_row: config.max_anchors,
        seed: config.seed,
        epoch: 0,
    }
}

/// A fresh draft of float32 parameters; the same for the same seed whatever the device.
pub(crate) fn fresh(config: DraftConfig, seed: u64, device: Device) -> Draft {
    tch::manual_seed(seed as i64);
    Draft::init(config, device, |shape| {
        Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_device(device)
    })
}

/// The share of the state that each rank holds.
fn shards(config: &TrainConfig, layout: &DraftLayout, place: (usize, usize)) -> Shards {
    match (config.zero, config.optimizer.algorithm) {
        (Zero::Off, _) => Shards::whole(layout.elements()),
        (Zero::One, Algorithm::AdamW) => Shards::even(layout.elements(), place),
        (Zero::One, Algorithm::Muon(_)) => Shards::by_parameter(layout, place),
    }
}

fn objective(settings: &ObjectiveSettings) -> Objective {
    let labels =
        if settings.teacher_labels { LabelSource::TeacherArgmax } else { LabelSource::Data };
    Objective {
        terms: settings.terms.clone(),
        weighting: settings.weighting,
        denominator: settings.denominator,
        labels,
        chunk_bytes: settings.chunk_bytes,
        kernels: Kernels::Fast,
    }
}

/// The pruned vocabulary, or `None` where it is the target's own: what `resume` or the pretrained
/// draft has, unless a size is asked for.
fn vocabulary(prepared: &Prepared<'_>, rows: usize) -> Result<Option<DraftVocabulary>, Error> {
    let (config, dataset) = (prepared.config, &*prepared.dataset);
    let Some(dir) = prepared.resumed_dir().or(config.from_pretrained.as_deref()) else {
        return selected_vocabulary(config, dataset, rows);
    };
    let stored = DraftVocabulary::load(dir)?;
    if let Some(found) = stored.as_ref().map(DraftVocabulary::target_size)
        && found != rows
    {
        return Err(Error::ForeignVocabulary { path: dir.into(), found, expected: rows });
    }
    let size = stored.as_ref().map_or(rows, |stored| stored.selected().len());
    match config.draft.vocab_size {
        Some(asked) if asked != size => selected_vocabulary(config, dataset, rows),
        _ => Ok(stored.filter(|_| size < rows)),
    }
}

/// The tokens that the dataset supervises most, as many as are asked for.
fn selected_vocabulary(
    config: &TrainConfig,
    dataset: &Dataset,
    rows: usize,
) -> Result<Option<DraftVocabulary>, Error> {
    match config.draft.vocab_size {
        None => Ok(None),
        Some(size) if size == rows => Ok(None),
        Some(0) => Err(Error::setting("--draft-vocab-size", 0, "a draft needs tokens to say")),
        Some(size) if size > rows => {
            let expected = format!("the target's embedding has {rows} rows");
            Err(Error::setting("--draft-vocab-size", size, expected))
        }
        Some(size) => {
            let selected = select_vocabulary(&dataset.token_frequencies()?, size, rows);
            Ok(Some(DraftVocabulary::new(selected, rows)))
        }
    }
}
