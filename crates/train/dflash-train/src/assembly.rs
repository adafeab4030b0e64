//! The host's part of building a batch: turns a loaded row into blocks (plain numbers) and one
//! buffer with everything that the device reads. Hidden states are copied once, from the received
//! body to the buffer; nothing here computes with tensors.

use dflash_data::PackedRow;
use dflash_draft::DraftConfig;
use dflash_hidden_states::{Dtype, HiddenStates};
use tch::{Kind, Tensor};

use crate::batch::{BlockMaker, Blocks};
use crate::prefetcher::Lease;
use crate::rows::{LoadedRow, TargetTime};

/// Alignment in bytes of tensors in a buffer, as in libtorch's GPU allocations.
const ALIGNMENT: usize = 256;

/// Assembles rows; the same for all rows.
#[derive(Clone, Debug)]
pub(crate) struct Assembler {
    pub(crate) blocks: BlockMaker,
    pub(crate) draft: DraftConfig,
    /// The target layer whose states give the target's distribution, if the objective needs it.
    pub(crate) distribution_layer: Option<u32>,
    /// Type of the features in the buffer if the computation reads the buffer itself; `None` for a
    /// GPU, which receives the original type and converts it.
    pub(crate) dtype: Option<Dtype>,
}

/// A row that is ready for the device.
#[derive(Debug)]
pub(crate) struct AssembledRow {
    /// Tokens of the packed row.
    pub(crate) tokens: usize,
    /// Samples that have hidden states.
    pub(crate) samples: usize,
    /// Samples left out.
    pub(crate) skipped: usize,
    /// `None` if the row has no supervised slot.
    pub(crate) trained: Option<TrainedRow>,
    /// Time spent by a target in this process on the row.
    pub(crate) target: Option<TargetTime>,
}

/// The part of a row that is trained on.
#[derive(Debug)]
pub(crate) struct TrainedRow {
    pub(crate) blocks: Blocks,
    pub(crate) tensors: RowTensors,
}

/// The tensors of a batch other than its blocks.
#[derive(Debug)]
pub(crate) enum RowTensors {
    /// All in one host buffer.
    Written { layout: Layout, lease: Lease },
    /// From states computed on the device.
    Computed {
        /// Features of the plan's context rows, [C, K*H].
        features_ck: Tensor,
        /// Tokens of the slots, `[N]`.
        slot_ids: Vec<i64>,
        /// The target's last hidden states of all tokens, [T, H], if the objective needs them.
        last_th: Option<Tensor>,
    },
}

/// Layout of a row's buffer.
#[derive(Debug)]
pub(crate) struct Layout {
    /// Features of the plan's context rows, [C, K*H], with auxiliary layers in ascending order.
    pub(crate) features: TensorSlot,
    /// Tokens of the slots, [N, 1] int64: [anchor token, MASK, ...] for each block.
    pub(crate) slot_ids: TensorSlot,
    /// The target's last hidden states of all tokens, [T, H], if the objective needs them.
    pub(crate) last: Option<TensorSlot>,
}

/// A tensor in a buffer.
#[derive(Debug)]
pub(crate) struct TensorSlot {
    /// Offset of its first byte.
    start: usize,
    shape: [usize; 2],
    kind: Kind,
}

impl Assembler {
    /// Draws the blocks of `loaded` and lays out its buffer; `None` if there is no supervised slot.
    pub(crate) fn plan(&self, loaded: &LoadedRow) -> Option<(Blocks, Layout)> {
        let LoadedRow { epoch, row, states, skipped: _ } = loaded;
        let blocks = self.blocks.draw(&self.draft, row, *epoch);
        if blocks.labels.slots().is_empty() {
            return None;
        }
        let layout = self.layout(&blocks, row, common_dtype(states));
        Some((blocks, layout))
    }

    fn layout(&self, blocks: &Blocks, row: &PackedRow, came_as: Dtype) -> Layout {
        let width = self.draft.hidden_size as usize;
        let aux_layers = self.draft.target_layer_ids.len();
        let kind = kind_of(self.dtype.unwrap_or(came_as));
        let plan = &blocks.plan;
        let features = TensorSlot::after(0, [plan.context_rows(), aux_layers * width], kind);
        let slots = plan.anchors().len() * self.draft.block_size;
        let slot_ids = TensorSlot::after(features.end(), [slots, 1], Kind::Int64);
        let last = |_| {
            let shape = [row.input_ids.len(), width];
            TensorSlot::after(slot_ids.end(), shape, kind_of(came_as))
        };
        Layout { last: self.distribution_layer.map(last), features, slot_ids }
    }

    /// Fills `out` according to `layout`.
    ///
    /// # Panics
    /// If a requested layer is missing, which is a bug.
    pub(crate) fn write(
        &self,
        loaded: &LoadedRow,
        blocks: &Blocks,
        layout: &Layout,
        out: &mut [u8],
    ) {
        let LoadedRow { row, states, .. } = loaded;
        self.write_features(&layout.features, row, states, blocks, out);
        let ids = slot_ids(&self.draft, row, blocks.plan.anchors());
        let places = out[layout.slot_ids.start..layout.slot_ids.end()].chunks_exact_mut(8);
        places.zip(ids).for_each(|(place, id)| place.copy_from_slice(&id.to_le_bytes()));
        if let (Some(last), Some(layer)) = (&layout.last, self.distribution_layer) {
            for (document, states) in row.documents().zip(states) {
                let place = last.start + document.start * last.stride();
                let (out, rows) = (&mut out[place..], 0..document.len());
                let written = states.write_rows(layer, rows, last.dtype(), out, last.stride());
                assert!(written, "{ASKED}");
            }
        }
    }

    fn write_features(
        &self,
        features: &TensorSlot,
        row: &PackedRow,
        states: &[HiddenStates],
        blocks: &Blocks,
        out: &mut [u8],
    ) {
        let (stride, dtype) = (features.stride(), features.dtype());
        let width = self.draft.hidden_size as usize * dtype.size();
        // A document whose only anchor is its first token has no context rows; its offset would lie
        // past the last row, where there may be no space.
        for span in blocks.plan.spans().iter().filter(|span| !span.context.is_empty()) {
            let starts = &row.document_starts;
            let document = starts.partition_point(|&start| start <= span.row_start) - 1;
            let first = features.start + span.context_row * stride;
            for (aux_layer, &layer) in self.draft.target_layer_ids.iter().enumerate() {
                let (out, rows) = (&mut out[first + aux_layer * width..], span.context.clone());
                let written = states[document].write_rows(layer, rows, dtype, out, stride);
                assert!(written, "{ASKED}");
            }
        }
    }
}

const ASKED: &str = "the stream delivers the layers asked for";

impl Layout {
    /// Size of the buffer in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.last.as_ref().unwrap_or(&self.slot_ids).end()
    }
}

impl TensorSlot {
    fn after(end: usize, shape: [usize; 2], kind: Kind) -> Self {
        Self { start: end.next_multiple_of(ALIGNMENT), shape, kind }
    }

    fn end(&self) -> usize {
        self.start + self.shape[0] * self.stride()
    }

    /// Bytes per row.
    fn stride(&self) -> usize {
        self.shape[1] * self.kind.elt_size_in_bytes()
    }

    /// Type of hidden states.
    fn dtype(&self) -> Dtype {
        if self.kind == Kind::BFloat16 { Dtype::Bf16 } else { Dtype::F32 }
    }

    /// The tensor in `bytes_t`, a uint8 tensor of the buffer's bytes, as a view.
    pub(crate) fn of(&self, bytes_t: &Tensor) -> Tensor {
        let (start, length) = (self.start as i64, (self.end() - self.start) as i64);
        bytes_t.narrow(0, start, length).view_dtype(self.kind).view(self.shape.map(|n| n as i64))
    }
}

/// [anchor token, MASK, ...] for each block.
pub(crate) fn slot_ids(draft: &DraftConfig, row: &PackedRow, anchors: &[usize]) -> Vec<i64> {
    let mut ids = vec![draft.mask_token_id; anchors.len() * draft.block_size];
    for (block, &anchor) in anchors.iter().enumerate() {
        ids[block * draft.block_size] = row.input_ids[anchor];
    }
    ids
}

/// The type that can hold the states of all documents: servers and stored files may differ.
fn common_dtype(states: &[HiddenStates]) -> Dtype {
    let all_bf16 = states.iter().all(|states| states.dtype == Dtype::Bf16);
    if all_bf16 { Dtype::Bf16 } else { Dtype::F32 }
}

fn kind_of(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::Bf16 => Kind::BFloat16,
        Dtype::F32 => Kind::Float,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use bytes::Bytes;
    use dflash_data::AnchorOptions;
    use tch::Device;

    use super::*;
    use crate::fake::draft_config;

    const WIDTH: usize = 8;
    const LAYERS: [u32; 3] = [1, 2, 4];

    pub(crate) fn assembler(dtype: Option<Dtype>, distribution_layer: Option<u32>) -> Assembler {
        let anchors = AnchorOptions { per_document: 4, per_row: 64, seed: 3, epoch: 0 };
        let target_distribution = distribution_layer.is_some();
        let blocks = BlockMaker { anchors, vocabulary: None, head_rows: 96, target_distribution };
        Assembler { blocks, draft: draft_config(WIDTH as i64, 2), distribution_layer, dtype }
    }

    /// The value at one position, exact in bf16 for the first few.
    fn value(document: usize, layer: u32, token: usize, column: usize) -> f32 {
        let place = (document * 16 + token) * 8 + column;
        (1.0 + f32::from(u16::try_from(place).unwrap()) / 256.0)
            * [0.0, 1.0, -1.0, 0.0, 2.0][layer as usize]
    }

    fn states(document: usize, tokens: usize, dtype: Dtype) -> HiddenStates {
        let layer = |&layer: &u32| -> Bytes {
            let places =
                (0..tokens).flat_map(|token| (0..WIDTH).map(move |column| (token, column)));
            let values = places.map(|(token, column)| value(document, layer, token, column));
            let values: Vec<f32> = values.collect();
            let tensor = Tensor::from_slice(&values).to_kind(kind_of(dtype));
            let mut bytes = vec![0; values.len() * dtype.size()];
            tensor.copy_data_u8(&mut bytes, values.len());
            bytes.into()
        };
        let layers = LAYERS.iter().map(layer).collect();
        HiddenStates::new(LAYERS.to_vec(), tokens, WIDTH, dtype, layers).unwrap()
    }

    /// Three documents, the second without anchors; the contents depend on `number`.
    pub(crate) fn loaded(number: usize, dtypes: [Dtype; 3]) -> LoadedRow {
        let document_starts = vec![0, 9, 13, 24];
        let row = PackedRow {
            input_ids: (number as i64..number as i64 + 24).collect(),
            loss_mask: (0..24).map(|token| !(9..13).contains(&token)).collect(),
            document_starts: document_starts.clone(),
            samples: vec![7, 8, 9],
        };
        let lengths = document_starts.windows(2).map(|ends| ends[1] - ends[0]);
        let documents = lengths.zip(dtypes).enumerate();
        let states =
            documents.map(|(document, (tokens, dtype))| states(number + document, tokens, dtype));
        LoadedRow { epoch: number as u64, row, states: states.collect(), skipped: 0 }
    }

    /// Compares the buffer's contents with tensors built from the record.
    fn check(dtypes: [Dtype; 3], dtype: Option<Dtype>, expect: (Kind, Kind)) {
        let (assembler, loaded) = (assembler(dtype, Some(4)), loaded(0, dtypes));
        let (blocks, layout) = assembler.plan(&loaded).unwrap();
        let mut out = vec![0xee; layout.bytes()];
        assembler.write(&loaded, &blocks, &layout, &mut out);
        let bytes_t = Tensor::from_slice(&out);
        let features_ck = layout.features.of(&bytes_t);
        let last_th = layout.last.as_ref().unwrap().of(&bytes_t);
        assert_eq!((features_ck.kind(), last_th.kind()), expect);
        let layer = |document: usize, layer: u32| {
            let states = &loaded.states[document];
            let shape = [states.tokens as i64, WIDTH as i64];
            Tensor::from_data_size(states.layer(layer).unwrap(), &shape, kind_of(states.dtype))
        };
        let plan = &blocks.plan;
        assert_eq!(plan.spans().len(), 2);
        let spans = plan.spans().iter().map(|span| {
            let document = [0, 9, 13].iter().position(|&start| start == span.row_start).unwrap();
            let aux_states = Tensor::cat(&[layer(document, 1), layer(document, 2)], 1);
            let (first, length) = (span.context.start as i64, span.context.len() as i64);
            aux_states.narrow(0, first, length).to_kind(expect.0)
        });
        assert_eq!(features_ck, Tensor::cat(&spans.collect::<Vec<_>>(), 0));
        let last: Vec<Tensor> = (0..3).map(|document| layer(document, 4)).collect();
        assert_eq!(last_th, Tensor::cat(&last, 0));
        let ids = Vec::<i64>::try_from(layout.slot_ids.of(&bytes_t).flatten(0, 1)).unwrap();
        let expected = plan.anchors().iter().flat_map(|&anchor| [anchor as i64, 95, 95, 95]);
        assert_eq!(ids, expected.collect::<Vec<_>>());
        assert_eq!(features_ck.device(), Device::Cpu);
    }

    #[test]
    fn a_buffer_holds_the_row_as_the_computation_takes_it() {
        let (bf16, f32) = (Dtype::Bf16, Dtype::F32);
        let (half, float) = (Kind::BFloat16, Kind::Float);
        check([f32; 3], Some(f32), (float, float));
        check([bf16; 3], Some(f32), (float, half));
        check([f32; 3], Some(bf16), (half, float));
        // in their original type, for a GPU; mixed types are widened
        check([bf16; 3], None, (half, half));
        check([f32; 3], None, (float, float));
        check([bf16, f32, bf16], None, (float, float));
    }

    #[test]
    fn a_document_without_context_needs_no_place() {
        let mut loaded = loaded(0, [Dtype::F32; 3]);
        // The only supervised tokens are the first two of the last document.
        let mask = loaded.row.loss_mask.iter_mut().enumerate();
        mask.for_each(|(token, supervised)| *supervised = [13, 14].contains(&token));
        let mut assembler = assembler(Some(Dtype::F32), None);
        // Blocks so small that the second auxiliary layer's offset would lie past the buffer's end.
        assembler.draft.block_size = 2;
        let (blocks, layout) = assembler.plan(&loaded).unwrap();
        assert_eq!((blocks.plan.anchors(), blocks.plan.context_rows()), (&[13][..], 0));
        let mut out = vec![0; layout.bytes()];
        assembler.write(&loaded, &blocks, &layout, &mut out);
        let ids = Vec::<i64>::try_from(layout.slot_ids.of(&Tensor::from_slice(&out)).flatten(0, 1));
        assert_eq!(ids.unwrap(), [13, 95]);
    }

    #[test]
    fn a_row_without_a_slot_to_learn_from_needs_no_buffer() {
        let mut loaded = loaded(0, [Dtype::F32; 3]);
        loaded.row.loss_mask.fill(false);
        assert!(assembler(None, None).plan(&loaded).is_none());
    }
}
