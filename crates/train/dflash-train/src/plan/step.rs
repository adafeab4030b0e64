//! Runs one optimizer step on a fake CUDA device: training's own code on tensors without data.

use dflash_data::PackedRow;
use dflash_dist::Single;
use dflash_draft::objective::Objective;
use dflash_draft::{Draft, DraftConfig, Keep};
use dflash_target::TargetIo;
use dflash_tensor::{LogitTransform, upload};
use dflash_torch_sys::trace::{self, Record};
use tch::{Device, Kind, Tensor};

use crate::Error;
use crate::assembly::slot_ids;
use crate::batch::{Batch, BatchMaker, BlockMaker};
use crate::master_weights::MasterWeights;
use crate::optimizer::OptimizerConfig;
use crate::readback::Control;
use crate::shards::Shards;
use crate::trainer::{StepSums, Trainer};
use crate::vote::Vote;

const GPU: Device = Device::Cuda(0);
/// Any rate will do.
const RATE: f64 = 6e-4;

/// The step to run: how a rank trains, and on which row.
#[derive(Clone, Debug)]
pub(crate) struct StepShape<'a> {
    pub(crate) draft: &'a DraftConfig,
    /// Type of weights and activations.
    pub(crate) kind: Kind,
    /// Whether the target's lm_head is its embedding.
    pub(crate) tied: bool,
    pub(crate) blocks: BlockMaker,
    pub(crate) objective: Objective,
    pub(crate) optimizer: OptimizerConfig,
    pub(crate) keep: Keep,
    pub(crate) row: &'a PackedRow,
    /// Rows per step; all are assumed to be `row`.
    pub(crate) micro_batches: usize,
}

impl StepShape<'_> {
    /// The work that the step asks of the GPU. The memory peak includes weights and state.
    pub(crate) fn record(&self) -> Result<Record, Error> {
        let run = || tch::no_grad(|| self.run());
        let (done, record) = trace::on_fake_cuda(run)?;
        done?;
        Ok(record)
    }

    fn run(&self) -> Result<(), Error> {
        let mut trainer = self.trainer();
        trace::start_over();
        let mut open = trainer.begin(&Single);
        for micro_batch in 1..=self.micro_batches {
            let batch = self.batch(open.trainer());
            let added = open.add(Some(batch), micro_batch == self.micro_batches)?;
            added.unwrap_or_else(|reason| panic!("a fake CUDA device has no bound: {reason}"));
        }
        open.finish(StepSums::default(), Vote::Continue, RATE, 1.0)?;
        Ok(())
    }

    fn trainer(&self) -> Trainer {
        let draft = Draft::zeros(self.draft.clone(), GPU);
        let shards = Shards::whole(draft.layout().elements());
        let (draft, master_weights) = MasterWeights::new(draft, self.kind, &self.optimizer, shards);
        let head = self.head();
        let batches = BatchMaker {
            lm_head_vh: head.lm_head_vh.narrow(0, 0, self.blocks.head_rows as i64),
            output: LogitTransform::identity(),
            distribution_layer: None,
            blocks: self.blocks.clone(),
            head,
        };
        let mut trainer = Trainer::new(draft, master_weights, self.objective.clone(), batches);
        trainer.control = Control::of(GPU);
        trainer.keep = self.keep;
        trainer
    }

    fn head(&self) -> TargetIo {
        let (rows, width) = (self.draft.vocab_size, self.draft.hidden_size);
        let matrix = || Tensor::empty([rows, width], (self.kind, GPU));
        let embedding_vh = matrix();
        let lm_head_vh = if self.tied { embedding_vh.shallow_clone() } else { matrix() };
        let norm_h = Tensor::empty([width], (Kind::Float, GPU));
        TargetIo::plain(embedding_vh, lm_head_vh, &norm_h, self.draft.rms_norm_eps)
    }

    /// As [`BatchMaker::make`], but for a row that no other thread assembled.
    fn batch(&self, trainer: &Trainer) -> Batch {
        let _part = trace::part("rows");
        let Trainer { draft, batches, .. } = trainer;
        let blocks = self.blocks.draw(self.draft, self.row, 0);
        let features_ck = self.states(blocks.plan.context_rows() as i64, self.draft.aux_layers());
        let ids = slot_ids(self.draft, self.row, blocks.plan.anchors());
        let mut batch = batches.batch(draft, blocks, features_ck, &upload(&ids, GPU));
        if self.blocks.target_distribution {
            let last_th = self.states(self.row.input_ids.len() as i64, 1);
            batch.target_distribution =
                Some(batches.target_distribution(draft, &batch.labels, &last_th));
        }
        batch
    }

    /// Hidden states of `aux_layers` layers, copied from pinned memory.
    fn states(&self, rows: i64, aux_layers: i64) -> Tensor {
        let width = aux_layers * self.draft.hidden_size;
        let host = Tensor::empty([rows, width], (self.kind, Device::Cpu));
        host.to_device_(GPU, self.kind, true, false)
    }
}

#[cfg(test)]
mod tests;
