//! Validation: teacher-forced figures on held-out rows with fixed anchors, and the acceptance that
//! real decoding reaches on held-out prompts.
//!
//! The ranks share both kinds of work and add up their counts. A rank that is told to stop in the
//! middle still takes part in the sum, which then is void: no rank waits for another.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use dflash_data::{pack_rows, split_index};
use dflash_dist::Communicator;
use dflash_model::draft::Draft;
use dflash_model::objective::{DraftVocabulary, Statistics};
use serde::Serialize;
use tch::Tensor;

use crate::Error;
use crate::config::{TrainConfig, ValidationConfig};
use crate::metrics::{by_slot, keep_lines_until, step_of};
use crate::order::PlannedRow;
use crate::rows::RowSource;
use crate::trainer::Trainer;

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
pub(crate) struct Validation<'a> {
    every: u64,
    /// This rank's held-out rows.
    rows: Vec<PlannedRow>,
    /// Whether any rank has rows.
    has_rows: bool,
    source: RowSource,
    probe: Option<AcceptanceProbe<'a>>,
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
        let file = config.save_path.join(VALIDATION);
        if communicator.rank() == 0 {
            keep_lines_until(&file, step)?;
        }
        let last = agreed_last_step(&file, communicator)?;
        Ok(Self { every: settings.every, rows, has_rows, source, probe, file, last })
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
            line.forced = self.teacher_forced(trainer, &draft, communicator)?;
            if line.forced.is_none() {
                return Ok(None);
            }
        }
        if self.measures() {
            line.measured =
                self.measured((&draft, trainer.batches.vocabulary.as_ref()), communicator)?;
            if line.measured.is_none() {
                return Ok(None);
            }
        }
        line.seconds = begun.elapsed().as_secs_f64();
        self.last = Some(step);
        if communicator.rank() == 0 {
            append(&self.file, &line)?;
        }
        Ok(Some(line))
    }

    fn teacher_forced(
        &self,
        trainer: &Trainer,
        draft: &Draft,
        communicator: &dyn Communicator,
    ) -> Result<Option<Forced>, Error> {
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
        Ok(Some(Forced {
            eval_loss: report.loss,
            eval_accuracy: report.accuracy,
            eval_slot_accuracy: report.slot_accuracy,
            eval_expected_length: report.expected_accepted,
            eval_blocks: report.blocks,
            eval_skipped: tail as u64,
        }))
    }

    fn measured(
        &mut self,
        (draft, vocabulary): Served<'_>,
        communicator: &dyn Communicator,
    ) -> Result<Option<Measured>, Error> {
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
        let tail = [counts.response_tau_sum, f64::from(u8::from(stopped))];
        // the number of answers travels with the counts
        sums = Tensor::cat(&[sums, Tensor::from_slice(&[counts.responses as f64])], 0);
        let Some(tau_sum) = add_up(communicator, &mut sums, tail)? else { return Ok(None) };
        let sums = Vec::<f64>::try_from(&sums).expect("a float64 vector");
        Ok(Some(Measured::of(&sums[..block_size], sums[block_size], tau_sum)))
    }
}

impl Measured {
    fn of(reached: &[f64], responses: f64, tau_sum: f64) -> Self {
        let steps = reached[0].max(1.0);
        Self {
            tau_per_step: 1.0 + reached[1..].iter().sum::<f64>() / steps,
            tau_per_response: tau_sum / responses.max(1.0),
            accepted_by_slot: reached[1..].iter().map(|count| count / steps).collect(),
            responses: responses as u64,
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

    #[test]
    fn tau_is_one_more_than_what_was_accepted() {
        // 4 steps: 3, 0, 1 and 1 accepted, two answers of mean 2.5 and 2 tokens a step
        let measured = Measured::of(&[4.0, 3.0, 1.0, 1.0], 2.0, 4.5);
        assert_eq!(measured.tau_per_step, 1.0 + 5.0 / 4.0);
        assert_eq!(measured.tau_per_response, 2.25);
        assert_eq!(measured.accepted_by_slot, [0.75, 0.25, 0.25]);
    }

    #[test]
    fn a_line_names_its_figures_as_readers_expect() {
        let line = ValidationLine {
            step: 3,
            measured: Some(Measured::of(&[2.0, 1.0], 1.0, 1.5)),
            ..ValidationLine::default()
        };
        let value = serde_json::to_value(&line).unwrap();
        assert_eq!(value["tau_per_step"], 1.5);
        assert!(value.get("eval_loss").is_none());
        assert_eq!(value["step"], 3);
    }
}
