//! The rows of an epoch, and what a sample of them is made of.

use dflash_data::{
    AnchorOptions, Dataset, PackedRow, Sample, epoch_order, pack_rows, sample_anchors, split_index,
};
use dflash_model::attention::WindowRule;
use dflash_model::draft::DraftConfig;
use dflash_model::flops::RowWork;
use dflash_model::objective::{BlockLabels, LabelledRow};
use serde::Serialize;

use super::{PlanConfig, PlanData};
use crate::Error;

/// Rows that are looked at, spread over the epoch.
const SAMPLED: usize = 32;

/// What a packed row is made of, on average.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct RowShape {
    /// Tokens.
    pub tokens: f64,
    /// Anchors, hence blocks.
    pub anchors: f64,
    /// Slots of all blocks.
    pub slots: f64,
    /// Context rows that some block sees.
    pub context_rows: f64,
    /// Supervised slots.
    pub supervised: f64,
    /// Useful arithmetic, forward and backward.
    pub flops: f64,
}

/// An epoch's size, and its rows' shapes.
#[derive(Debug)]
pub(super) struct Epoch {
    pub(super) documents: usize,
    pub(super) tokens: u64,
    pub(super) rows: u64,
    pub(super) mean: RowShape,
    /// The sampled row with the most slots: memory has to hold it.
    pub(super) largest: RowShape,
}

/// Where samples come from.
enum Source {
    Dataset(Dataset),
    Length(usize),
}

impl Source {
    fn sample(&self, index: u32) -> Result<Sample, Error> {
        match self {
            Self::Dataset(dataset) => Ok(dataset.get(index as usize)?),
            Self::Length(length) => {
                Ok(Sample { input_ids: vec![0; *length], loss_mask: vec![true; *length] })
            }
        }
    }
}

impl Epoch {
    pub(super) fn of(
        config: &PlanConfig,
        draft: &DraftConfig,
        vocabulary: i64,
    ) -> Result<Self, Error> {
        let (source, mut lengths) = open(&config.data)?;
        lengths.truncate(split_index(lengths.len(), 1.0 - config.validation_ratio));
        let order = epoch_order(lengths.len(), config.seed, 0);
        let rows = pack_rows(&order, &lengths, config.total_seq_len);
        let head_rows = config.draft.vocab_size.map_or(vocabulary as f64, |size| size as f64);
        let stride = rows.len().div_ceil(SAMPLED).max(1);
        let mut shapes = Vec::new();
        for row in rows.iter().step_by(stride) {
            let samples = row
                .iter()
                .map(|&index| Ok((index, source.sample(index)?)))
                .collect::<Result<Vec<_>, Error>>()?;
            let row = PackedRow::from_samples(&samples, config.total_seq_len);
            shapes.push(shape(config, draft, &row, head_rows));
        }
        if shapes.iter().all(|shape| shape.supervised == 0.0) {
            return Err(Error::setting(
                "the data",
                format!("{} rows without a slot to learn from", shapes.len()),
                "anchors need two supervised tokens in a row",
            ));
        }
        let cut = |length: &u32| (*length as usize).min(config.total_seq_len) as u64;
        let most = |a: &RowShape, b: &RowShape| if b.slots > a.slots { *b } else { *a };
        Ok(Self {
            documents: lengths.iter().filter(|&&length| length > 0).count(),
            tokens: lengths.iter().map(cut).sum(),
            rows: rows.len() as u64,
            mean: mean(&shapes),
            largest: shapes.iter().fold(RowShape::default(), |a, b| most(&a, b)),
        })
    }
}

fn open(data: &PlanData) -> Result<(Source, Vec<u32>), Error> {
    match data {
        PlanData::Dataset(path) => {
            let dataset = Dataset::open(path)?;
            if dataset.is_empty() {
                return Err(Error::NothingToTrain { path: path.clone() });
            }
            let lengths = dataset.lengths().to_vec();
            Ok((Source::Dataset(dataset), lengths))
        }
        PlanData::Documents { count, length } => {
            Ok((Source::Length(*length), vec![*length as u32; *count]))
        }
    }
}

fn shape(config: &PlanConfig, draft: &DraftConfig, row: &PackedRow, head_rows: f64) -> RowShape {
    let options = AnchorOptions {
        per_document: config.anchors_per_sequence,
        per_row: config.max_anchors,
        seed: config.seed,
        epoch: 0,
    };
    let anchors = sample_anchors(row, &options);
    let labelled = LabelledRow {
        input_ids: &row.input_ids,
        loss_mask: &row.loss_mask,
        document_starts: &row.document_starts,
    };
    let labels = BlockLabels::new(labelled, &anchors, draft.block_size, None);
    let supervised = labels.slots().len() as f64;
    let plan = draft.plan(&row.document_starts, &anchors, WindowRule::Serving);
    let work = RowWork {
        active_slots: supervised,
        head_rows,
        teacher_slots: if config.teacher { supervised } else { 0.0 },
        ..RowWork::of_plan(draft, &plan)
    };
    RowShape {
        tokens: row.input_ids.len() as f64,
        anchors: anchors.len() as f64,
        slots: work.slots,
        context_rows: work.context_rows,
        supervised,
        flops: draft.flops(&work).total(),
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
    }
}
