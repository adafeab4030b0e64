//! Turns a packed row into blocks, which are plain numbers, and with its hidden states into the
//! tensors that draft and objective take. Training, validation, `bench` and `plan` all build their
//! rows here.

use dflash_data::{AnchorOptions, PackedRow, sample_anchors};
use dflash_draft::attention::{BlockPlan, WindowRule};
use dflash_draft::flops::RowWork;
use dflash_draft::objective::{BlockLabels, DraftVocabulary, LabelledRow, TargetDistribution};
use dflash_draft::{Draft, DraftConfig, PackedInput, plan_blocks};
use dflash_hidden_states::Dtype;
use dflash_target::TargetIo;
use dflash_tensor::{LogitTransform, upload};
use dflash_torch_sys::trace;
use tch::{Device, Kind, Tensor};

use crate::Error;
use crate::assembly::{Assembler, RowTensors, TrainedRow};
use crate::prefetcher::Lease;

/// Makes the blocks of rows; the same for all rows.
#[derive(Clone, Debug)]
pub(crate) struct BlockMaker {
    /// How anchors are drawn; the row supplies its own epoch.
    pub(crate) anchors: AnchorOptions,
    /// The draft's vocabulary, if reduced.
    pub(crate) vocabulary: Option<DraftVocabulary>,
    /// Number of lm_head rows that the draft predicts with.
    pub(crate) head_rows: usize,
    /// Whether the objective needs the target's distribution.
    pub(crate) target_distribution: bool,
}

/// The blocks of a packed row.
#[derive(Debug)]
pub(crate) struct Blocks {
    pub(crate) plan: BlockPlan,
    pub(crate) labels: BlockLabels,
    /// The row's dimensions for counting arithmetic.
    pub(crate) work: RowWork,
}

/// Makes batches of rows; the same for all rows.
#[derive(Debug)]
pub(crate) struct BatchMaker {
    pub(crate) blocks: BlockMaker,
    pub(crate) head: TargetIo,
    /// The lm_head's rows for the draft's vocabulary, in the draft's type.
    pub(crate) lm_head_vh: Tensor,
    /// Scale and soft cap that turn the output of these rows into the target's logits.
    pub(crate) output: LogitTransform,
    /// The target layer whose states give the target's distribution, if the objective needs it.
    pub(crate) distribution_layer: Option<u32>,
}

/// One packed row, ready for forward and backward.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) input: PackedInput,
    pub(crate) labels: BlockLabels,
    pub(crate) target_distribution: Option<TargetDistribution>,
    /// Arithmetic that the row requires, forward and backward.
    pub(crate) flops: f64,
    /// The buffer that may hold the tensors above; fields drop in order, so it outlives them.
    pub(crate) lease: Option<Lease>,
}

impl BlockMaker {
    /// Draws the blocks of a row for `epoch`.
    pub(crate) fn draw(&self, draft: &DraftConfig, row: &PackedRow, epoch: u64) -> Blocks {
        self.at(draft, row, &sample_anchors(row, &AnchorOptions { epoch, ..self.anchors }))
    }

    pub(crate) fn at(&self, draft: &DraftConfig, row: &PackedRow, anchors: &[usize]) -> Blocks {
        let labelled = LabelledRow {
            input_ids: &row.input_ids,
            loss_mask: &row.loss_mask,
            document_starts: &row.document_starts,
        };
        let labels = BlockLabels::new(labelled, anchors, draft.block(), self.vocabulary.as_ref());
        let plan = plan_blocks(draft, &row.document_starts, anchors, WindowRule::Serving);
        let active_slots = labels.slots().len() as f64;
        let work = RowWork {
            active_slots,
            head_rows: self.head_rows as f64,
            distribution_slots: if self.target_distribution { active_slots } else { 0.0 },
            ..RowWork::of_plan(draft, &plan)
        };
        Blocks { plan, labels, work }
    }
}

impl BatchMaker {
    pub(crate) fn new(
        head: TargetIo,
        anchors: AnchorOptions,
        vocabulary: Option<DraftVocabulary>,
        distribution_layer: Option<u32>,
    ) -> Self {
        let (lm_head_vh, output) = match &vocabulary {
            Some(vocabulary) => {
                let rows = Tensor::from_slice(vocabulary.selected());
                let rows = rows.to_device(head.lm_head_vh.device());
                (head.lm_head_vh.index_select(0, &rows), head.output().of_rows(&rows))
            }
            None => (head.lm_head_vh.shallow_clone(), head.output().shared()),
        };
        let (head_rows, target_distribution) =
            (lm_head_vh.size()[0] as usize, distribution_layer.is_some());
        let blocks = BlockMaker { anchors, vocabulary, head_rows, target_distribution };
        Self { blocks, head, lm_head_vh, output, distribution_layer }
    }

    /// The assembler of rows for `draft`.
    pub(crate) fn assembler(&self, draft: &Draft) -> Assembler {
        let dtype = match (draft.device(), draft.flat().kind()) {
            (Device::Cuda(_), _) => None,
            (_, Kind::BFloat16) => Some(Dtype::Bf16),
            _ => Some(Dtype::F32),
        };
        let (blocks, draft) = (self.blocks.clone(), draft.config().clone());
        Assembler { blocks, draft, distribution_layer: self.distribution_layer, dtype }
    }

    /// The tensors of an assembled row.
    pub(crate) fn make(&self, draft: &Draft, row: TrainedRow) -> Result<Batch, Error> {
        let _part = trace::part("rows");
        let TrainedRow { blocks, tensors } = row;
        let (features_ck, slot_ids_n, last_th, lease) = match tensors {
            RowTensors::Computed { features_ck, slot_ids, last_th } => {
                (features_ck, upload(&slot_ids, draft.device()), last_th, None)
            }
            RowTensors::Written { layout, lease } => {
                let bytes_t = lease.tensor()?;
                let slot_ids_n = layout.slot_ids.of(&bytes_t).view([-1]);
                let last_th = layout.last.map(|last| last.of(&bytes_t));
                (layout.features.of(&bytes_t), slot_ids_n, last_th, Some(lease))
            }
        };
        let features_ck = features_ck.to_kind(draft.flat().kind());
        let mut batch = self.batch(draft, blocks, features_ck, &slot_ids_n);
        batch.target_distribution =
            last_th.map(|last_th| self.target_distribution(draft, &batch.labels, &last_th));
        batch.lease = lease;
        Ok(batch)
    }

    /// The tensors of a row with these blocks, given the features of its context rows, [C, K*H],
    /// and the tokens of its slots, `[N]`; without the target's distribution.
    pub(crate) fn batch(
        &self,
        draft: &Draft,
        blocks: Blocks,
        features_ck: Tensor,
        slot_ids_n: &Tensor,
    ) -> Batch {
        let Blocks { plan, labels, work } = blocks;
        let slots_nh = self.head.rows(slot_ids_n).to_kind(draft.flat().kind());
        let input = draft.prepare(&plan, WindowRule::Serving, features_ck, slots_nh);
        let flops = work.flops(draft.config()).total();
        Batch { input, labels, target_distribution: None, flops, lease: None }
    }

    /// The target's distribution at the rows that predict labels, from its last states [T, H].
    pub(crate) fn target_distribution(
        &self,
        draft: &Draft,
        labels: &BlockLabels,
        last_th: &Tensor,
    ) -> TargetDistribution {
        let (device, kind) = (draft.device(), draft.flat().kind());
        let needed_m = labels.distribution_rows_on(device);
        let hidden_mh = last_th.index_select(0, &needed_m).to_kind(Kind::Float);
        TargetDistribution {
            normed_rh: self.head.normed(&hidden_mh).to_kind(kind),
            rows_m: Tensor::arange(needed_m.size()[0], (Kind::Int64, device)),
            head_vh: self.lm_head_vh.shallow_clone(),
            output: self.output.shared(),
        }
    }
}
