//! From a packed row to what is computed on it: its blocks, which are plain numbers, and with its
//! hidden states the tensors that the draft and the objective take. Training, validation, `bench`
//! and `plan` all build their rows here.

use bytes::Bytes;
use dflash_data::{AnchorOptions, PackedRow, sample_anchors};
use dflash_hidden::{Dtype, HiddenStates};
use dflash_model::attention::{BlockPlan, WindowRule};
use dflash_model::draft::{Draft, DraftConfig, PackedInput};
use dflash_model::flops::RowWork;
use dflash_model::objective::{BlockLabels, DraftVocabulary, LabelledRow, Teacher};
use dflash_model::ops::rms_norm;
use dflash_model::target::TargetHead;
use tch::{Device, Kind, Tensor};

use crate::rows::LoadedRow;

/// What decides the blocks of a row, the same for all rows.
#[derive(Clone, Debug)]
pub(crate) struct BlockMaker {
    /// How anchors are drawn; the row brings its own epoch.
    pub(crate) anchors: AnchorOptions,
    /// The tokens that the draft can propose, where these are not all.
    pub(crate) vocabulary: Option<DraftVocabulary>,
    /// Rows of the lm_head that the draft predicts with.
    pub(crate) head_rows: usize,
    /// Whether the objective needs the target's distribution.
    pub(crate) teacher: bool,
}

/// The part of a packed row that is trained.
#[derive(Debug)]
pub(crate) struct Blocks {
    pub(crate) plan: BlockPlan,
    pub(crate) labels: BlockLabels,
    /// What costs arithmetic.
    pub(crate) work: RowWork,
}

/// What turns rows into batches, the same for all rows.
#[derive(Debug)]
pub(crate) struct BatchMaker {
    pub(crate) blocks: BlockMaker,
    pub(crate) head: TargetHead,
    /// The lm_head's rows of the draft's vocabulary, in the kind of the draft.
    pub(crate) lm_head_vh: Tensor,
    /// The target's layer after which the distribution is read, where the objective needs it.
    pub(crate) teacher_layer: Option<u32>,
}

/// One packed row, ready for forward and backward.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) input: PackedInput,
    pub(crate) labels: BlockLabels,
    pub(crate) teacher: Option<Teacher>,
    /// Arithmetic that the row needs, forward and backward.
    pub(crate) flops: f64,
}

impl BlockMaker {
    /// The blocks of a row that `epoch` draws.
    pub(crate) fn draw(&self, draft: &DraftConfig, row: &PackedRow, epoch: u64) -> Blocks {
        self.at(draft, row, &sample_anchors(row, &AnchorOptions { epoch, ..self.anchors }))
    }

    pub(crate) fn at(&self, draft: &DraftConfig, row: &PackedRow, anchors: &[usize]) -> Blocks {
        let labelled = LabelledRow {
            input_ids: &row.input_ids,
            loss_mask: &row.loss_mask,
            document_starts: &row.document_starts,
        };
        let labels =
            BlockLabels::new(labelled, anchors, draft.block_size, self.vocabulary.as_ref());
        let plan = draft.plan(&row.document_starts, anchors, WindowRule::Serving);
        let active_slots = labels.slots().len() as f64;
        let work = RowWork {
            active_slots,
            head_rows: self.head_rows as f64,
            teacher_slots: if self.teacher { active_slots } else { 0.0 },
            ..RowWork::of_plan(draft, &plan)
        };
        Blocks { plan, labels, work }
    }
}

impl BatchMaker {
    pub(crate) fn new(
        head: TargetHead,
        anchors: AnchorOptions,
        vocabulary: Option<DraftVocabulary>,
        teacher_layer: Option<u32>,
    ) -> Self {
        let lm_head_vh = match &vocabulary {
            Some(vocabulary) => {
                let rows = Tensor::from_slice(vocabulary.selected());
                head.lm_head_vh.index_select(0, &rows.to_device(head.lm_head_vh.device()))
            }
            None => head.lm_head_vh.shallow_clone(),
        };
        let (head_rows, teacher) = (lm_head_vh.size()[0] as usize, teacher_layer.is_some());
        let blocks = BlockMaker { anchors, vocabulary, head_rows, teacher };
        Self { blocks, head, lm_head_vh, teacher_layer }
    }

    /// `None` when the row has no slot to learn from.
    pub(crate) fn make(&self, draft: &Draft, loaded: &LoadedRow) -> Option<Batch> {
        let LoadedRow { epoch, row, states, skipped: _ } = loaded;
        let blocks = self.blocks.draw(draft.config(), row, *epoch);
        if blocks.labels.slots().is_empty() {
            return None;
        }
        let features_ck = features(draft, &blocks.plan, row, states);
        let mut batch = self.batch(draft, row, blocks, features_ck);
        batch.teacher = self
            .teacher_layer
            .map(|layer| self.teacher(draft, &batch.labels, (row, states), layer));
        Some(batch)
    }

    /// The tensors of a row with these blocks and the features of its context rows, [C, K*H]; the
    /// teacher's are left out.
    pub(crate) fn batch(
        &self,
        draft: &Draft,
        row: &PackedRow,
        blocks: Blocks,
        features_ck: Tensor,
    ) -> Batch {
        let Blocks { plan, labels, work } = blocks;
        let slots_nh = self.slot_embeddings(draft, row, plan.anchors());
        let input = draft.prepare(&plan, WindowRule::Serving, features_ck, slots_nh);
        Batch { input, labels, teacher: None, flops: draft.config().flops(&work).total() }
    }

    /// Embeddings of [anchor token, MASK, ...] per block, [N, H].
    fn slot_embeddings(&self, draft: &Draft, row: &PackedRow, anchors: &[usize]) -> Tensor {
        let config = draft.config();
        let mut ids = vec![config.mask_token_id; anchors.len() * config.block_size];
        for (block, &anchor) in anchors.iter().enumerate() {
            ids[block * config.block_size] = row.input_ids[anchor];
        }
        let ids = Tensor::from_slice(&ids).to_device(draft.device());
        self.head.embed(&ids).to_kind(draft.flat().kind())
    }

    /// The target's last hidden states of the rows that predict the labels, after its norm.
    fn teacher(
        &self,
        draft: &Draft,
        labels: &BlockLabels,
        (row, states): (&PackedRow, &[HiddenStates]),
        layer: u32,
    ) -> Teacher {
        let (device, kind) = (draft.device(), draft.flat().kind());
        let parts: Vec<Tensor> = row
            .documents()
            .zip(states)
            .map(|(document, states)| rows_of(states, layer, 0..document.len()))
            .collect();
        let last_th = Tensor::cat(&parts, 0).to_device(device);
        let needed_m = labels.teacher_rows_on(device);
        let hidden_mh = last_th.index_select(0, &needed_m).to_kind(Kind::Float);
        let normed_rh =
            rms_norm(&hidden_mh, &self.head.norm_h.to_kind(Kind::Float), self.head.norm_eps);
        Teacher {
            normed_rh: normed_rh.to_kind(kind),
            rows_m: Tensor::arange(needed_m.size()[0], (Kind::Int64, device)),
            head_vh: self.lm_head_vh.shallow_clone(),
        }
    }
}

/// Features of the plan's context rows, [C, K*H], captures in ascending layer order.
fn features(draft: &Draft, plan: &BlockPlan, row: &PackedRow, states: &[HiddenStates]) -> Tensor {
    let config = draft.config();
    let (rows, width) = (plan.context_rows() as i64, config.hidden_size);
    let kind = draft.flat().kind();
    let features_ck = Tensor::empty([rows, config.captures() * width], (kind, Device::Cpu));
    for span in plan.spans() {
        let document = row.document_starts.partition_point(|&start| start <= span.row_start) - 1;
        let (start, length) = (span.context_row as i64, span.context.len() as i64);
        for (capture, &layer) in config.target_layer_ids.iter().enumerate() {
            let captured = rows_of(&states[document], layer, span.context.clone());
            features_ck
                .narrow(0, start, length)
                .narrow(1, capture as i64 * width, width)
                .copy_(&captured);
        }
    }
    features_ck.to_device(draft.device())
}

/// Rows of one layer of a record, [rows, H] in the record's type on the CPU.
fn rows_of(states: &HiddenStates, layer: u32, rows: std::ops::Range<usize>) -> Tensor {
    let bytes: &Bytes =
        states.layer_bytes(layer).expect("the stream delivers the layers asked for");
    let row_bytes = states.row_bytes();
    let kind = match states.dtype {
        Dtype::Bf16 => Kind::BFloat16,
        Dtype::F32 => Kind::Float,
    };
    let shape = [rows.len() as i64, states.hidden_size as i64];
    Tensor::from_data_size(&bytes[rows.start * row_bytes..rows.end * row_bytes], &shape, kind)
}
