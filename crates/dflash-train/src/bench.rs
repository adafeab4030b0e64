//! Times optimizer steps on random states, the way the peers' step benchmarks do.
//!
//! A step is everything that training does with a row once its hidden states are there: planning
//! the blocks, forward, loss, backward, clipping and AdamW. Loading and fetching are not in it.

use std::path::PathBuf;
use std::time::Instant;

use dflash_dist::Single;
use dflash_model::Kernels;
use dflash_model::attention::WindowRule;
use dflash_model::draft::DraftConfig;
use dflash_model::objective::{
    BlockLabels, Denominator, ElementLoss, LabelSource, LabelledRow, Objective, Weighting,
};
use dflash_model::target::{TargetConfig, TargetHead, default_layer_ids};
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use crate::batch::{Batch, BatchMaker};
use crate::config::{DeviceChoice, DraftSettings};
use crate::masters::Masters;
use crate::optimizer::OptimizerConfig;
use crate::shards::Shards;
use crate::trainer::{StepExtras, Trainer};
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
            let row = Row::new(self);
            let mut trainer = self.trainer(device, kind)?;
            let features_tk = Tensor::randn(
                [
                    self.tokens as i64,
                    trainer.draft.config().captures() * trainer.draft.config().hidden_size,
                ],
                (kind, device),
            );
            let mut times = Vec::with_capacity(self.steps);
            let mut loss = f64::NAN;
            for step in 0..self.warmup + self.steps {
                synchronize(device);
                let begun = Instant::now();
                let batch = row.batch(&trainer, &features_tk);
                let mut open = trainer.begin(&Single);
                open.add(Some(batch), true)?;
                let result = open.finish(StepExtras::default(), (RATE, 1.0))?;
                synchronize(device);
                if step >= self.warmup {
                    times.push(begun.elapsed().as_secs_f64());
                }
                loss = result.statistics.report(0.0).loss;
            }
            Ok(self.report(&row, &trainer, (times, loss)))
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
        let batches = BatchMaker {
            lm_head_vh: head.lm_head_vh.shallow_clone(),
            head,
            vocabulary: None,
            teacher_layer: None,
            anchors_per_sequence: self.anchors,
            max_anchors: self.anchors,
            seed: self.seed,
        };
        let fresh = setup::fresh(config, self.seed, device);
        let shards = Shards::whole(fresh.layout().elements());
        let parameters = Masters::new(fresh, kind, &OptimizerConfig::default(), shards);
        Ok(Trainer::new(parameters, (objective, batches)))
    }

    fn report(
        &self,
        row: &Row,
        trainer: &Trainer,
        (mut times, loss): (Vec<f64>, f64),
    ) -> StepReport {
        times.sort_by(f64::total_cmp);
        let middle = times.len() / 2;
        let median = if times.len() % 2 == 1 {
            times[middle]
        } else {
            f64::midpoint(times[middle - 1], times[middle])
        };
        let slots = row.labels.slots().len() as u64;
        StepReport {
            step_ms: median * 1e3,
            slots_per_s: slots as f64 / median,
            loss,
            peak_mib: machine::peak_memory_mib(trainer.draft.device()).unwrap_or(f64::NAN),
            params_m: trainer.draft.layout().trained() as f64 / 1e6,
            slots,
            tflops: row.flops(trainer) / median / 1e12,
            device: format!("{:?}", trainer.draft.device()),
        }
    }
}

/// Waits until the device has done what it was given.
fn synchronize(device: Device) {
    if let Device::Cuda(index) = device {
        tch::Cuda::synchronize(index as i64);
    }
}

/// A row of random tokens, all supervised.
struct Row {
    input_ids: Vec<i64>,
    document_starts: Vec<usize>,
    anchors: Vec<usize>,
    labels: BlockLabels,
}

impl Row {
    fn new(bench: &StepBench) -> Self {
        tch::manual_seed(bench.seed as i64);
        let tokens = bench.tokens as i64;
        // any small ids will do: the embedding has more rows
        let ids = Tensor::randint(64, [tokens], (Kind::Int64, Device::Cpu));
        let input_ids = Vec::<i64>::try_from(ids).expect("int64 ids");
        let document_starts: Vec<usize> =
            (0..=bench.documents).map(|d| d * bench.tokens / bench.documents).collect();
        let candidates: Vec<i64> = document_starts
            .windows(2)
            .flat_map(|bounds| bounds[0]..bounds[1] - 1)
            .map(|position| position as i64)
            .collect();
        let order = Tensor::randperm(candidates.len() as i64, (Kind::Int64, Device::Cpu));
        let order = Vec::<i64>::try_from(order).expect("int64 indices");
        let mut anchors: Vec<usize> = order[..bench.anchors]
            .iter()
            .map(|&index| candidates[index as usize] as usize)
            .collect();
        anchors.sort_unstable();
        let labelled = LabelledRow {
            input_ids: &input_ids,
            loss_mask: &vec![true; bench.tokens],
            document_starts: &document_starts,
        };
        let labels = BlockLabels::new(labelled, &anchors, bench.block_size, None);
        Self { input_ids, document_starts, anchors, labels }
    }

    fn batch(&self, trainer: &Trainer, features_tk: &Tensor) -> Batch {
        let draft = &trainer.draft;
        let config = draft.config();
        let plan = config.plan(&self.document_starts, &self.anchors, WindowRule::Serving);
        let rows: Vec<i64> = plan.context_sources().flatten().map(|row| row as i64).collect();
        let rows = Tensor::from_slice(&rows).to_device(draft.device());
        let features_ck = features_tk.index_select(0, &rows);
        let mut ids = vec![config.mask_token_id; plan.slots()];
        for (block, &anchor) in self.anchors.iter().enumerate() {
            ids[block * config.block_size] = self.input_ids[anchor];
        }
        let ids = Tensor::from_slice(&ids).to_device(draft.device());
        let slots_nh = trainer.batches.head.embed(&ids).to_kind(draft.flat().kind());
        let input = draft.prepare(&plan, WindowRule::Serving, features_ck, slots_nh);
        Batch { input, labels: self.labels.clone(), teacher: None, flops: 0.0 }
    }

    fn flops(&self, trainer: &Trainer) -> f64 {
        let config = trainer.draft.config();
        let plan = config.plan(&self.document_starts, &self.anchors, WindowRule::Serving);
        trainer.batches.flops(&trainer.draft, &plan, &self.labels)
    }
}
