//! Rows for the step: prefetched, or computed alternately with it.

use dflash_draft::Draft;
use dflash_hidden_states::Counters;
use dflash_tensor::upload;

use crate::Error;
use crate::assembly::{AssembledRow, Assembler, RowTensors, TrainedRow, slot_ids};
use crate::batch::BatchMaker;
use crate::metrics::Meter;
use crate::order::PlannedRow;
use crate::prefetcher::Prefetcher;
use crate::rows::{ComputedRow, ComputedRows, Loading, RowSource};

/// A source of rows ready for the step.
pub(crate) enum ReadyRows {
    /// They are prefetched while the step computes.
    Prefetched(Prefetcher),
    /// A target on the same device computes them on request.
    InTurns(Box<InTurns>),
}

/// Rows computed by a target in this process.
pub(crate) struct InTurns {
    rows: Box<dyn ComputedRows>,
    assembler: Assembler,
    device: tch::Device,
}

impl ReadyRows {
    /// Starts loading `planned` from `source`, for batches of `draft`.
    pub(crate) fn start(
        source: &dyn RowSource,
        planned: Vec<PlannedRow>,
        batches: &BatchMaker,
        draft: &Draft,
    ) -> Result<Self, Error> {
        let (assembler, device) = (batches.assembler(draft), draft.device());
        Ok(match source.start(planned)? {
            Loading::Fetched(rows) => {
                Self::Prefetched(Prefetcher::start(rows, assembler, source.upload(device)?)?)
            }
            Loading::Computed(rows) => Self::InTurns(Box::new(InTurns { rows, assembler, device })),
        })
    }

    /// The next row; `None` at the end and after an error. `meter` shows the wait.
    pub(crate) fn next(&mut self, meter: &Meter) -> Result<Option<AssembledRow>, Error> {
        match self {
            Self::Prefetched(rows) => meter.waiting("waiting for hidden states", || rows.next()),
            Self::InTurns(rows) => meter.waiting("computing hidden states", || rows.next()),
        }
    }

    /// The counters as of the last row taken.
    pub(crate) fn counters(&self) -> Counters {
        match self {
            Self::Prefetched(rows) => rows.counters(),
            Self::InTurns(rows) => rows.rows.counters(),
        }
    }
}

impl InTurns {
    fn next(&mut self) -> Result<Option<AssembledRow>, Error> {
        let Some(computed) = self.rows.next()? else { return Ok(None) };
        let trained = self.trained(&computed);
        let ComputedRow { row, skipped, target, .. } = computed;
        let (tokens, samples) = (row.input_ids.len(), row.samples.len());
        Ok(Some(AssembledRow { tokens, samples, skipped, trained, target: Some(target) }))
    }

    fn trained(&self, computed: &ComputedRow) -> Option<TrainedRow> {
        let ComputedRow { epoch, row, states, .. } = computed;
        let Assembler { blocks, draft, distribution_layer, .. } = &self.assembler;
        let blocks = blocks.draw(draft, row, *epoch);
        if blocks.labels.slots().is_empty() {
            return None;
        }
        let rows = blocks.plan.context_sources().flatten().map(|row| row as i64);
        let rows_c = upload(&rows.collect::<Vec<_>>(), self.device);
        let tensors = RowTensors::Computed {
            features_ck: states.gathered(&draft.target_layer_ids, &rows_c),
            slot_ids: slot_ids(draft, row, blocks.plan.anchors()),
            last_th: distribution_layer.map(|layer| states.layer(layer).shallow_clone()),
        };
        Some(TrainedRow { blocks, tensors })
    }
}
