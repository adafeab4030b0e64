//! Times optimizer steps on random hidden states, as other trainers' step benchmarks do.
//!
//! A step is everything that training does once a row's hidden states have arrived: planning the
//! blocks, forward, loss, backward, clipping and AdamW. Loading and fetching are excluded.

mod products;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use dflash_data::{AnchorOptions, PackedRow, anchor_candidates};
use dflash_dist::Single;
use dflash_draft::objective::{Denominator, ElementLoss, LabelSource, Objective, Weighting};
use dflash_draft::{DraftConfig, DraftLayout, HeadFields};
use dflash_settings::{Dtype, Invalid, TrainStepSettings};
use dflash_target::{TargetFacts, TargetIo, default_layer_ids};
use dflash_tensor::{DeviceKind, Kernels, device_name, place, upload};
use dflash_torch_sys::trace;
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use crate::assembly::slot_ids;
use crate::batch::{Batch, BatchMaker};
use crate::config::DraftShape;
use crate::master_weights::MasterWeights;
use crate::optimizer::OptimizerConfig;
use crate::plan::cpu;
use crate::plan::step::StepShape;
use crate::readback::Finished;
use crate::shards::Shards;
use crate::trainer::{StepSums, Trainer};
use crate::vote::Vote;
use crate::{Error, machine, readback, setup};

pub use products::{Measured, MeasuredFlash, MeasuredProduct};

/// The result; the first keys match those of other trainers' scripts.
#[derive(Clone, Debug, Serialize)]
pub struct StepReport {
    /// Median wall time of a step, milliseconds.
    pub step_ms: f64,
    /// Supervised slots per second, at the median step time.
    pub slots_per_s: f64,
    /// On a CPU, step time predicted from products and copies timed on it, milliseconds.
    pub predicted_ms: Option<f64>,
    /// Loss of the last step, nats.
    pub loss: f64,
    /// Peak memory, MiB: the process's resident memory on a CPU, tensor memory on a GPU.
    pub peak_mib: f64,
    /// Trained parameters, millions.
    pub params_m: f64,
    /// Supervised slots of the row.
    pub slots: u64,
    /// Useful TFLOP/s: the arithmetic that the row requires, divided by the median time.
    pub tflops: f64,
    /// Maximum memory of one chunk of logits, MiB.
    pub loss_chunk_mib: usize,
    /// The device it ran on.
    pub device: String,
    /// CPU instruction level it ran at; `None` on a GPU.
    pub cpu_level: Option<String>,
    /// On a GPU, milliseconds of one additional step by part (named as in `dflash plan`), measured
    /// by the GPU's clock.
    pub parts_ms: Option<BTreeMap<&'static str, f64>>,
    /// With --products, the rates that the device reaches in the pieces of a step.
    pub measured: Option<Measured>,
}

/// Learning rate and slot decay of other trainers' benchmarks.
const RATE: f64 = 6e-4;
const GAMMA: f64 = 7.0;

/// Runs the benchmark with the dimensions, embedding and lm_head of the `target` in `target_dir`.
///
/// # Errors
/// An unreadable target, or a shape that does not fit.
pub fn train_step(
    settings: &TrainStepSettings,
    target_dir: &Path,
    target: &TargetFacts,
) -> Result<StepReport, Error> {
    let TrainStepSettings { tokens, docs, anchors, .. } = *settings;
    let room = tokens.saturating_sub(docs);
    if anchors > room {
        let expected = format!("{tokens} tokens in {docs} documents have room for {room}");
        return Err(Invalid::new("anchors", anchors, expected).into());
    }
    let place = place(settings.device, Dtype::Auto, 0)?;
    let device = place.device;
    tch::no_grad(|| {
        let config = draft(settings, target)?;
        if device == Device::Cpu {
            check_memory(settings, &config)?;
        }
        let row = RandomRow::new(settings);
        let mut trainer = trainer(settings, config, target_dir, target, place)?;
        let config = trainer.draft.config();
        let shape = [tokens as i64, config.aux_layers() * config.hidden_size];
        let features_tk = Tensor::randn(shape, place.options());
        let mut times = Vec::with_capacity(settings.steps);
        let (mut loss, mut slots, mut flops) = (f64::NAN, 0, 0.0);
        let mut step = || -> Result<Finished, Error> {
            let batch = row.batch(&trainer, &features_tk);
            (slots, flops) = (batch.labels.slots().len() as u64, batch.flops);
            let mut open = trainer.begin(&Single);
            open.add(Some(batch), true)?.map_err(|reason| no_memory(settings, reason))?;
            open.finish(StepSums::default(), Vote::Continue, RATE, 1.0)
        };
        for number in 0..settings.warmup + settings.steps {
            synchronize(device);
            let begun = Instant::now();
            let finished = step()?;
            synchronize(device);
            if number >= settings.warmup {
                times.push(begun.elapsed().as_secs_f64());
            }
            let outcome = readback::read(vec![finished.outcome]).remove(0);
            loss = outcome.statistics.report(0.0).loss;
        }
        let parts_ms = match device {
            Device::Cuda(index) => {
                let (finished, parts) = trace::timed(index, step)?;
                finished?;
                Some(parts.into_iter().collect())
            }
            _ => None,
        };
        let report = report(&trainer, loss, slots, flops, median(times));
        let measured = match settings.products {
            true => Some(measured(&trainer, &row, slots, place)?),
            false => None,
        };
        // After the steps, because the probe's memory would be counted as theirs.
        let predicted_ms = match device {
            Device::Cpu => Some(cpu::predict(&shape_of(&trainer, &row.row))? * 1e3),
            _ => None,
        };
        Ok(StepReport { predicted_ms, parts_ms, measured, ..report })
    })
}

/// Measures the rates of the matmuls in a step of this row.
fn measured(
    trainer: &Trainer,
    row: &RandomRow,
    supervised: u64,
    place: DeviceKind,
) -> Result<Measured, Error> {
    let config = trainer.draft.config();
    let work = trainer.batches.blocks.at(config, &row.row, &row.anchors).work;
    // Logits have the computation's type on a GPU and are float32 on a CPU.
    let width = place.kind.elt_size_in_bytes() as i64;
    let rows = products::ProductRows {
        slots: work.slots as i64,
        context: work.context_rows as i64,
        supervised: supervised as i64,
        chunk: trainer.objective.chunk_bytes as i64 / (config.vocab_size * width),
    };
    products::measure(config, rows, place)
}

/// As many auxiliary layer ids as requested; only their number matters.
fn layer_ids(aux_layers: usize, layers: usize) -> Result<Vec<u32>, Error> {
    let usual = default_layer_ids(layers, aux_layers);
    if usual.len() == aux_layers {
        return Ok(usual);
    }
    if aux_layers > layers + 1 {
        let expected = format!("the target has {layers} layers and its embedding to capture");
        return Err(Invalid::new("aux_layers", aux_layers, expected).into());
    }
    Ok((0..aux_layers as u32).collect())
}

/// Refuses shapes whose hidden states or weights alone do not fit into memory.
fn check_memory(settings: &TrainStepSettings, config: &DraftConfig) -> Result<(), Error> {
    let width = (config.aux_layers() * config.hidden_size) as f64;
    let features = settings.tokens as f64 * width * 4.0;
    machine::check_memory(features, "tokens", settings.tokens)?;
    // weights, gradients and two moments
    let state = DraftLayout::new(config).elements() as f64 * 16.0;
    Ok(machine::check_memory(state, "layers", settings.layers)?)
}

fn no_memory(settings: &TrainStepSettings, reason: String) -> Error {
    let TrainStepSettings { tokens, anchors, layers, .. } = settings;
    let remedy = format!(
        "lower --anchors (now {anchors}), --tokens (now {tokens}) or --layers (now {layers})"
    );
    Error::OutOfMemory { rank: 0, doing: "in a step".to_owned(), reason, remedy }
}

fn draft(settings: &TrainStepSettings, target: &TargetFacts) -> Result<DraftConfig, Error> {
    let shape = DraftShape {
        num_layers: settings.layers,
        block_size: settings.block,
        target_layer_ids: layer_ids(settings.aux_layers, target.num_hidden_layers)?,
        mask_token_id: target.vocab_size - 1,
        sliding_window: None,
        vocab_size: None,
        head: HeadFields::default(),
        stored: None,
    };
    setup::draft_config(target, &shape)
}

fn trainer(
    settings: &TrainStepSettings,
    config: DraftConfig,
    target_dir: &Path,
    target: &TargetFacts,
    place: DeviceKind,
) -> Result<Trainer, Error> {
    let DeviceKind { device, kind } = place;
    let head = TargetIo::of(target_dir, target, place)?;
    let (anchors, seed) = (settings.anchors, settings.seed);
    let anchors = AnchorOptions { per_document: anchors, per_row: anchors, seed, epoch: 0 };
    let batches = BatchMaker::new(head, anchors, None, None);
    let fresh = setup::fresh(config, seed, device);
    let shards = Shards::whole(fresh.layout().elements());
    let (draft, master_weights) =
        MasterWeights::new(fresh, kind, &OptimizerConfig::default(), shards);
    let objective = Objective {
        terms: vec![(ElementLoss::CrossEntropy, 1.0)],
        weighting: Weighting::Decay { gamma: GAMMA },
        denominator: Denominator::Weights,
        labels: LabelSource::Data,
        chunk_bytes: setup::chunk_bytes(settings.loss_chunk_mib, device)?,
        kernels: Kernels::Fast,
    };
    Ok(Trainer::new(draft, master_weights, objective, batches))
}

/// The timed step, described for the fake CUDA device.
fn shape_of<'a>(trainer: &'a Trainer, row: &'a PackedRow) -> StepShape<'a> {
    let Trainer { draft, objective, batches, keep, .. } = trainer;
    StepShape {
        draft: draft.config(),
        kind: draft.flat().kind(),
        tied: true,
        blocks: batches.blocks.clone(),
        objective: objective.clone(),
        optimizer: OptimizerConfig::default(),
        keep: *keep,
        row,
        micro_batches: 1,
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    let middle = times.len() / 2;
    if times.len() % 2 == 1 {
        times[middle]
    } else {
        f64::midpoint(times[middle - 1], times[middle])
    }
}

fn report(trainer: &Trainer, loss: f64, slots: u64, flops: f64, median: f64) -> StepReport {
    let draft = &trainer.draft;
    StepReport {
        step_ms: median * 1e3,
        predicted_ms: None,
        slots_per_s: slots as f64 / median,
        loss,
        peak_mib: machine::peak_memory_mib(draft.device()).unwrap_or(f64::NAN),
        params_m: draft.layout().trained() as f64 / 1e6,
        slots,
        tflops: flops / median / 1e12,
        loss_chunk_mib: trainer.objective.chunk_bytes >> 20,
        device: device_name(draft.device()),
        cpu_level: machine::cpu_level(draft.device()),
        parts_ms: None,
        measured: None,
    }
}

/// Waits until the device is idle.
fn synchronize(device: Device) {
    if let Device::Cuda(index) = device {
        tch::Cuda::synchronize(index as i64);
    }
}

/// Random tokens, all supervised, with random anchors.
struct RandomRow {
    row: PackedRow,
    anchors: Vec<usize>,
}

impl RandomRow {
    fn new(bench: &TrainStepSettings) -> Self {
        tch::manual_seed(bench.seed as i64);
        let tokens = bench.tokens as i64;
        // Any small ids do: the embedding has more rows.
        let ids = Tensor::randint(64, [tokens], (Kind::Int64, Device::Cpu));
        let document_starts: Vec<usize> =
            (0..=bench.docs).map(|d| d * bench.tokens / bench.docs).collect();
        let row = PackedRow {
            input_ids: Vec::<i64>::try_from(ids).expect("int64 ids"),
            loss_mask: vec![true; bench.tokens],
            document_starts,
            samples: (0..bench.docs as u32).collect(),
        };
        let candidates = anchor_candidates(&row);
        let order = Tensor::randperm(candidates.len() as i64, (Kind::Int64, Device::Cpu));
        let order = Vec::<i64>::try_from(order).expect("int64 indices");
        let mut anchors: Vec<usize> =
            order[..bench.anchors].iter().map(|&index| candidates[index as usize]).collect();
        anchors.sort_unstable();
        Self { row, anchors }
    }

    fn batch(&self, trainer: &Trainer, features_tk: &Tensor) -> Batch {
        let Trainer { draft, batches, .. } = trainer;
        let blocks = batches.blocks.at(draft.config(), &self.row, &self.anchors);
        let rows: Vec<i64> = blocks.plan.context_sources().flatten().map(|r| r as i64).collect();
        let rows = upload(&rows, draft.device());
        let ids = slot_ids(draft.config(), &self.row, blocks.plan.anchors());
        let ids = upload(&ids, draft.device());
        batches.batch(draft, blocks, features_tk.index_select(0, &rows), &ids)
    }
}
