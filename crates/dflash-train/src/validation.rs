//! Validation: teacher-forced figures on held-out rows with fixed anchors, and the acceptance that
//! real decoding reaches on held-out prompts.
//!
//! The ranks share both kinds of work, add up their counts and vote: a rank that was told to stop in
//! the middle, or that failed, still takes part in the sum, so that no rank waits for another.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use dflash_data::{pack_rows, split_index};
use dflash_dist::Communicator;
use dflash_model::draft::Draft;
use dflash_model::objective::{DraftVocabulary, Statistics};
use serde::Serialize;

use crate::Error;
use crate::config::{TrainConfig, ValidationConfig};
use crate::metrics::{by_slot, keep_lines_until, step_of};
use crate::order::PlannedRow;
use crate::prepared::Prepared;
use crate::rows::RowSource;
use crate::trainer::Trainer;
use crate::vote::{Halt, Sums, Vote, add_up};

/// File of the JSON lines in the save path.
pub(crate) const VALIDATION: &str = "validation.jsonl";

/// The draw of anchors in validation rows; epochs of training count from 0.
const FIXED_DRAW: u64 = u64::MAX;

/// Measures the real acceptance of a draft on one rank's share of held-out prompts; `None` when it
/// was told to stop.
pub type AcceptanceProbe<'a> =
    &'a mut dyn FnMut(Served<'_>, Share) -> Result<Option<AcceptanceCounts>, ProbeError>;

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

/// What real speculative decoding accepted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AcceptanceCounts {
    /// Steps in which at least k proposals were accepted, for k from 0 to block size - 1.
    pub reached: Vec<u64>,
    /// Answers.
    pub responses: u64,
    /// Sum over answers of their mean tokens per step.
    pub response_tau_sum: f64,
}

/// One line of [`VALIDATION`].
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct ValidationLine {
    /// Optimizer steps taken.
    pub(crate) step: u64,
    /// Held-out rows.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(crate) forced: Option<Forced>,
    /// Held-out prompts.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(crate) measured: Option<Measured>,
    /// Wall time of the validation, seconds.
    pub(crate) seconds: f64,
}

/// Teacher-forced figures: every block starts from the data's own context.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Forced {
    /// Weighted loss over its denominator, nats.
    pub(crate) eval_loss: f64,
    /// Share of supervised slots whose argmax is the label.
    pub(crate) eval_accuracy: f64,
    /// The same for each slot of a block; the anchor's slot has none.
    pub(crate) eval_slot_accuracy: Vec<Option<f64>>,
    /// Mean over blocks of 1 + the run of right slots from the first on, tokens.
    pub(crate) eval_expected_length: f64,
    /// Blocks that the figures are taken over.
    pub(crate) eval_blocks: u64,
    /// Samples whose hidden states could not be had.
    pub(crate) eval_skipped: u64,
}

/// Figures of real greedy decoding.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Measured {
    /// Mean tokens per verify step over all steps.
    pub(crate) tau_per_step: f64,
    /// Mean over answers of their mean tokens per step.
    pub(crate) tau_per_response: f64,
    /// Share of all steps that accepted each slot after the anchor's.
    pub(crate) accepted_by_slot: Vec<f64>,
    /// Answers.
    pub(crate) responses: u64,
}

/// One rank's part in the validations of a run.
pub(crate) struct Validation<'a, 'p> {
    every: u64,
    /// This rank's held-out rows.
    rows: Vec<PlannedRow>,
    /// Whether any rank has rows.
    has_rows: bool,
    source: &'a dyn RowSource,
    probe: Option<AcceptanceProbe<'p>>,
    file: PathBuf,
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

/// What is added up of teacher-forced figures besides their statistics.
#[derive(Default)]
struct ForcedSums {
    skipped: f64,
}

/// [`AcceptanceCounts`] that are added up.
struct AcceptanceSums {
    reached: Vec<f64>,
    responses: f64,
    response_tau: f64,
}

impl Sums for ForcedSums {
    fn numbers(&mut self) -> Vec<&mut f64> {
        let Self { skipped } = self;
        vec![skipped]
    }
}

impl Sums for AcceptanceSums {
    fn numbers(&mut self) -> Vec<&mut f64> {
        let Self { reached, responses, response_tau } = self;
        reached.iter_mut().chain([responses, response_tau]).collect()
    }
}

impl AcceptanceSums {
    /// Of a draft whose blocks have `block_size` slots, which a rank without answers must know too.
    fn new(counts: AcceptanceCounts, block_size: usize) -> Self {
        let AcceptanceCounts { reached, responses, response_tau_sum } = counts;
        let mut reached: Vec<f64> = reached.into_iter().map(|steps| steps as f64).collect();
        reached.resize(block_size, 0.0);
        Self { reached, responses: responses as f64, response_tau: response_tau_sum }
    }
}

impl<'a, 'p> Validation<'a, 'p> {
    /// Plans the validations of a run, if it has any; lines of steps after `step` are dropped.
    pub(crate) fn new(
        prepared: &Prepared<'_>,
        source: &'a dyn RowSource,
        probe: Option<AcceptanceProbe<'p>>,
        (communicator, step): (&dyn Communicator, u64),
    ) -> Result<Option<Self>, Error> {
        let Some(ValidationConfig { every, .. }) = prepared.config.validation else {
            return Ok(None);
        };
        let lengths = prepared.dataset.lengths();
        let held_out = prepared.packing().lengths.len()..lengths.len();
        let order: Vec<u32> = held_out.map(|sample| sample as u32).collect();
        let packed = pack_rows(&order, lengths, prepared.config.total_seq_len);
        let has_rows = !packed.is_empty();
        let rows = packed
            .into_iter()
            .skip(communicator.rank())
            .step_by(communicator.world_size())
            .map(|samples| PlannedRow { epoch: FIXED_DRAW, samples })
            .collect();
        let file = prepared.config.save_path.join(VALIDATION);
        if communicator.rank() == 0 {
            keep_lines_until(&file, step)?;
        }
        let last = agreed_last_step(&file, communicator)?;
        Ok(Some(Self { every, rows, has_rows, source, probe, file, last }))
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

    /// Validates the draft as it stands.
    ///
    /// # Errors
    /// A rank was told to stop, or cannot get held-out rows or prompts; a rank that is gone, a full
    /// disk.
    pub(crate) fn run(
        &mut self,
        step: u64,
        trainer: &Trainer,
        communicator: &dyn Communicator,
    ) -> Result<ValidationLine, Halt> {
        let begun = Instant::now();
        let draft = trainer.served(communicator)?;
        let mut line = ValidationLine { step, ..ValidationLine::default() };
        if self.has_rows {
            line.forced = Some(self.teacher_forced(trainer, &draft, communicator)?);
        }
        if let Some(probe) = &mut self.probe {
            let served = (&draft, trainer.batches.blocks.vocabulary.as_ref());
            line.measured = Some(measured(probe, served, communicator)?);
        }
        line.seconds = begun.elapsed().as_secs_f64();
        self.last = Some(step);
        if communicator.rank() == 0 {
            append(&self.file, &line)?;
        }
        Ok(line)
    }

    fn teacher_forced(
        &self,
        trainer: &Trainer,
        draft: &Draft,
        communicator: &dyn Communicator,
    ) -> Result<Forced, Halt> {
        let mut statistics = Statistics::zero(draft.config().block_size, draft.device());
        let mut sums = ForcedSums::default();
        let own = self.own_rows(trainer, draft, (&mut statistics, &mut sums)).err();
        let vote = own.as_ref().map(Vote::of).unwrap_or_default();
        let vote = add_up(communicator, vote, &mut sums, Some(statistics.sums_mut()))?;
        vote.settle(own)?;
        let report = statistics.report(trainer.objective.denominator.epsilon());
        Ok(Forced {
            eval_loss: report.loss,
            eval_accuracy: report.accuracy,
            eval_slot_accuracy: report.slot_accuracy,
            eval_expected_length: report.expected_accepted,
            eval_blocks: report.blocks,
            eval_skipped: sums.skipped as u64,
        })
    }

    /// Adds the figures of this rank's rows.
    fn own_rows(
        &self,
        trainer: &Trainer,
        draft: &Draft,
        (statistics, sums): (&mut Statistics, &mut ForcedSums),
    ) -> Result<(), Error> {
        let mut rows = self.source.start(self.rows.clone())?;
        while let Some(row) = rows.next()? {
            sums.skipped += row.skipped as f64;
            if let Some(own) = trainer.validate(draft, &row) {
                statistics.add(&own);
            }
        }
        Ok(())
    }
}

/// Lets all ranks decode their share of the prompts.
fn measured(
    probe: &mut AcceptanceProbe<'_>,
    served: Served<'_>,
    communicator: &dyn Communicator,
) -> Result<Measured, Halt> {
    let share = Share { rank: communicator.rank(), ranks: communicator.world_size() };
    let block_size = served.0.config().block_size;
    let (counts, vote, own) = match probe(served, share) {
        Ok(Some(counts)) => (counts, Vote::Continue, None),
        Ok(None) => (AcceptanceCounts::default(), Vote::Abandon, None),
        Err(source) => {
            let own = Error::Acceptance { rank: share.rank, source };
            (AcceptanceCounts::default(), Vote::of(&own), Some(own))
        }
    };
    let mut sums = AcceptanceSums::new(counts, block_size);
    add_up(communicator, vote, &mut sums, None)?.settle(own)?;
    Ok(Measured::of(&sums))
}

impl Measured {
    fn of(AcceptanceSums { reached, responses, response_tau }: &AcceptanceSums) -> Self {
        let steps = reached[0].max(1.0);
        Self {
            tau_per_step: 1.0 + reached[1..].iter().sum::<f64>() / steps,
            tau_per_response: response_tau / responses.max(1.0),
            accepted_by_slot: reached[1..].iter().map(|count| count / steps).collect(),
            responses: *responses as u64,
        }
    }
}

impl ValidationLine {
    /// What a reader of the log wants to know.
    pub(crate) fn summary(&self) -> String {
        let mut text = format!("step {}: validation", self.step);
        if let Some(forced) = &self.forced {
            text += &format!(
                " loss {:.4}, accuracy {:.1}%, expected length {:.2} on {} blocks",
                forced.eval_loss,
                100.0 * forced.eval_accuracy,
                forced.eval_expected_length,
                forced.eval_blocks
            );
        }
        if let Some(measured) = &self.measured {
            text += if self.forced.is_some() { ";" } else { "" };
            text += &format!(
                " measured tau {:.3} per step, {:.3} per response on {} answers",
                measured.tau_per_step, measured.tau_per_response, measured.responses
            );
        }
        text + &format!(" ({:.0} s)", self.seconds)
    }

    /// For TensorBoard.
    pub(crate) fn scalars(&self) -> Vec<(String, f64)> {
        let mut scalars = Vec::new();
        if let Some(forced) = &self.forced {
            scalars.push(("eval/loss".to_owned(), forced.eval_loss));
            scalars.push(("eval/accuracy".to_owned(), forced.eval_accuracy));
            scalars.push(("eval/expected_length".to_owned(), forced.eval_expected_length));
            scalars.extend(by_slot("eval/slot_accuracy", &forced.eval_slot_accuracy));
        }
        if let Some(measured) = &self.measured {
            scalars.push(("eval/tau_per_step".to_owned(), measured.tau_per_step));
            scalars.push(("eval/tau_per_response".to_owned(), measured.tau_per_response));
            let shares: Vec<Option<f64>> = std::iter::once(None)
                .chain(measured.accepted_by_slot.iter().copied().map(Some))
                .collect();
            scalars.extend(by_slot("eval/accepted", &shares));
        }
        scalars.retain(|(_, value)| value.is_finite());
        scalars
    }
}

/// The step of the last line of `file`, as rank 0 finds it: another rank's view may be older.
fn agreed_last_step(file: &Path, communicator: &dyn Communicator) -> Result<Option<u64>, Error> {
    let mut own = Vec::new();
    if communicator.rank() == 0
        && let Ok(lines) = std::fs::read(file)
        && let Some(step) = lines.split(|&byte| byte == b'\n').filter_map(step_of).next_back()
    {
        own.extend_from_slice(&step.to_le_bytes());
    }
    let all = communicator.all_gather_bytes(&own)?;
    Ok(all[0].as_slice().try_into().ok().map(u64::from_le_bytes))
}

fn append(path: &Path, line: &ValidationLine) -> Result<(), Error> {
    let mut text = serde_json::to_string(line).expect("a validation line prints");
    text.push('\n');
    let file = OpenOptions::new().create(true).append(true).open(path);
    let mut file = file.map_err(dflash_files::Error::io("open", path))?;
    file.write_all(text.as_bytes()).map_err(dflash_files::Error::io("write", path))?;
    Ok(file.sync_all().map_err(dflash_files::Error::io("write", path))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(reached: &[u64], responses: u64, response_tau_sum: f64) -> Measured {
        let counts = AcceptanceCounts { reached: reached.into(), responses, response_tau_sum };
        Measured::of(&AcceptanceSums::new(counts, reached.len()))
    }

    #[test]
    fn tau_is_one_more_than_what_was_accepted() {
        // 4 steps: 3, 0, 1 and 1 accepted, two answers of mean 2.5 and 2 tokens a step
        let measured = measured(&[4, 3, 1, 1], 2, 4.5);
        assert_eq!(measured.tau_per_step, 1.0 + 5.0 / 4.0);
        assert_eq!(measured.tau_per_response, 2.25);
        assert_eq!(measured.accepted_by_slot, [0.75, 0.25, 0.25]);
    }

    #[test]
    fn a_line_names_its_figures_as_readers_expect() {
        let line = ValidationLine {
            step: 3,
            measured: Some(measured(&[2, 1], 1, 1.5)),
            ..ValidationLine::default()
        };
        let value = serde_json::to_value(&line).unwrap();
        assert_eq!(value["tau_per_step"], 1.5);
        assert!(value.get("eval_loss").is_none());
        assert_eq!(value["step"], 3);
    }
}
