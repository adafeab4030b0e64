//! The rows of an epoch, and means over a sample of them.

use std::sync::Arc;

use dflash_data::{Dataset, PackedRow, Sample, split_index};
use dflash_draft::DraftConfig;
use dflash_settings::{Invalid, PlanSettings, RowSettings};
use dflash_target::TargetFacts;
use serde::Serialize;

use super::Planned;
use super::target::Colocated;
use crate::batch::BlockMaker;
use crate::order::Packing;
use crate::rows::{Samples, TargetSamples, pack};
use crate::{Error, setup};

/// Number of sampled rows, spread over the epoch.
const SAMPLED: usize = 32;

/// Dimensions of a packed row, on average.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct RowShape {
    /// Tokens.
    pub tokens: f64,
    /// Anchors, equal to the number of blocks.
    pub anchors: f64,
    /// Slots of all blocks.
    pub slots: f64,
    /// Context rows visible to any block.
    pub context_rows: f64,
    /// Supervised slots.
    pub supervised: f64,
    /// Useful arithmetic, forward and backward.
    pub flops: f64,
    /// Tokens of the longest document.
    pub longest: f64,
    /// With --colocate, the target's arithmetic.
    pub target_flops: f64,
    /// Matmul arithmetic of a target that we run, up to the highest auxiliary layer.
    pub target_products: f64,
    /// The same for its attention.
    pub target_attention: f64,
}

/// An epoch's size and its rows' dimensions.
#[derive(Debug)]
pub(super) struct Epoch {
    pub(super) documents: usize,
    pub(super) tokens: u64,
    pub(super) rows: u64,
    pub(super) mean: RowShape,
    /// The sampled row with the most slots, which must fit into memory.
    pub(super) largest: RowShape,
    /// That row's tokens.
    pub(super) row: PackedRow,
    /// How its blocks are made.
    pub(super) blocks: BlockMaker,
}

/// Documents of equal length, fully supervised.
struct Alike(usize);

impl Samples for Alike {
    fn sample(&self, _: u32) -> Result<Sample, Error> {
        Ok(Sample { input_ids: vec![0; self.0], loss_mask: vec![true; self.0] })
    }
}

impl Epoch {
    pub(super) fn of(
        planned: &Planned<'_>,
        target: &TargetFacts,
        draft: &DraftConfig,
    ) -> Result<Self, Error> {
        let vocabulary = target.vocab_size;
        let colocate = planned.settings.hidden_states.colocate;
        let target_pass = Colocated::native(planned, draft);
        let (samples, mut lengths) = open(planned.settings, vocabulary)?;
        let trained = 1.0 - planned.settings.validation.held_out(lengths.len());
        lengths.truncate(split_index(lengths.len(), trained));
        let RowSettings { seed, .. } = planned.settings.rows;
        let total_seq_len = planned.settings.rows.total_seq_len();
        let rows = Packing { lengths: &lengths, total_seq_len, seed }.epoch(0);
        let blocks = BlockMaker {
            anchors: setup::anchors(&planned.settings.rows),
            // which tokens a reduced one lacks is not known yet
            vocabulary: None,
            head_rows: planned.vocab_size.unwrap_or(vocabulary as usize),
            target_distribution: planned.settings.objective.needs_target_distribution(),
        };
        let stride = rows.len().div_ceil(SAMPLED).max(1);
        let shape = |row: &Vec<u32>| {
            let row = pack(&*samples, row, total_seq_len)?;
            let work = target_pass.as_ref().map(|target| target.work(&row));
            let (target_products, target_attention) =
                work.map_or((0.0, 0.0), |work| (work.products, work.attention));
            let target_flops = if colocate { target_products + target_attention } else { 0.0 };
            let row = shape(&blocks, draft, &row);
            Ok(RowShape { target_flops, target_products, target_attention, ..row })
        };
        let shapes =
            rows.iter().step_by(stride).map(shape).collect::<Result<Vec<RowShape>, Error>>()?;
        if shapes.iter().all(|shape| shape.supervised == 0.0) {
            let found = format!("{} rows without a slot to learn from", shapes.len());
            let expected = "an anchor needs two consecutive supervised tokens";
            return Err(Invalid::new("data_path", found, expected).into());
        }
        let most =
            |best: usize, at: usize| if shapes[at].slots > shapes[best].slots { at } else { best };
        let largest = (0..shapes.len()).fold(0, most);
        let row = pack(&*samples, &rows[largest * stride], total_seq_len)?;
        let cut = |length: &u32| (*length as usize).min(total_seq_len) as u64;
        Ok(Self {
            documents: lengths.iter().filter(|&&length| length > 0).count(),
            tokens: lengths.iter().map(cut).sum(),
            rows: rows.len() as u64,
            mean: mean(&shapes),
            largest: shapes[largest],
            row,
            blocks,
        })
    }
}

/// The samples and their lengths. Described documents override a run file's dataset.
fn open(
    settings: &PlanSettings,
    embedding_rows: i64,
) -> Result<(Box<dyn Samples>, Vec<u32>), Error> {
    if let (Some(count), Some(length)) = (settings.documents, settings.mean_length) {
        return Ok((Box::new(Alike(length)), vec![length as u32; count]));
    }
    let path = settings.data_path.clone().unwrap_or_default();
    let dataset = Arc::new(Dataset::open(&path)?);
    if dataset.is_empty() {
        return Err(Error::NothingToTrain { path });
    }
    let lengths = dataset.lengths().to_vec();
    Ok((Box::new(TargetSamples { dataset, behind: None, embedding_rows }), lengths))
}

fn shape(blocks: &BlockMaker, draft: &DraftConfig, row: &PackedRow) -> RowShape {
    let blocks = blocks.draw(draft, row, 0);
    RowShape {
        tokens: row.input_ids.len() as f64,
        anchors: blocks.plan.anchors().len() as f64,
        slots: blocks.work.slots,
        context_rows: blocks.work.context_rows,
        supervised: blocks.work.active_slots,
        flops: blocks.work.flops(draft).total(),
        longest: row.documents().map(|document| document.len()).max().unwrap_or(0) as f64,
        target_flops: 0.0,
        target_products: 0.0,
        target_attention: 0.0,
    }
}

fn mean(shapes: &[RowShape]) -> RowShape {
    let of = |pick: fn(&RowShape) -> f64| {
        shapes.iter().map(pick).sum::<f64>() / shapes.len().max(1) as f64
    };
    RowShape {
        tokens: of(|shape| shape.tokens),
        anchors: of(|shape| shape.anchors),
        slots: of(|shape| shape.slots),
        context_rows: of(|shape| shape.context_rows),
        supervised: of(|shape| shape.supervised),
        flops: of(|shape| shape.flops),
        longest: of(|shape| shape.longest),
        target_flops: of(|shape| shape.target_flops),
        target_products: of(|shape| shape.target_products),
        target_attention: of(|shape| shape.target_attention),
    }
}
