//! From settings to a trainer: the draft's shape, its weights, its vocabulary, its objective.

use dflash_data::{Dataset, select_vocabulary};
use dflash_model::draft::{Draft, DraftConfig, LayerKind};
use dflash_model::objective::{DraftVocabulary, LabelSource, Objective};
use dflash_model::target::{TargetConfig, TargetHead, check_layer_ids};
use tch::{Cuda, Device, Kind, Tensor};

use crate::Error;
use crate::batch::BatchMaker;
use crate::config::{DeviceChoice, DraftSettings, ObjectiveSettings, TrainConfig};
use crate::optimizer::AdamW;
use crate::trainer::Trainer;
use crate::warm_start::WarmStart;

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

/// The device of a rank, and the kind it computes in.
///
/// # Errors
/// CUDA asked for where there is none.
pub(crate) fn device(choice: DeviceChoice, local_rank: usize) -> Result<(Device, Kind), Error> {
    let available = Cuda::is_available() && Cuda::device_count() > 0;
    match choice {
        DeviceChoice::Cpu => Ok((Device::Cpu, Kind::Float)),
        DeviceChoice::Auto if !available => Ok((Device::Cpu, Kind::Float)),
        DeviceChoice::Cuda if !available => {
            Err(Error::setting("--device", "cuda", "libtorch sees no CUDA device here"))
        }
        _ => {
            let devices = Cuda::device_count() as usize;
            Ok((Device::Cuda(local_rank % devices), Kind::BFloat16))
        }
    }
}

/// Builds the trainer of a fresh run.
///
/// # Errors
/// Unreadable target, impossible vocabulary.
pub(crate) fn trainer(
    config: &TrainConfig,
    draft_config: DraftConfig,
    dataset: &Dataset,
    (device, kind): (Device, Kind),
) -> Result<Trainer, Error> {
    let head = TargetHead::load(&config.target, device, kind)?;
    let vocabulary = vocabulary(config, dataset, head.embedding_vh.size()[0] as usize)?;
    let lm_head_vh = match &vocabulary {
        Some(vocabulary) => {
            let rows = Tensor::from_slice(vocabulary.selected()).to_device(device);
            head.lm_head_vh.index_select(0, &rows)
        }
        None => head.lm_head_vh.shallow_clone(),
    };
    let objective = objective(&config.objective);
    let last_layer = draft_config.num_target_layers.expect("a new draft knows its target");
    let batches = BatchMaker {
        head,
        lm_head_vh,
        vocabulary,
        teacher_layer: objective.needs_teacher().then_some(last_layer as u32),
        anchors_per_sequence: config.anchors_per_sequence,
        max_anchors: config.max_anchors,
        seed: config.seed,
    };
    let master_draft = fresh(draft_config, config.seed, device);
    if let Some(pretrained) = &config.from_pretrained {
        WarmStart::open(pretrained, master_draft.config())?.copy_into(&master_draft)?;
    }
    Ok(assemble(master_draft, kind, config, (objective, batches)))
}

/// A fresh draft of float32 parameters; the same for the same seed whatever the device.
pub(crate) fn fresh(config: DraftConfig, seed: u64, device: Device) -> Draft {
    tch::manual_seed(seed as i64);
    Draft::init(config, device, |shape| {
        Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_device(device)
    })
}

/// Joins a draft of float32 parameters with its optimizer and its copy in the computation's kind.
pub(crate) fn assemble(
    master_draft: Draft,
    kind: Kind,
    config: &TrainConfig,
    parts: (Objective, BatchMaker),
) -> Trainer {
    let masters = master_draft.flat().shallow_clone();
    let decayed: Vec<(i64, i64)> = master_draft
        .layout()
        .parameters()
        .iter()
        .filter(|parameter| parameter.is_matrix())
        .map(|parameter| (parameter.offset, parameter.elements()))
        .collect();
    let optimizer = AdamW::new(config.adamw, &masters, &decayed);
    let draft = match kind {
        Kind::Float => master_draft,
        kind => Draft::new(master_draft.config().clone(), masters.to_kind(kind)),
    };
    Trainer::new(draft, masters, optimizer, parts)
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
    }
}

/// The pruned vocabulary, or `None` where it is the target's own.
fn vocabulary(
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
