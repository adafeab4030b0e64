//! The step loop: steps, checkpoints, validations, and how they end.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Instant;

use dflash_dist::Communicator;
use dflash_run::{Checkpoint, End, MetricLine, Position, RunDir, SavePath};

use super::health::{Health, Weights};
use super::{Outcome, summary};
use crate::metrics::{Left, Meter, RowTimes, counted, trackers};
use crate::no_memory::Asking;
use crate::order::RowOrder;
use crate::prepared::Prepared;
use crate::readback::{self, Control, Finished, StepOutcome};
use crate::ready::ReadyRows;
use crate::schedule::Schedule;
use crate::trainer::{Effect, StepSums, Trainer};
use crate::validation::Validation;
use crate::vote::{Halt, Vote};
use crate::{Error, checkpoint, machine};

/// Maximum number of unread steps: their results stay on the device, and their bookkeeping here.
const MOST_UNREAD: usize = 256;

/// A step whose outcome the host may not know yet.
pub(super) struct Unread {
    step: u64,
    finished: Finished,
    /// Time spent on its rows.
    times: RowTimes,
}

/// A rank while it trains.
pub(super) struct Worker<'a, 'p> {
    pub(super) prepared: &'a Prepared<'a>,
    pub(super) order: RowOrder,
    pub(super) communicator: &'a dyn Communicator,
    pub(super) trainer: Trainer,
    pub(super) position: Position,
    /// Optimizer steps in the whole schedule.
    pub(super) total: u64,
    /// Rank 0's lock on the save path.
    pub(super) save_path: Option<SavePath>,
    pub(super) validation: Option<Validation<'a, 'p>>,
    /// Step of the last checkpoint that this process helped to write.
    pub(super) saved: Option<u64>,
    /// Steps taken when this process began.
    pub(super) begun_at: u64,
    /// Whether any step of this process had a supervised slot.
    pub(super) had_slots: bool,
    pub(super) health: Health,
    /// Where the schedule ended before this process began, if it ends elsewhere now.
    pub(super) ended_before: Option<u64>,
    /// Steps not counted yet, in order.
    pub(super) unread: Vec<Unread>,
    /// Norm of the last gradient read.
    pub(super) gradient_norm: f64,
    /// Notes collected before the first step.
    pub(super) notes: Vec<String>,
}

impl<'a> Worker<'a, '_> {
    pub(super) fn train(mut self, rows: &mut ReadyRows) -> Result<Outcome, Error> {
        let mut meter = self.meter()?;
        self.notes().iter().for_each(|note| meter.say(note));
        match self.steps(rows, &mut meter) {
            Ok(()) => self.finish(&mut meter, true),
            Err(Halt::Stopped) => {
                let completed = self.is_complete();
                self.finish(&mut meter, completed)
            }
            Err(Halt::Failed(own)) => self.break_off(&mut meter, own),
            Err(Halt::Broken(error)) => Err(error),
        }
    }

    fn steps(&mut self, rows: &mut ReadyRows, meter: &mut Meter) -> Result<(), Halt> {
        // A run that ended during a validation left a checkpoint without its validation line.
        self.validate(meter)?;
        while self.position.step < self.total {
            let epoch = self.order.epoch_of(self.position.rows);
            let vote = self.step(rows, meter)?;
            if self.position.step == self.begun_at + 1 {
                self.communicator.announce_work();
            }
            self.keep(epoch, vote, meter)?;
            if vote == Vote::Save {
                self.save(meter)?;
            }
            // Ranks that were not told to stop would complete the validation.
            if vote == Vote::Stop {
                return Err(Halt::Stopped);
            }
            self.validate(meter)?;
        }
        if self.begun_at == 0 && self.total > 0 && !self.had_slots {
            return Err(self.nothing_learned(meter)?.into());
        }
        Ok(())
    }

    /// Takes an optimizer step over `accumulation` rows of this rank; returns the ranks' vote.
    fn step(&mut self, rows: &mut ReadyRows, meter: &mut Meter) -> Result<Vote, Halt> {
        let config = self.prepared.config;
        let settings = &config.settings;
        let accumulation = settings.rows.gradient_accumulation_steps;
        let rate = self.rate(self.position.step);
        let (mut sums, mut vote) = (StepSums::default(), Vote::Continue);
        let (mut times, mut failure) = (RowTimes::default(), None);
        let (asking, number) = (self.asking(), self.position.step + 1);
        let doing = || format!("in step {number}");
        let mut step = self.trainer.begin(self.communicator);
        for micro in 1..=accumulation {
            let asked = Instant::now();
            let row = match failure {
                None => asking.contain(doing, || rows.next(meter)),
                Some(_) => Ok(None),
            };
            let waited = asked.elapsed();
            let row = row.unwrap_or_else(|error| {
                failure = Some(error);
                None
            });
            let (trained, target) = row.map_or((None, None), |row| {
                sums.tokens += row.tokens as f64;
                sums.samples += row.samples as f64;
                sums.skipped += row.skipped as f64;
                (row.trained, row.target)
            });
            times.add(waited, target);
            let batch =
                asking.contain(doing, || trained.map(|trained| step.batch(trained)).transpose());
            let batch = batch.unwrap_or_else(|error| {
                failure = Some(error);
                None
            });
            sums.flops += batch.as_ref().map_or(0.0, |batch| batch.flops);
            if let Err(reason) = step.add(batch, micro == accumulation)? {
                failure = Some(asking.refused(doing(), reason));
            }
        }
        if let Some(error) = &failure {
            // The other ranks are in the middle of the step and must be told.
            vote = Vote::of(error);
        }
        if config.save.swap(false, Ordering::Relaxed) {
            vote = vote.max(Vote::Save);
        }
        if config.stop.load(Ordering::Relaxed) {
            vote = vote.max(Vote::Stop);
        }
        sums.stream = counted(&rows.counters());
        let finished = step.finish(sums, vote, rate, settings.optimizer.max_grad_norm)?;
        let vote = finished.vote;
        vote.settle(failure)?;
        self.advance(&finished.sums);
        meter.tick(self.left());
        self.unread.push(Unread { step: self.position.step, finished, times });
        if self.trainer.control == Control::Host || self.unread.len() == MOST_UNREAD {
            self.settle(meter)?;
        }
        Ok(vote)
    }

    /// Reads and counts the outcomes of all steps so far.
    fn settle(&mut self, meter: &mut Meter) -> Result<(), Error> {
        let unread = std::mem::take(&mut self.unread);
        if unread.is_empty() {
            return Ok(());
        }
        let known = |Unread { step, finished, times }: Unread| {
            ((step, finished.sums, times), finished.outcome)
        };
        let (kept, outcomes): (Vec<_>, Vec<_>) = unread.into_iter().map(known).unzip();
        let outcomes = readback::read(outcomes);
        // The values depend on all ranks' sums, so they are valid only if the group is.
        self.communicator.check()?;
        for ((step, sums, times), outcome) in kept.into_iter().zip(outcomes) {
            self.had_slots |= outcome.effect != Effect::Empty;
            self.gradient_norm = outcome.gradient_norm;
            self.count(&sums, &outcome);
            self.watch(step, &outcome, meter);
            meter.add(&sums, outcome, times);
        }
        Ok(())
    }

    fn asking(&self) -> Asking<'a> {
        Asking { config: self.prepared.config, rank: self.communicator.rank() }
    }

    /// Whether a run that was told to stop had just finished.
    fn is_complete(&self) -> bool {
        self.position.step == self.total && !self.validates()
    }

    /// Whether a validation is due.
    fn validates(&self) -> bool {
        let (step, total) = (self.position.step, self.total);
        self.validation.as_ref().is_some_and(|it| it.is_due(step, self.saves(), total))
    }

    /// Whether a checkpoint is due after this step: at the set interval or an epoch's end.
    fn saves(&self) -> bool {
        let settings = &self.prepared.config.settings;
        let (checkpoints, step) = (&settings.checkpoints, self.position.step);
        let rows = self.communicator.world_size() * settings.rows.gradient_accumulation_steps;
        let before = self.position.rows.saturating_sub(rows as u64);
        let ends_epoch = || self.order.epoch_of(self.position.rows) > self.order.epoch_of(before);
        step > 0
            && (checkpoints.save_every.is_some_and(|every| step.is_multiple_of(every))
                || !checkpoints.no_epoch_checkpoints && ends_epoch())
    }

    /// The work left after this step.
    fn left(&self) -> Left {
        let settings = &self.prepared.config.settings;
        let (step, total) = (self.position.step, self.total);
        let steps = total - step;
        let multiples = |every: u64| total / every - step / every;
        let last = u64::from(steps > 0);
        let per_step = self.communicator.world_size() * settings.rows.gradient_accumulation_steps;
        let end = (self.position.rows + steps * per_step as u64).min(self.order.rows());
        let epochs = self.order.epoch_of(end) - self.order.epoch_of(self.position.rows);
        let checkpoints = &settings.checkpoints;
        let epochs = if checkpoints.no_epoch_checkpoints { 0 } else { epochs };
        // The end of the last epoch is usually also that of the run.
        let saves = checkpoints.save_every.map_or(0, multiples) + epochs.max(last);
        let validations = match settings.validation.eval_every {
            Some(every) if total.is_multiple_of(every) => multiples(every),
            Some(every) => multiples(every) + last,
            None => saves,
        };
        let validations = if self.validation.is_some() { validations } else { 0 };
        Left { steps, validations, saves }
    }

    /// Learning rate of the step after `step`.
    pub(super) fn rate(&self, step: u64) -> f64 {
        let settings = &self.prepared.config.settings.optimizer;
        let position = self.position.schedule.as_ref().expect("a run begins with a schedule");
        settings.lr * Schedule::from(settings).of_stretched(step, position)
    }

    /// Moves the position past a step's rows.
    fn advance(&mut self, sums: &StepSums) {
        let rows = self.communicator.world_size()
            * self.prepared.config.settings.rows.gradient_accumulation_steps;
        let position = &mut self.position;
        position.step += 1;
        position.rows = (position.rows + rows as u64).min(self.order.rows());
        position.skipped_samples += sums.skipped as u64;
    }

    /// Counts a step's outcome.
    fn count(&mut self, sums: &StepSums, outcome: &StepOutcome) {
        let position = &mut self.position;
        match outcome.effect {
            Effect::Moved => {
                position.tokens += sums.tokens as u64;
                position.samples += sums.samples as u64;
                position.anchors += outcome.statistics.blocks();
                position.bad_in_a_row = 0;
            }
            Effect::NotFinite => {
                position.bad_steps += 1;
                position.bad_in_a_row += 1;
            }
            Effect::Empty => position.empty_steps += 1,
            Effect::Void => (),
        }
    }

    /// Logs and saves what is due after a step in `epoch`; ends a diverged run or one without slots.
    fn keep(&mut self, epoch: u64, vote: Vote, meter: &mut Meter) -> Result<(), Error> {
        let settings = &self.prepared.config.settings;
        let step = self.position.step;
        let at_an_end = step == 1 || step == self.total;
        let logs = at_an_end || step.is_multiple_of(settings.log_every);
        let epoch_ended = self.order.epoch_of(self.position.rows) > epoch;
        let checkpoints = &settings.checkpoints;
        let due = checkpoints.save_every.is_some_and(|every| step.is_multiple_of(every));
        let due = due || (epoch_ended && !checkpoints.no_epoch_checkpoints);
        let in_vain = epoch_ended && self.begun_at == 0 && !self.had_slots;
        let pauses = due || vote != Vote::Continue || self.validates();
        if logs || pauses || in_vain {
            self.settle(meter)?;
        }
        let count = self.position.bad_in_a_row;
        let diverged = count >= settings.optimizer.max_bad_steps;
        if diverged || logs {
            meter.log(self.line(self.gradient_norm))?;
        }
        if diverged {
            self.save(meter)?;
            self.sum_up_bad_steps(meter);
            self.summarise("diverged", meter);
            meter.close(End::Failed)?;
            self.communicator.announce_permanent_failure();
            return Err(Error::NonFinite { count, step, remedy: self.remedy() });
        }
        if due {
            self.save(meter)?;
        }
        if epoch_ended && self.begun_at == 0 && !self.had_slots {
            return Err(self.nothing_learned(meter)?);
        }
        Ok(())
    }

    /// Ends a run whose first epoch had no supervised slot.
    fn nothing_learned(&mut self, meter: &mut Meter) -> Result<Error, Error> {
        let Outcome { step: steps, .. } = self.finish(meter, false)?;
        self.communicator.announce_permanent_failure();
        Ok(Error::NothingLearned { steps, skipped: self.position.skipped_samples })
    }

    /// Validates if due and not done yet.
    fn validate(&mut self, meter: &mut Meter) -> Result<(), Halt> {
        let (step, total) = (self.position.step, self.total);
        let due = |it: &&Validation<'_, '_>| it.is_due(step, self.saves(), total);
        let Some(validation) = self.validation.as_ref().filter(due) else { return Ok(()) };
        meter.say(&validation.announcement(step));
        if validation.measures() || step == total {
            self.save(meter)?;
        }
        let begun = Instant::now();
        let Some(validation) = &mut self.validation else { return Ok(()) };
        let (trainer, communicator) = (&self.trainer, self.communicator);
        let line = meter.aside(|| validation.run(step, trainer, communicator, meter))?;
        meter.validated_for(begun.elapsed());
        meter.validated(&line)?;
        // best.json must name an existing, usable checkpoint
        if let Some(save_path) = &self.save_path
            && self.kept() == Some(step)
            && let Some(quantity) = save_path.note_validation(&line)?
        {
            meter.say(&format!("step {step} has the best {quantity} so far"));
            self.prune(meter, self.health.good);
        }
        Ok(())
    }

    fn meter(&self) -> Result<Meter, Error> {
        let config = self.prepared.config;
        let device = self.trainer.draft.device();
        let ranks = self.communicator.world_size() as f64;
        let peak = machine::peak_of(device, config.settings.peak_tflops).map(|peak| peak * ranks);
        let epsilon = self.trainer.objective.denominator.epsilon();
        let mut meter = Meter::silent(device, peak, epsilon);
        if self.communicator.rank() == 0 {
            let run = RunDir::at(&config.settings.save_path);
            let trackers = trackers(config, self.position.step)?;
            meter.open(run, trackers, self.position.step, self.total, config.progress)?;
        }
        Ok(meter)
    }

    /// The metric line for now, without what the meter adds.
    fn line(&self, gradient_norm: f64) -> MetricLine {
        let position = &self.position;
        MetricLine {
            step: position.step,
            epoch: Some(self.order.progress(position.rows)),
            lr: Some(self.rate(position.step.saturating_sub(1))),
            gradient_norm: Some(gradient_norm),
            samples: position.samples,
            tokens: position.tokens,
            anchors: position.anchors,
            skipped_samples: position.skipped_samples,
            bad_steps: position.bad_steps,
            ema_decay: self.prepared.config.settings.optimizer.ema_decay,
            ..MetricLine::default()
        }
    }

    /// Saves a checkpoint: all ranks contribute, rank 0 writes. A worthless state is not written,
    /// and a doubtful one is marked so that it is not resumed.
    fn save(&mut self, meter: &mut Meter) -> Result<(), Error> {
        self.settle(meter)?;
        let begun = Instant::now();
        let is_new = self.saved != Some(self.position.step);
        self.write(meter)?;
        if is_new {
            meter.saved(begun.elapsed());
        }
        Ok(())
    }

    /// Whether the weights are still those that the run began with, fresh or another draft's, and
    /// must not be mistaken for a result.
    fn is_untrained(&self) -> bool {
        let Position { step, empty_steps, .. } = self.position;
        self.prepared.resume.is_none() && step == empty_steps
    }

    fn write(&mut self, meter: &Meter) -> Result<(), Error> {
        let step = self.position.step;
        if self.saved.replace(step) == Some(step) {
            return Ok(());
        }
        if self.is_untrained() {
            meter.say(&format!("step {step} is not saved: nothing has been trained yet"));
            return Ok(());
        }
        if self.health.is_unmoved() && self.position.bad_in_a_row > 0 {
            meter.say(&format!(
                "step {step} is not saved: no step since {} was finite",
                self.origin()
            ));
            return Ok(());
        }
        let weights = self.weights()?;
        let ruin = self.ruin(weights);
        if weights == Weights::NotFinite {
            meter.say(&format!("step {step} is not saved: the weights are not finite"));
            self.health.saved(step, ruin);
            return Ok(());
        }
        let position = Position { diverged: ruin.is_some(), ..self.position.clone() };
        let path = self.write_with_room(&position, meter)?;
        // Wait, because rank 0 gets only moments to finish once another rank has ended.
        self.communicator.barrier()?;
        meter.say(&format!("saved {}", path.display()));
        if let Some(sign) = &ruin {
            meter.say(&format!("--resume will not take step {step}: {sign}"));
        }
        self.health.saved(step, ruin);
        self.prune(meter, self.health.good);
        Ok(())
    }

    /// Writes the checkpoint of this step. If the disk is full and --keep-last would remove others
    /// afterwards, removes those first and retries.
    fn write_with_room(&self, position: &Position, meter: &Meter) -> Result<PathBuf, Error> {
        let dir = &self.prepared.config.settings.save_path;
        let save = || checkpoint::save(&self.trainer, position, dir, self.communicator);
        let outcome = save();
        if let Err(Error::Dist(_)) = outcome {
            return outcome;
        }
        let full = outcome.as_ref().err().is_some_and(Error::is_disk_full);
        let again = full && self.make_room(meter);
        // Only rank 0 knows; on a retry all ranks contribute again.
        let said = self.communicator.all_gather_bytes(&[u8::from(again)])?;
        if said[0] == [1] { save() } else { outcome }
    }

    /// Removes checkpoints that would not be kept after this one; returns whether there were any.
    fn make_room(&self, meter: &Meter) -> bool {
        let Some(save_path) = &self.save_path else { return false };
        match save_path.make_room(&self.prepared.config.settings.checkpoints, self.health.good) {
            Ok(removed) if removed.is_empty() => false,
            Ok(removed) => {
                let steps: Vec<String> = removed.iter().map(ToString::to_string).collect();
                meter.say(&format!(
                    "the disk is full; the checkpoints of steps {} were removed before this one is saved, following --keep-last",
                    steps.join(", ")
                ));
                true
            }
            Err(error) => {
                meter.say(&format!("the disk is full, and no checkpoint was removed: {error}"));
                false
            }
        }
    }

    /// Updates the links to the newest and best checkpoint, and removes checkpoints that need not
    /// be kept, except `spared`.
    pub(super) fn prune(&self, meter: &Meter, spared: Option<u64>) {
        let Some(save_path) = &self.save_path else { return };
        // Links are for engines: a file system without them is no reason to end the run.
        if let Err(error) = save_path.publish() {
            meter.say(&format!("the run's directory does not show its newest draft: {error}"));
        }
        // A failure to free disk space is not worth ending a healthy run.
        if let Err(error) = save_path.prune(&self.prepared.config.settings.checkpoints, spared) {
            meter.say(&format!("no checkpoint was removed: {error}"));
        }
    }

    /// Prints rank 0's closing summary.
    fn summarise(&self, how: &str, meter: &Meter) {
        if self.communicator.rank() == 0 {
            let run = RunDir::at(&self.prepared.config.settings.save_path);
            let (begun_at, total) = (self.begun_at, self.total);
            let elapsed = meter.elapsed();
            meter.say(&summary::closing(how, &run, &self.position, begun_at, total, elapsed));
        }
    }

    /// Ends a run after a fault on this rank (`own`) or another: saves what was trained, and all
    /// ranks report the fault.
    fn break_off(&mut self, meter: &mut Meter, own: Option<Error>) -> Result<Outcome, Error> {
        let report = own.as_ref().map(ToString::to_string).unwrap_or_default();
        let reports = self.communicator.all_gather_bytes(report.as_bytes());
        let saved = if self.position.step > self.begun_at {
            let doing = || "while saving".to_owned();
            self.asking().contain(doing, || {
                self.settle(meter)?;
                meter.log(self.line(f64::NAN))?;
                self.save(meter)
            })
        } else {
            Ok(())
        };
        self.summarise("ended early", meter);
        if let Err(error) = meter.close(End::Failed) {
            meter.say(&error.to_string());
        }
        let Some(error) = own else {
            saved?;
            // The rank at fault skips the barrier, so the launcher sees that this rank lost a peer.
            if let Err(lost) = self.communicator.barrier() {
                let reports = reports.unwrap_or_default();
                let report = reports.iter().find(|report| !report.is_empty());
                let report = report.map(|report| String::from_utf8_lossy(report).into_owned());
                return Err(report.map_or(lost.into(), |report| Error::AnotherRank { report }));
            }
            return self.finish(meter, false);
        };
        if let Err(unsaved) = saved {
            meter.say(&format!("training since the last checkpoint is lost: {unsaved}"));
        }
        Err(error)
    }

    fn finish(&mut self, meter: &mut Meter, completed: bool) -> Result<Outcome, Error> {
        self.settle(meter)?;
        meter.log(self.line(f64::NAN))?;
        self.save(meter)?;
        self.sum_up_bad_steps(meter);
        if completed && let Some(note) = self.health.closing_note(&self.position) {
            meter.say(&note);
        }
        let is_lost = self.kept().is_none() && !self.is_untrained();
        let (how, end) = match (self.health.ruin.is_some() || is_lost, completed) {
            (true, _) => ("diverged", End::Failed),
            (false, true) => ("done", End::Finished),
            (false, false) => ("stopped", End::Stopped),
        };
        self.summarise(how, meter);
        meter.close(end)?;
        self.communicator.barrier()?;
        let (step, dir) = (self.position.step, &self.prepared.config.settings.save_path);
        match (self.health.ruin.take(), self.kept()) {
            (None, Some(kept)) => {
                self.prune(meter, None);
                Ok(Outcome { checkpoint: Some(Checkpoint::at(dir, kept).dir), step, completed })
            }
            (None, None) if self.is_untrained() => {
                Ok(Outcome { checkpoint: None, step, completed })
            }
            (ruin, _) => {
                self.communicator.announce_permanent_failure();
                let sign = ruin.unwrap_or_else(|| "no step has been finite".to_owned());
                Err(Error::Diverged { step, sign, remedy: self.remedy() })
            }
        }
    }
}
