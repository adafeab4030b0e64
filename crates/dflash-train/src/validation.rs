//! Validation: teacher-forced figures on held-out rows with fixed anchors, and the acceptance that
//! real decoding reaches on held-out prompts.
//!
//! The ranks share both kinds of work and add up their counts. A rank that is told to stop in the
//! middle still takes part in the sum, which then is void: no rank waits for another.

use std::time::Instant;

use dflash_data::{pack_rows, split_index};
use dflash_dist::Communicator;
use dflash_model::draft::Draft;
use dflash_model::objective::{DraftVocabulary, Statistics};
use dflash_run::{Acceptance, HeldOutPrompts, HeldOutRows, RunDir, ValidationLine};
use tch::Tensor;

use crate::Error;
use crate::config::{TrainConfig, ValidationConfig};
use crate::metrics::figures;
use crate::order::PlannedRow;
use crate::rows::RowSource;
use crate::trainer::Trainer;

/// The draw of anchors in validation rows; epochs of training count from 0.
const FIXED_DRAW: u64 = u64::MAX;

/// Measures the real acceptance of a draft on one rank's share of held-out prompts; `None` when it
/// was told to stop.
pub type AcceptanceProbe<'a> =
    &'a mut dyn FnMut(Served<'_>, Share) -> Result<Option<Acceptance>, ProbeError>;

/// A draft as it is served: its weights, and the tokens that it can say where these are not all.
pub type Served<'a> = (&'a Draft, Option<&'a DraftVocabulary>);

/// Whatever stopped a probe.
pub type ProbeError = Box<dyn std::error::Error + Send + Sync>;

/// Which part of a common work is one rank's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The part, 0-based: items `rank`, `rank + ranks`, ...
    pub rank: usize,
    /// Parts.
    pub ranks: usize,
}

/// One rank's part in the validations of a run.
pub(crate) struct Validation<'a> {
    every: u64,
    /// This rank's held-out rows.
    rows: Vec<PlannedRow>,
    /// Whether any rank has rows.
    has_rows: bool,
    source: RowSource,
    probe: Option<AcceptanceProbe<'a>>,
    run: RunDir,
    /// The last step that was validated, by this process or an earlier one.
    last: Option<u64>,
}

/// Samples that are trained on; the rest is held out.
pub(crate) fn trained_samples(config: &TrainConfig, samples: usize) -> usize {
    let ratio = config.validation.as_ref().map_or(0.0, |validation| validation.ratio);
    split_index(samples, 1.0 - ratio)
}

/// Finds mistakes in the settings.
pub(crate) fn check(config: &TrainConfig, lengths: &[u32]) -> Result<(), Error> {
    let Some(ValidationConfig { ratio, measures, .. }) = &config.validation else { return Ok(()) };
    if !(0.0..1.0).contains(ratio) {
        let expected = "the share of samples held out lies in 0..1";
        return Err(Error::setting("--validation-ratio", ratio, expected));
    }
    let trained = trained_samples(config, lengths.len());
    if *ratio > 0.0 && (trained == lengths.len() || trained == 0) {
        let expected = format!("of {} samples it must leave some on both sides", lengths.len());
        return Err(Error::setting("--validation-ratio", ratio, expected));
    }
    if *ratio == 0.0 && !measures {
        let expected = "there is nothing to validate on: add --validation-ratio or --eval-prompts";
        return Err(Error::setting("--eval-every", "given", expected));
    }
    Ok(())
}

impl<'a> Validation<'a> {
    /// Plans the validations of a run; lines of steps after `step` are dropped.
    pub(crate) fn new(
        (config, settings): (&TrainConfig, &ValidationConfig),
        source: RowSource,
        probe: Option<AcceptanceProbe<'a>>,
        (communicator, step): (&dyn Communicator, u64),
    ) -> Result<Self, Error> {
        let lengths = source.dataset.lengths();
        let held_out = trained_samples(config, lengths.len())..lengths.len();
        let order: Vec<u32> = held_out.map(|sample| sample as u32).collect();
        let packed = pack_rows(&order, lengths, config.total_seq_len);
        let has_rows = !packed.is_empty();
        let rows = packed
            .into_iter()
            .skip(communicator.rank())
            .step_by(communicator.world_size())
            .map(|samples| PlannedRow { epoch: FIXED_DRAW, samples })
            .collect();
        let run = RunDir::at(&config.save_path);
        if communicator.rank() == 0 {
            run.keep_until::<ValidationLine>(step)?;
        }
        let last = agreed_last_step(&run, communicator)?;
        Ok(Self { every: settings.every, rows, has_rows, source, probe, run, last })
    }

    /// Whether a validation follows `step`, the last of which is `total`, and has not been done.
    pub(crate) fn is_due(&self, step: u64, total: u64) -> bool {
        let wanted = step.is_multiple_of(self.every) || step == total;
        wanted && step > 0 && self.last != Some(step)
    }

    /// Whether acceptance is measured.
    pub(crate) fn measures(&self) -> bool {
        self.probe.is_some()
    }

    /// Validates the draft as it stands; `None` when a rank was told to stop.
    ///
    /// # Errors
    /// Held-out rows or prompts that cannot be had, a rank that is gone, a full disk.
    pub(crate) fn run(
        &mut self,
        step: u64,
        trainer: &Trainer,
        communicator: &dyn Communicator,
    ) -> Result<Option<ValidationLine>, Error> {
        let begun = Instant::now();
        let mut line = ValidationLine { step, ..ValidationLine::default() };
        let draft = trainer.served(communicator)?;
        if self.has_rows {
            line.rows = self.teacher_forced(trainer, &draft, communicator)?;
            if line.rows.is_none() {
                return Ok(None);
            }
        }
        if self.measures() {
            line.prompts =
                self.measured((&draft, trainer.batches.vocabulary.as_ref()), communicator)?;
            if line.prompts.is_none() {
                return Ok(None);
            }
        }
        line.seconds = Some(begun.elapsed().as_secs_f64());
        self.last = Some(step);
        if communicator.rank() == 0 {
            self.run.append(&line)?;
        }
        Ok(Some(line))
    }

    fn teacher_forced(
        &self,
        trainer: &Trainer,
        draft: &Draft,
        communicator: &dyn Communicator,
    ) -> Result<Option<HeldOutRows>, Error> {
        let mut statistics = Statistics::zero(draft.config().block_size, draft.device());
        let (mut skipped, mut stopped) = (0, false);
        let mut rows = self.source.start(self.rows.clone().into_iter())?;
        loop {
            match rows.next() {
                Ok(None) => break,
                Ok(Some(row)) => {
                    skipped += row.skipped;
                    if let Some(own) = trainer.validate(draft, &row) {
                        statistics.add(&own);
                    }
                }
                Err(Error::Hidden(dflash_hidden::Error::Interrupted)) => {
                    stopped = true;
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        let own = statistics.sums_mut();
        let tail = [skipped as f64, f64::from(u8::from(stopped))];
        let Some(tail) = add_up(communicator, own, tail)? else { return Ok(None) };
        let report = statistics.report(trainer.objective.denominator.epsilon());
        let (blocks, skipped_samples) = (report.blocks, tail as u64);
        Ok(Some(HeldOutRows { figures: figures(report), blocks, skipped_samples }))
    }

    fn measured(
        &mut self,
        (draft, vocabulary): Served<'_>,
        communicator: &dyn Communicator,
    ) -> Result<Option<HeldOutPrompts>, Error> {
        let Some(probe) = &mut self.probe else { return Ok(None) };
        let share = Share { rank: communicator.rank(), ranks: communicator.world_size() };
        let counts = probe((draft, vocabulary), share)
            .map_err(|source| Error::Acceptance { rank: share.rank, source })?;
        let block_size = draft.config().block_size;
        let stopped = counts.is_none();
        let counts = counts.unwrap_or_default();
        let mut numbers: Vec<f64> = counts.reached.iter().map(|&steps| steps as f64).collect();
        numbers.resize(block_size, 0.0);
        let mut sums = Tensor::from_slice(&numbers);
        let tail = [counts.length_sum, f64::from(u8::from(stopped))];
        // the number of answers travels with the counts
        sums = Tensor::cat(&[sums, Tensor::from_slice(&[counts.responses as f64])], 0);
        let Some(length_sum) = add_up(communicator, &mut sums, tail)? else { return Ok(None) };
        let sums = Vec::<f64>::try_from(&sums).expect("a float64 vector");
        let mut reached: Vec<u64> = sums.iter().map(|&count| count as u64).collect();
        let responses = reached.pop().unwrap_or_default();
        let figures = Acceptance { reached, responses, length_sum }.figures();
        Ok(Some(HeldOutPrompts { figures, responses }))
    }
}

/// The step of the last line, as rank 0 finds it: another rank's view may be older.
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

/// Sums `sums` and a number over the ranks, and asks whether any was stopped: then `None`.
fn add_up(
    communicator: &dyn Communicator,
    sums: &mut Tensor,
    [number, stopped]: [f64; 2],
) -> Result<Option<f64>, Error> {
    let length = sums.size()[0];
    let tail = Tensor::from_slice(&[number, stopped]);
    let mut joined = Tensor::cat(&[sums.to_device(tch::Device::Cpu), tail], 0);
    communicator.all_reduce_sum(&mut joined)?;
    sums.copy_(&joined.narrow(0, 0, length));
    let stopped = joined.double_value(&[length + 1]) > 0.0;
    Ok((!stopped).then(|| joined.double_value(&[length])))
}
