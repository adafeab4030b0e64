//! Times optimizer steps on random states, the way the peers' step benchmarks do.
//!
//! A step is everything that training does with a row once its hidden states are there: planning
//! the blocks, forward, loss, backward, clipping and AdamW. Loading and fetching are not in it.

use std::path::PathBuf;
use std::time::Instant;

use dflash_data::{AnchorOptions, PackedRow, anchor_candidates};
use dflash_dist::Single;
use dflash_model::Kernels;
use dflash_model::draft::DraftConfig;
use dflash_model::objective::{Denominator, ElementLoss, LabelSource, Objective, Weighting};
use dflash_model::target::{TargetConfig, TargetHead, default_layer_ids};
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use crate::batch::{Batch, BatchMaker, BlockMaker};
use crate::config::{DeviceChoice, DraftSettings};
use crate::masters::Masters;
use crate::optimizer::OptimizerConfig;
use crate::shards::Shards;
use crate::trainer::{StepSums, Trainer};
use crate::vote::Vote;
use crate::{Error, machine, setup};

/// Shape of the benchmark.
#[derive(Clone, Debug)]
pub struct StepBench {
    /// Directory of the target: its dimensions, embedding and lm_head are used.
    pub target: PathBuf,
    /// Tokens of the row.
    pub tokens: usize,
    /// Anchors of the row.
    pub anchors: usize,
    /// Documents of the row, of equal length.
    pub documents: usize,
    /// Slots of a block.
    pub block_size: usize,
    /// Layers of the draft.
    pub layers: usize,
    /// Captured layers.
    pub captures: usize,
    /// Timed steps.
    pub steps: usize,
    /// Steps before them.
    pub warmup: usize,
    /// Where to compute.
    pub device: DeviceChoice,
    /// Seed of all random numbers.
    pub seed: u64,
}

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

/// A longer row is surely a mistake, and would not fit anywhere.
const MAX_TOKENS: usize = 1 << 24;

/// Bytes of a chunk of logits, the trainer's default.
const CHUNK_BYTES: usize = 8 << 20;

impl StepBench {
    /// Runs the benchmark.
    ///
    /// # Errors
    /// An unreadable target, or a shape that does not fit.
    pub fn run(&self) -> Result<StepReport, Error> {
        self.check()?;
        let (device, kind) = setup::device(self.device, None, 0)?;
        tch::no_grad(|| {
            let row = RandomRow::new(self);
            let mut trainer = self.trainer(device, kind)?;
            let features_tk = Tensor::randn(
                [
                    self.tokens as i64,
                    trainer.draft.config().captures() * trainer.draft.config().hidden_size,
                ],
                (kind, device),
            );
            let mut times = Vec::with_capacity(self.steps);
            let (mut loss, mut slots, mut flops) = (f64::NAN, 0, 0.0);
            for step in 0..self.warmup + self.steps {
                synchronize(device);
                let begun = Instant::now();
                let batch = row.batch(&trainer, &features_tk);
                (slots, flops) = (batch.labels.slots().len() as u64, batch.flops);
                let mut open = trainer.begin(&Single);
                open.add(Some(batch), true)?;
                let result = open.finish((StepSums::default(), Vote::Continue), (RATE, 1.0))?;
                synchronize(device);
                if step >= self.warmup {
                    times.push(begun.elapsed().as_secs_f64());
                }
                loss = result.statistics.report(0.0).loss;
            }
            Ok(report(&trainer, (loss, slots, flops), median(times)))
        })
    }

    fn check(&self) -> Result<(), Error> {
        let counts = [
            ("--tokens", self.tokens),
            ("--anchors", self.anchors),
            ("--docs", self.documents),
            ("--steps", self.steps),
            ("--captures", self.captures),
        ];
        if let Some((flag, _)) = counts.iter().find(|(_, value)| *value == 0) {
            return Err(Error::setting(flag, 0, "it must be at least 1"));
        }
        if self.tokens > MAX_TOKENS {
            let expected = format!("no row has more than {MAX_TOKENS} tokens");
            return Err(Error::setting("--tokens", self.tokens, expected));
        }
        if self.block_size < 2 {
            let expected = "a block holds the anchor and at least one token to predict";
            return Err(Error::setting("--block", self.block_size, expected));
        }
        if self.layers == 0 {
            return Err(Error::setting("--layers", 0, "a draft needs a layer"));
        }
        let room = self.tokens.saturating_sub(self.documents);
        if self.anchors > room {
            let expected = format!(
                "{} tokens in {} documents have room for {room}",
                self.tokens, self.documents
            );
            return Err(Error::setting("--anchors", self.anchors, expected));
        }
        Ok(())
    }

    /// As many captured layers as are asked for, which matter by their number alone.
    fn layer_ids(&self, layers: usize) -> Result<Vec<u32>, Error> {
        let usual = default_layer_ids(layers, self.captures);
        if usual.len() == self.captures {
            return Ok(usual);
        }
        if self.captures > layers + 1 {
            let expected = format!("the target has {layers} layers and its embedding to capture");
            return Err(Error::setting("--captures", self.captures, expected));
        }
        Ok((0..self.captures as u32).collect())
    }

    fn trainer(&self, device: Device, kind: Kind) -> Result<Trainer, Error> {
        let target = TargetConfig::load(&self.target)?;
        let settings = DraftSettings {
            num_layers: self.layers,
            block_size: self.block_size,
            target_layer_ids: self.layer_ids(target.num_hidden_layers)?,
            mask_token_id: target.vocab_size - 1,
            sliding_window: None,
            vocab_size: None,
        };
        let config: DraftConfig = setup::draft_config(&target, &settings)?;
        let head = TargetHead::load(&self.target, device, kind)?;
        let objective = Objective {
            terms: vec![(ElementLoss::CrossEntropy, 1.0)],
            weighting: Weighting::Decay { gamma: GAMMA },
            denominator: Denominator::Weights,
            labels: LabelSource::Data,
            chunk_bytes: CHUNK_BYTES,
            kernels: Kernels::Fast,
        };
        let blocks = BlockMaker {
            anchors: AnchorOptions {
                per_document: self.anchors,
                per_row: self.anchors,
                seed: self.seed,
                epoch: 0,
            },
            vocabulary: None,
            head_rows: head.lm_head_vh.size()[0] as usize,
            teacher: false,
        };
        let lm_head_vh = head.lm_head_vh.shallow_clone();
        let batches = BatchMaker { blocks, head, lm_head_vh, teacher_layer: None };
        let fresh = setup::fresh(config, self.seed, device);
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
    fn new(bench: &StepBench) -> Self {
        tch::manual_seed(bench.seed as i64);
        let tokens = bench.tokens as i64;
        // any small ids will do: the embedding has more rows
        let ids = Tensor::randint(64, [tokens], (Kind::Int64, Device::Cpu));
        let document_starts: Vec<usize> =
            (0..=bench.documents).map(|d| d * bench.tokens / bench.documents).collect();
        let row = PackedRow {
            input_ids: Vec::<i64>::try_from(ids).expect("int64 ids"),
            loss_mask: vec![true; bench.tokens],
            document_starts,
            samples: (0..bench.documents as u32).collect(),
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
