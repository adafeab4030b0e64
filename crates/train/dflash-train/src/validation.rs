//! Validation: loss and accuracy on held-out rows with fixed anchors, and the acceptance length
//! that real decoding reaches on held-out prompts.
//!
//! The ranks share both kinds of work, sum their counts and vote. A rank that was told to stop in
//! the middle, or that failed, still takes part in the sum, so that no rank waits for another.
//!
//! Training does not depend on the decoder: the engine passes it a function from a draft and a
//! share of the prompts to counts. That keeps `train` and `decode` apart, and measures the draft as
//! its checkpoint serves it.

use std::time::Instant;

use dflash_data::pack_rows;
use dflash_dist::Communicator;
use dflash_draft::objective::Statistics;
use dflash_draft::{Draft, LoadedDraft};
use dflash_io::{Progress, Show, Unit};
use dflash_run::{Acceptance, HeldOutPrompts, HeldOutRows, RunDir, ValidationLine};

use crate::Error;
use crate::metrics::{Meter, figures};
use crate::no_memory::Asking;
use crate::order::PlannedRow;
use crate::prepared::Prepared;
use crate::ready::ReadyRows;
use crate::rows::RowSource;
use crate::trainer::{Trainer, no_statistics};
use crate::vote::{Halt, Vote, add_up};

/// The epoch with which validation rows draw their anchors; training epochs count from 0.
const FIXED_DRAW: u64 = u64::MAX;

/// Measures a draft's acceptance on one rank's share of held-out prompts; `None` if stopped.
pub type AcceptanceProbe<'a> =
    &'a mut dyn FnMut(&LoadedDraft, Share) -> Result<Option<Acceptance>, ProbeError>;

/// Any error of a probe.
pub type ProbeError = Box<dyn std::error::Error + Send + Sync>;

/// The prompts of one rank: `rank`, `rank + ranks`, …
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Rank, 0-based.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// Where the rank shows its progress.
    pub show: Show,
}

/// One rank's part in the validations of a run.
pub(crate) struct Validation<'a, 'p> {
    /// Steps between validations; `None` for one with each checkpoint.
    every: Option<u64>,
    asking: Asking<'a>,
    /// This rank's held-out rows.
    rows: Vec<PlannedRow>,
    /// Number of held-out rows of all ranks.
    all_rows: usize,
    /// Where this rank shows its progress.
    show: Show,
    source: &'a dyn RowSource,
    probe: Option<AcceptanceProbe<'p>>,
    run: RunDir,
    /// The last step that was validated, by this process or an earlier one.
    last: Option<u64>,
}

impl<'a, 'p> Validation<'a, 'p> {
    /// Plans the validations of a run, if it has any; lines of steps after `step` are dropped.
    pub(crate) fn new(
        prepared: &Prepared<'a>,
        source: &'a dyn RowSource,
        probe: Option<AcceptanceProbe<'p>>,
        communicator: &dyn Communicator,
        step: u64,
    ) -> Result<Option<Self>, Error> {
        let settings = &prepared.config.settings;
        let split = &prepared.split;
        if split.held_out().is_empty() && probe.is_none() {
            return Ok(None);
        }
        let every = settings.validation.eval_every;
        let packed = pack_rows(split.held_out(), split.lengths(), settings.rows.total_seq_len());
        let all_rows = packed.len();
        let show = match communicator.rank() {
            0 if prepared.config.progress => Show::Bar,
            0 => Show::Lines,
            _ => Show::Nothing,
        };
        let rows = packed
            .into_iter()
            .skip(communicator.rank())
            .step_by(communicator.world_size())
            .map(|samples| PlannedRow { epoch: FIXED_DRAW, samples })
            .collect();
        let run = RunDir::at(&settings.save_path);
        if communicator.rank() == 0 {
            run.keep_until::<ValidationLine>(step)?;
        }
        let last = agreed_last_step(&run, communicator)?;
        let asking = Asking { config: prepared.config, rank: communicator.rank() };
        Ok(Some(Self { every, asking, rows, all_rows, show, source, probe, run, last }))
    }

    /// Whether a validation is due after `step` of `total`; `saves`: a checkpoint is written there.
    pub(crate) fn is_due(&self, step: u64, saves: bool, total: u64) -> bool {
        let wanted = self.every.map_or(saves, |every| step.is_multiple_of(every)) || step == total;
        wanted && step > 0 && self.last != Some(step)
    }

    pub(crate) fn measures(&self) -> bool {
        self.probe.is_some()
    }

    /// Message that a validation starts after `step`.
    pub(crate) fn announcement(&self, step: u64) -> String {
        let rows = format!("{} held-out rows", self.all_rows);
        let on = match (self.all_rows, self.measures()) {
            (0, _) => "held-out prompts".to_owned(),
            (_, true) => format!("{rows} and held-out prompts"),
            (_, false) => rows,
        };
        format!("step {step}: validating on {on}")
    }

    /// Validates the current draft.
    pub(crate) fn run(
        &mut self,
        step: u64,
        trainer: &Trainer,
        communicator: &dyn Communicator,
        meter: &Meter,
    ) -> Result<ValidationLine, Halt> {
        let begun = Instant::now();
        let served = LoadedDraft {
            draft: trainer.master_weights.served(&trainer.draft, communicator)?,
            vocabulary: trainer.batches.blocks.vocabulary.clone(),
        };
        let mut line = ValidationLine { step, ..ValidationLine::default() };
        if self.all_rows > 0 {
            line.rows = Some(self.teacher_forced(trainer, &served.draft, communicator, meter)?);
        }
        if let Some(probe) = &mut self.probe {
            let show = self.show;
            line.prompts = Some(measured(probe, &served, communicator, show, self.asking)?);
        }
        line.seconds = Some(begun.elapsed().as_secs_f64());
        self.last = Some(step);
        if communicator.rank() == 0 {
            self.run.append(&line)?;
        }
        Ok(line)
    }

    fn teacher_forced(
        &self,
        trainer: &Trainer,
        draft: &Draft,
        communicator: &dyn Communicator,
        meter: &Meter,
    ) -> Result<HeldOutRows, Halt> {
        let mut statistics = no_statistics(draft, draft.device());
        let mut skipped = 0.0;
        let own_rows = || self.own_rows(trainer, draft, &mut statistics, &mut skipped, meter);
        let own = self.asking.contain(doing, own_rows).err();
        let vote = own.as_ref().map(Vote::of).unwrap_or_default();
        let vector = Some(statistics.sums_mut());
        add_up(communicator, vote, &mut [&mut skipped], vector)?.settle(own)?;
        let report = statistics.report(trainer.objective.denominator.epsilon());
        let (blocks, skipped_samples) = (report.blocks, skipped as u64);
        Ok(HeldOutRows { figures: figures(report), blocks, skipped_samples })
    }

    /// Adds the statistics of this rank's rows.
    fn own_rows(
        &self,
        trainer: &Trainer,
        draft: &Draft,
        statistics: &mut Statistics,
        skipped: &mut f64,
        meter: &Meter,
    ) -> Result<(), Error> {
        let mut rows = ReadyRows::start(self.source, self.rows.clone(), &trainer.batches, draft)?;
        let total = self.rows.len() as u64;
        let mut progress = Progress::shown(self.show, "validation, rows", Unit::Items, total);
        meter.beats_on(progress.beat());
        for done in 0.. {
            let Some(row) = rows.next(meter)? else { break };
            progress.update(done, "");
            meter.came_on();
            *skipped += row.skipped as f64;
            if let Some(own) = trainer.validate(draft, row)? {
                statistics.add(&own);
            }
        }
        Ok(())
    }
}

/// Describes this activity for out-of-memory errors.
fn doing() -> String {
    "while validating".to_owned()
}

/// Makes all ranks decode their share of the prompts.
fn measured(
    probe: &mut AcceptanceProbe<'_>,
    served: &LoadedDraft,
    communicator: &dyn Communicator,
    show: Show,
    asking: Asking<'_>,
) -> Result<HeldOutPrompts, Halt> {
    let share = Share { rank: communicator.rank(), ranks: communicator.world_size(), show };
    let proposals = served.draft.config().block().proposals();
    let acceptance = asking.contain(doing, || {
        probe(served, share).map_err(|source| Error::Acceptance { rank: share.rank, source })
    });
    let (counts, vote, own) = match acceptance {
        Ok(Some(counts)) => (counts, Vote::Continue, None),
        Ok(None) => (Acceptance::default(), Vote::Abandon, None),
        Err(own) => (Acceptance::default(), Vote::of(&own), Some(own)),
    };
    let Acceptance { reached, responses, mut length_sum } = counts;
    let mut responses = responses as f64;
    // A rank without answers still contributes as many slots.
    let mut steps = vec![0.0; proposals + 1];
    steps.iter_mut().zip(reached).for_each(|(sum, count)| *sum = count as f64);
    let mut sums: Vec<_> = steps.iter_mut().chain([&mut responses, &mut length_sum]).collect();
    add_up(communicator, vote, &mut sums, None)?.settle(own)?;
    let responses = responses as u64;
    let reached = steps.iter().map(|&sum| sum as u64).collect();
    let figures = Acceptance { reached, responses, length_sum }.figures();
    Ok(HeldOutPrompts { figures, responses })
}

/// The step of the last line as seen by rank 0, since another rank's view may be stale.
fn agreed_last_step(run: &RunDir, communicator: &dyn Communicator) -> Result<Option<u64>, Error> {
    let mut own = Vec::new();
    if communicator.rank() == 0
        && let Some(line) = run.lines::<ValidationLine>()?.last()
    {
        own.extend_from_slice(&line.step.to_le_bytes());
    }
    let all = communicator.all_gather_bytes(&own)?;
    Ok(all[0].as_slice().try_into().ok().map(u64::from_le_bytes))
}
