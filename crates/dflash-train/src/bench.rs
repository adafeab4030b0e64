//! Times optimizer steps on random states, the way the peers' step benchmarks do.
//!
//! A step is everything that training does with a row once its hidden states are there: planning
//! the blocks, forward, loss, backward, clipping and AdamW. Loading and fetching are not in it.

use std::path::Path;
use std::time::Instant;

use dflash_data::{AnchorOptions, PackedRow, anchor_candidates};
use dflash_dist::Single;
use dflash_model::draft::DraftConfig;
use dflash_model::objective::{Denominator, ElementLoss, LabelSource, Objective, Weighting};
use dflash_model::target::{TargetConfig, TargetHead, default_layer_ids};
use dflash_model::{Kernels, place};
use dflash_settings::{DEFAULT_LOSS_CHUNK_MIB, Dtype, Invalid, TrainStepSettings};
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use crate::batch::{Batch, BatchMaker, BlockMaker};
use crate::config::DraftShape;
use crate::masters::Masters;
use crate::optimizer::OptimizerConfig;
use crate::shards::Shards;
use crate::trainer::{StepSums, Trainer};
use crate::vote::Vote;
use crate::{Error, machine, setup};

/// What came out; the first keys are those of the peers' scripts.
#[derive(Clone, Debug, Serialize)]
pub struct StepReport {
    /// Median wall time of a step, milliseconds.
    pub step_ms: f64,
    /// Supervised slots over the median time.
    pub slots_per_s: f64,
    /// Loss of the last step, nats.
    pub loss: f64,
    /// Peak memory, MiB: resident memory of the process on a CPU, tensors' on a GPU.
    pub peak_mib: f64,
    /// Trained parameters, millions.
    pub params_m: f64,
    /// Supervised slots of the row.
    pub slots: u64,
    /// Useful TFLOP/s: the arithmetic that the row needs over the median time.
    pub tflops: f64,
    /// Where it ran.
    pub device: String,
}

/// Learning rate and slot decay of the peers' benchmark.
const RATE: f64 = 6e-4;
const GAMMA: f64 = 7.0;

/// The benchmark: its settings, and where the target lies.
struct StepBench<'a> {
    settings: &'a TrainStepSettings,
    target: &'a Path,
}

/// Runs the benchmark on the dimensions, the embedding and the lm_head of the target in `target`.
///
/// # Errors
/// An unreadable target, or a shape that does not fit.
pub fn train_step(settings: &TrainStepSettings, target: &Path) -> Result<StepReport, Error> {
    StepBench { settings, target }.run()
}

impl StepBench<'_> {
    fn run(&self) -> Result<StepReport, Error> {
        self.check()?;
        let (device, kind) = place(self.settings.device, Dtype::Auto, 0)?;
        tch::no_grad(|| {
            let row = RandomRow::new(self.settings);
            let mut trainer = self.trainer(device, kind)?;
            let features_tk = Tensor::randn(
                [
                    self.settings.tokens as i64,
                    trainer.draft.config().captures() * trainer.draft.config().hidden_size,
                ],
                (kind, device),
            );
            let mut times = Vec::with_capacity(self.settings.steps);
            let (mut loss, mut slots, mut flops) = (f64::NAN, 0, 0.0);
            for step in 0..self.settings.warmup + self.settings.steps {
                synchronize(device);
                let begun = Instant::now();
                let batch = row.batch(&trainer, &features_tk);
                (slots, flops) = (batch.labels.slots().len() as u64, batch.flops);
                let mut open = trainer.begin(&Single);
                open.add(Some(batch), true)?;
                let result = open.finish((StepSums::default(), Vote::Continue), (RATE, 1.0))?;
                synchronize(device);
                if step >= self.settings.warmup {
                    times.push(begun.elapsed().as_secs_f64());
                }
                loss = result.statistics.report(0.0).loss;
            }
            Ok(report(&trainer, (loss, slots, flops), median(times)))
        })
    }

    fn check(&self) -> Result<(), Error> {
        let room = self.settings.tokens.saturating_sub(self.settings.docs);
        if self.settings.anchors > room {
            let expected = format!(
                "{} tokens in {} documents have room for {room}",
                self.settings.tokens, self.settings.docs
            );
            return Err(Invalid::new("anchors", self.settings.anchors, expected).into());
        }
        Ok(())
    }

    /// As many captured layers as are asked for, which matter by their number alone.
    fn layer_ids(&self, layers: usize) -> Result<Vec<u32>, Error> {
        let usual = default_layer_ids(layers, self.settings.captures);
        if usual.len() == self.settings.captures {
            return Ok(usual);
        }
        if self.settings.captures > layers + 1 {
            let expected = format!("the target has {layers} layers and its embedding to capture");
            return Err(Invalid::new("captures", self.settings.captures, expected).into());
        }
        Ok((0..self.settings.captures as u32).collect())
    }

    fn trainer(&self, device: Device, kind: Kind) -> Result<Trainer, Error> {
        let target = TargetConfig::load(self.target)?;
        let shape = DraftShape {
            num_layers: self.settings.layers,
            block_size: self.settings.block,
            target_layer_ids: self.layer_ids(target.num_hidden_layers)?,
            mask_token_id: target.vocab_size - 1,
            sliding_window: None,
            vocab_size: None,
        };
        let config: DraftConfig = setup::draft_config(&target, &shape)?;
        let head = TargetHead::load(self.target, device, kind)?;
        let objective = Objective {
            terms: vec![(ElementLoss::CrossEntropy, 1.0)],
            weighting: Weighting::Decay { gamma: GAMMA },
            denominator: Denominator::Weights,
            labels: LabelSource::Data,
            chunk_bytes: DEFAULT_LOSS_CHUNK_MIB << 20,
            kernels: Kernels::Fast,
        };
        let blocks = BlockMaker {
            anchors: AnchorOptions {
                per_document: self.settings.anchors,
                per_row: self.settings.anchors,
                seed: self.settings.seed,
                epoch: 0,
            },
            vocabulary: None,
            head_rows: head.lm_head_vh.size()[0] as usize,
            teacher: false,
        };
        let lm_head_vh = head.lm_head_vh.shallow_clone();
        let batches = BatchMaker { blocks, head, lm_head_vh, teacher_layer: None };
        let fresh = setup::fresh(config, self.settings.seed, device);
        let shards = Shards::whole(fresh.layout().elements());
        let parameters = Masters::new(fresh, kind, &OptimizerConfig::default(), shards);
        Ok(Trainer::new(parameters, (objective, batches)))
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

fn report(trainer: &Trainer, (loss, slots, flops): (f64, u64, f64), median: f64) -> StepReport {
    let draft = &trainer.draft;
    StepReport {
        step_ms: median * 1e3,
        slots_per_s: slots as f64 / median,
        loss,
        peak_mib: machine::peak_memory_mib(draft.device()).unwrap_or(f64::NAN),
        params_m: draft.layout().trained() as f64 / 1e6,
        slots,
        tflops: flops / median / 1e12,
        device: format!("{:?}", draft.device()),
    }
}

/// Waits until the device has done what it was given.
fn synchronize(device: Device) {
    if let Device::Cuda(index) = device {
        tch::Cuda::synchronize(index as i64);
    }
}

/// A row of random tokens, all supervised, with random anchors.
struct RandomRow {
    row: PackedRow,
    anchors: Vec<usize>,
}

impl RandomRow {
    fn new(bench: &TrainStepSettings) -> Self {
        tch::manual_seed(bench.seed as i64);
        let tokens = bench.tokens as i64;
        // any small ids will do: the embedding has more rows
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
        let rows = Tensor::from_slice(&rows).to_device(draft.device());
        batches.batch(draft, &self.row, blocks, features_tk.index_select(0, &rows))
    }
}
