//! One worker's life, from its settings to its last checkpoint.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dflash_data::Dataset;
use dflash_dist::{Communicator, ConnectOptions, WorkerEnv, connect_with};
use dflash_model::target::TargetConfig;
use dflash_run::{Checkpoint, Position, Provenance, RunDir, SavePath, ServedWeights};
use tch::{Device, Kind};

use crate::config::TrainConfig;
use crate::metrics::{Meter, Progress};
use crate::optimizer::OptimizerConfig;
use crate::order::RowOrder;
use crate::rows::{RowSource, Rows, stream_config};
use crate::trainer::{StepExtras, StepResult, Trainer};
use crate::validation::{self, AcceptanceProbe, Validation};
use crate::warm_start::WarmStart;
use crate::{Error, checkpoint, machine, setup};

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The last checkpoint.
    pub checkpoint: PathBuf,
    /// Its optimizer steps.
    pub step: u64,
    /// Whether the schedule was completed; false when the run was told to stop.
    pub completed: bool,
}

/// Finds mistakes in the settings before any worker starts; prints and writes nothing.
///
/// # Errors
/// Whatever [`run`] would report at its start about target, dataset and save path.
pub fn validate(config: &TrainConfig) -> Result<(), Error> {
    let target = TargetConfig::load(&config.target)?;
    let draft = setup::draft_config(&target, &config.draft)?;
    if let Some(pretrained) = &config.from_pretrained {
        WarmStart::open(pretrained, &draft)?;
    }
    check_numbers(config)?;
    setup::device(config.device, config.compute_dtype, 0)?;
    let dataset = Dataset::open(&config.data)?;
    validation::check(config, dataset.lengths())?;
    if dataset.is_empty() {
        return Err(Error::NothingToTrain { path: config.data.clone() });
    }
    RunDir::at(&config.save_path).start(config.resume)?;
    Ok(())
}

fn check_numbers(config: &TrainConfig) -> Result<(), Error> {
    let at_least_one = [
        ("--anchors-per-sequence", config.anchors_per_sequence),
        ("--max-anchors", config.max_anchors),
        ("--gradient-accumulation-steps", config.accumulation),
    ];
    if let Some((flag, _)) = at_least_one.iter().find(|(_, value)| *value == 0) {
        return Err(Error::setting(flag, 0, "it must be at least 1"));
    }
    if config.total_seq_len < 2 {
        let expected = "a row needs room for an anchor and a token to predict";
        return Err(Error::setting("--total-seq-len", config.total_seq_len, expected));
    }
    if config.max_bad_steps == 0 {
        return Err(Error::setting("--max-bad-steps", 0, "1 ends the run at the first bad step"));
    }
    if config.peak_tflops.is_some_and(|peak| peak.is_nan() || peak <= 0.0) {
        let found = config.peak_tflops.unwrap_or_default();
        return Err(Error::setting("--peak-tflops", found, "a peak is a positive number"));
    }
    if !(config.lr > 0.0 && config.lr.is_finite()) {
        return Err(Error::setting("--lr", config.lr, "a learning rate is a positive number"));
    }
    check_optimizer(&config.optimizer)
}

fn check_optimizer(optimizer: &OptimizerConfig) -> Result<(), Error> {
    let decays = [
        ("--weight-decay", optimizer.weight_decay.matrices),
        ("--norm-weight-decay", optimizer.weight_decay.norms),
    ];
    if let Some(&(flag, decay)) = decays.iter().find(|(_, decay)| !(0.0..1e6).contains(decay)) {
        return Err(Error::setting(flag, decay, "weights decay by a share from 0"));
    }
    match optimizer.ema_decay {
        Some(decay) if !(decay > 0.0 && decay < 1.0) => {
            let expected = "the share of itself that an average keeps lies between 0 and 1";
            Err(Error::setting("--ema-decay", decay, expected))
        }
        _ => Ok(()),
    }
}

/// Refuses to go on where ranks would resume different checkpoints, as on nodes without a common
/// file system: they would train different drafts.
fn check_agreement(
    config: &TrainConfig,
    resume: Option<u64>,
    communicator: &dyn Communicator,
) -> Result<(), Error> {
    let own = resume.map_or_else(|| "no checkpoint".to_owned(), |step| format!("step {step}"));
    let all = communicator.all_gather_bytes(own.as_bytes())?;
    let Some(rank) = all.iter().position(|found| *found != all[0]) else { return Ok(()) };
    let text = |rank: usize| String::from_utf8_lossy(&all[rank]).into_owned();
    let (path, found, expected) = (config.save_path.clone(), text(rank), text(0));
    Err(Error::RanksDisagree { rank, path, found, expected })
}

/// Trains as the rank that `env` describes; `probe` measures acceptance where
/// [`TrainConfig::validation`] asks for it.
///
/// # Errors
/// The user's mistakes by name, a server or a rank that is gone, a full disk.
pub fn run(
    config: &TrainConfig,
    env: &WorkerEnv,
    probe: Option<AcceptanceProbe<'_>>,
) -> Result<Outcome, Error> {
    validate(config)?;
    let target = TargetConfig::load(&config.target)?;
    let draft_config = setup::draft_config(&target, &config.draft)?;
    let dataset = Arc::new(Dataset::open(&config.data)?);
    let run = RunDir::at(&config.save_path);
    let resume = run.start(config.resume)?;
    let device = setup::device(config.device, config.compute_dtype, env.local_rank)?;
    let options = ConnectOptions {
        join_timeout: config.join_timeout,
        collective_timeout: config.collective_timeout,
        device: device.0,
        backend: config.backend,
    };
    let communicator = connect_with(env, &options)?;
    check_agreement(config, resume.as_ref().map(|it| it.step), &*communicator)?;
    if config.bf16_products {
        dflash_torch_sys::multiply_in_bf16()?;
    }
    tch::no_grad(|| {
        let place = (communicator.rank(), communicator.world_size());
        let from = resume.as_ref().map(|it| it.dir.as_path());
        let data = (&*dataset, from);
        let mut trainer = setup::trainer(config, draft_config.clone(), data, (device, place))?;
        let mut position = start(config, &dataset);
        if let Some(checkpoint) = &resume {
            position = checkpoint::resume(&mut trainer, checkpoint, &position)?;
        }
        let ranks = communicator.world_size() as u64;
        let trained = validation::trained_samples(config, dataset.len());
        let order = row_order(config, &dataset.lengths()[..trained], ranks)?;
        let total = total_steps(config, &order, &position, ranks);
        let share = order
            .every(position.rows + communicator.rank() as u64, ranks)
            .take(((total - position.step) * config.accumulation as u64) as usize);
        let teacher = trainer.batches.teacher_layer;
        let source = RowSource {
            dataset: Arc::clone(&dataset),
            stream: stream_config(config, &target, &draft_config, teacher),
            total_seq_len: config.total_seq_len,
            embedding_rows: target.vocab_size,
        };
        let mut rows = source.start(share)?;
        let mut save_path = None;
        if communicator.rank() == 0 {
            save_path = Some(SavePath::claim(&config.save_path)?);
            run.record(provenance(config, &position, communicator.world_size()))?;
        }
        let communicator = &*communicator;
        let validation = config.validation.as_ref().map(|settings| {
            Validation::new((config, settings), source, probe, (communicator, position.step))
        });
        let validation = validation.transpose()?;
        let saved = None;
        let begun_at = position.step;
        let mut worker = Worker {
            config,
            begun_at,
            had_slots: false,
            order,
            communicator,
            trainer,
            position,
            total,
            save_path,
            saved,
            validation,
        };
        worker.train(&mut rows)
    })
}

/// Steps of the whole schedule: those done, and what the remaining rows give.
fn total_steps(config: &TrainConfig, order: &RowOrder, position: &Position, ranks: u64) -> u64 {
    let remaining = order.rows() - position.rows.min(order.rows());
    let all = position.step + remaining.div_ceil(ranks * config.accumulation as u64);
    config.max_steps.map_or(all, |bound| bound.min(all)).max(position.step)
}

/// Where a fresh run stands.
fn start(config: &TrainConfig, dataset: &Dataset) -> Position {
    Position {
        step: 0,
        rows: 0,
        bad_steps: 0,
        bad_in_a_row: 0,
        skipped_samples: 0,
        tokens: 0,
        dataset: dataset.fingerprint(),
        seed: config.seed,
        total_seq_len: config.total_seq_len,
        trained_samples: Some(validation::trained_samples(config, dataset.len())),
        optimizer: config.optimizer.algorithm.name().to_string(),
        ema_decay: config.optimizer.ema_decay,
        served_weights: ServedWeights::of(config.optimizer.ema_decay),
    }
}

/// How the run at `position` was started.
fn provenance(config: &TrainConfig, position: &Position, world_size: usize) -> Provenance {
    Provenance {
        dflash: Some(env!("CARGO_PKG_VERSION").to_owned()),
        libtorch: dflash_torch_sys::libtorch_version().ok(),
        world_size: Some(world_size),
        resumed_at_step: position.step,
        dataset: Some(position.dataset.clone()),
        config: serde_json::to_value(config).expect("settings print"),
        ..Provenance::default()
    }
}

/// All epochs' rows; with a bound on steps alone, as many epochs as it needs.
fn row_order(config: &TrainConfig, lengths: &[u32], ranks: u64) -> Result<RowOrder, Error> {
    let order = |epochs| RowOrder::new(lengths, config.total_seq_len, config.seed, epochs);
    let bounded = |flag, value: u64, epochs: u64| {
        let expected = format!("more than {MAX_EPOCHS} passes over the data are surely a mistake");
        if epochs > MAX_EPOCHS { Err(Error::setting(flag, value, expected)) } else { Ok(epochs) }
    };
    if config.epochs > 0 {
        return Ok(order(bounded("--epochs", config.epochs, config.epochs)?));
    }
    let steps = config.max_steps.unwrap_or(1);
    let needed = steps.saturating_mul(ranks * config.accumulation as u64);
    let per_epoch = order(1).rows().max(1);
    let mut epochs = bounded("--max-steps", steps, needed.div_ceil(per_epoch).max(1))?;
    while order(epochs).rows() < needed {
        epochs += 1;
    }
    Ok(order(epochs))
}

/// Each epoch is planned before the first step, which takes time and memory.
const MAX_EPOCHS: u64 = 100_000;

/// A rank between its first and its last step.
struct Worker<'a, 'p> {
    config: &'a TrainConfig,
    order: RowOrder,
    communicator: &'a dyn Communicator,
    trainer: Trainer,
    position: Position,
    /// Optimizer steps at the end of the schedule.
    total: u64,
    /// Rank 0's hold on the save path.
    save_path: Option<SavePath>,
    validation: Option<Validation<'p>>,
    /// Step of the last checkpoint that this process took part in.
    saved: Option<u64>,
    /// Steps taken when this process began.
    begun_at: u64,
    /// Whether any step since had a slot to learn from.
    had_slots: bool,
}

impl Worker<'_, '_> {
    fn train(&mut self, rows: &mut Rows) -> Result<Outcome, Error> {
        let mut meter = self.meter()?;
        for note in self.notes()? {
            meter.say(&note);
        }
        // The checkpoint of a run that ended in a validation comes without it.
        if self.validate(&mut meter)? == Validated::Interrupted {
            return self.finish(&mut meter, false);
        }
        while self.position.step < self.total {
            let epoch = self.order.epoch_of(self.position.rows);
            let (norm, stopping) = match self.step(rows, &mut meter)? {
                Stepped::Done { norm, stopping } => (norm, stopping),
                Stepped::Abandoned => return self.finish(&mut meter, false),
                Stepped::Failed(own) => return self.break_off(&mut meter, own),
            };
            if self.position.step == self.begun_at + 1 {
                self.communicator.announce_work();
            }
            self.keep(epoch, norm, &mut meter)?;
            // Ranks that were not told to stop themselves would measure to the end.
            if stopping || self.validate(&mut meter)? == Validated::Interrupted {
                return self.finish(&mut meter, false);
            }
        }
        if self.begun_at == 0 && self.total > 0 && !self.had_slots {
            return Err(self.nothing_learned(&mut meter)?);
        }
        self.finish(&mut meter, true)
    }

    /// Logs and saves what is due after a step of `epoch`, and ends a run that makes no sense.
    fn keep(&mut self, epoch: u64, norm: f64, meter: &mut Meter) -> Result<(), Error> {
        let (step, count) = (self.position.step, self.position.bad_in_a_row);
        let diverged = count >= self.config.max_bad_steps;
        if diverged || step.is_multiple_of(self.config.log_every) {
            meter.log(self.progress(), norm)?;
        }
        let epoch_ended = self.order.epoch_of(self.position.rows) > epoch;
        let due = self.config.save_every.is_some_and(|every| step.is_multiple_of(every));
        if epoch_ended || due || diverged {
            self.save(meter)?;
        }
        if diverged {
            self.communicator.announce_futility();
            return Err(Error::NonFinite { count, step });
        }
        if epoch_ended && self.begun_at == 0 && !self.had_slots {
            return Err(self.nothing_learned(meter)?);
        }
        Ok(())
    }

    fn meter(&self) -> Result<Meter, Error> {
        let epsilon = self.trainer.objective.denominator.epsilon();
        let mut meter = if self.communicator.rank() == 0 {
            let at = (self.position.step, self.total);
            Meter::open(RunDir::at(&self.config.save_path), at, self.config.progress, epsilon)?
        } else {
            Meter::silent(epsilon)
        };
        let device = self.trainer.draft.device();
        let peak = machine::peak_of(device, self.config.peak_tflops);
        meter.measure(device, peak.map(|peak| peak * self.communicator.world_size() as f64));
        Ok(meter)
    }

    /// What a user should know before the first step.
    fn notes(&self) -> Result<Vec<String>, Error> {
        let draft = &self.trainer.draft;
        let mut notes = vec![self.announcement()];
        if self.position.step == 0 {
            notes.extend(self.warm_start_notes()?);
        }
        if (draft.device(), draft.flat().kind()) == (Device::Cpu, Kind::BFloat16)
            && !dflash_torch_sys::cpu_multiplies_bf16()
        {
            let note = "this CPU has no instructions for bfloat16: float32 is many times faster";
            notes.push(note.to_owned());
        }
        notes.extend(self.order.cut_note());
        if !self.config.schedule.reaches_peak(self.total) {
            let total = self.total;
            notes
                .push(format!("the warm-up is longer than the {total} steps: --lr is not reached"));
        }
        Ok(notes)
    }

    /// Ends a run whose first epoch had no slot to learn from.
    fn nothing_learned(&mut self, meter: &mut Meter) -> Result<Error, Error> {
        let Outcome { checkpoint, step: steps, .. } = self.finish(meter, false)?;
        self.communicator.announce_futility();
        Ok(Error::NothingLearned { steps, skipped: self.position.skipped_samples, checkpoint })
    }

    /// Measures what there is to measure, if it is time and has not been done.
    fn validate(&mut self, meter: &mut Meter) -> Result<Validated, Error> {
        let (step, total) = (self.position.step, self.total);
        let Some(validation) = self.validation.as_ref().filter(|v| v.is_due(step, total)) else {
            return Ok(Validated::AsDue);
        };
        if validation.measures() {
            // the best checkpoint must be there to be named
            self.save(meter)?;
        }
        let begun = Instant::now();
        let Some(validation) = &mut self.validation else { return Ok(Validated::AsDue) };
        let Some(line) = validation.run(step, &self.trainer, self.communicator)? else {
            return Ok(Validated::Interrupted);
        };
        meter.exclude(begun.elapsed());
        meter.validated(&line)?;
        if let (Some(save_path), Some(measured)) = (&self.save_path, &line.prompts)
            && save_path.note_acceptance(step, measured.figures.acceptance_length)?
        {
            meter.say(&format!("step {step} has the best acceptance so far"));
            self.prune(meter);
        }
        Ok(Validated::AsDue)
    }

    fn announcement(&self) -> String {
        let draft = &self.trainer.draft;
        format!(
            "training {} layers ({:.2} M parameters) on {} packed rows over {} epochs: {} steps on {} rank(s), {:?} in {:?}, {:.2} M numbers of float32 state on each",
            draft.config().layers.len(),
            draft.layout().trained() as f64 / 1e6,
            self.order.rows(),
            self.order.epoch_of(self.order.rows()),
            self.total,
            self.communicator.world_size(),
            draft.device(),
            draft.flat().kind(),
            self.trainer.masters.elements() as f64 / 1e6,
        )
    }

    /// Where a fresh run's weights come from, and what that means.
    fn warm_start_notes(&self) -> Result<Vec<String>, Error> {
        let Some(pretrained) = &self.config.from_pretrained else { return Ok(Vec::new()) };
        let mut notes = WarmStart::open(pretrained, self.trainer.draft.config())?.notes();
        if let Some(vocabulary) = &self.trainer.batches.vocabulary {
            let (size, all) = (vocabulary.selected().len(), vocabulary.target_size());
            notes.push(format!("it proposes {size} of the target's {all} tokens"));
        }
        Ok(notes)
    }

    /// One optimizer step over `accumulation` rows of this rank.
    fn step(&mut self, rows: &mut Rows, meter: &mut Meter) -> Result<Stepped, Error> {
        let rate = self.rate();
        let accumulation = self.config.accumulation;
        let mut extras = StepExtras::default();
        let mut wait = Duration::ZERO;
        let mut failure = None;
        let mut step = self.trainer.begin(self.communicator);
        for micro in 1..=accumulation {
            let asked = Instant::now();
            let loaded = if failure.is_none() { rows.next() } else { Ok(None) };
            wait += asked.elapsed();
            let batch = match loaded {
                Ok(Some(loaded)) => {
                    loaded.count(&mut extras);
                    step.batch(&loaded.row, &loaded.states, loaded.epoch)
                }
                Ok(None) => None,
                Err(Error::Hidden(dflash_hidden::Error::Interrupted)) => {
                    extras.abandoned = 1.0;
                    None
                }
                // The other ranks are in the middle of the step: it is void for all.
                Err(error) => {
                    extras.failed = 1.0;
                    failure = Some(error);
                    None
                }
            };
            extras.flops += batch.as_ref().map_or(0.0, |batch| batch.flops);
            step.add(batch, micro == accumulation)?;
        }
        extras.stopping = f64::from(u8::from(self.config.stop.load(Ordering::Relaxed)));
        let result = step.finish(extras, (rate, self.config.max_grad_norm))?;
        if result.extras.failed > 0.0 {
            return Ok(Stepped::Failed(failure));
        }
        if result.extras.abandoned > 0.0 {
            return Ok(Stepped::Abandoned);
        }
        // not `>`: a sum that is no number had slots
        self.had_slots |= result.denominator != 0.0;
        self.advance(&result);
        let (norm, stopping) = (result.gradient_norm, result.extras.stopping > 0.0);
        meter.add(result, wait, rows.counters());
        Ok(Stepped::Done { norm, stopping })
    }

    fn rate(&self) -> f64 {
        self.config.lr * self.config.schedule.of_step(self.position.step, self.total)
    }

    fn advance(&mut self, result: &StepResult) {
        let rows_per_step = self.communicator.world_size() * self.config.accumulation;
        let position = &mut self.position;
        position.step += 1;
        position.rows = (position.rows + rows_per_step as u64).min(self.order.rows());
        position.bad_steps += u64::from(!result.applied);
        position.bad_in_a_row = if result.applied { 0 } else { position.bad_in_a_row + 1 };
        position.skipped_samples += result.extras.skipped as u64;
        position.tokens += if result.applied { result.extras.tokens as u64 } else { 0 };
    }

    fn progress(&self) -> Progress {
        let last = self.position.step.saturating_sub(1);
        Progress {
            step: self.position.step,
            total: self.total,
            epoch: self.order.progress(self.position.rows),
            lr: self.config.lr * self.config.schedule.of_step(last, self.total),
            skipped_samples: self.position.skipped_samples,
            bad_steps: self.position.bad_steps,
            ema_decay: self.config.optimizer.ema_decay,
        }
    }

    /// All ranks bring their state, rank 0 writes. Returns where the checkpoint lies.
    fn save(&mut self, meter: &mut Meter) -> Result<PathBuf, Error> {
        let begun = Instant::now();
        let path = self.write(meter)?;
        meter.exclude(begun.elapsed());
        Ok(path)
    }

    fn write(&mut self, meter: &Meter) -> Result<PathBuf, Error> {
        let (step, dir) = (self.position.step, &self.config.save_path);
        let saved = self.saved.replace(step);
        if saved == Some(step) {
            return Ok(Checkpoint::at(dir, step).dir);
        }
        let path = checkpoint::save(&self.trainer, &self.position, dir, self.communicator)?;
        // A rank that ended while rank 0 still writes would leave it only moments.
        self.communicator.barrier()?;
        meter.say(&format!("saved {}", path.display()));
        self.prune(meter);
        Ok(path)
    }

    /// Removes the checkpoints that need not stay.
    fn prune(&self, meter: &Meter) {
        let Some(save_path) = &self.save_path else { return };
        // Room on the disk is no reason to end a run that trains well.
        if let Err(error) = save_path.prune(self.config.retention) {
            meter.say(&format!("no checkpoint was removed: {error}"));
        }
    }

    /// Ends a run whose rows cannot be had, on this rank (`own`) or on another: what was trained is
    /// saved first.
    fn break_off(&mut self, meter: &mut Meter, own: Option<Error>) -> Result<Outcome, Error> {
        let saved = if self.position.step > self.begun_at {
            meter.log(self.progress(), f64::NAN).and_then(|()| self.save(meter)).map(|_| ())
        } else {
            Ok(())
        };
        meter.close();
        let Some(error) = own else {
            saved?;
            // The rank at fault ends without this: so the others are known to have lost a peer.
            self.communicator.barrier()?;
            return self.finish(meter, false);
        };
        if let Err(unsaved) = saved {
            meter.say(&format!("what was trained since the last checkpoint is lost: {unsaved}"));
        }
        Err(error)
    }

    fn finish(&mut self, meter: &mut Meter, completed: bool) -> Result<Outcome, Error> {
        meter.log(self.progress(), f64::NAN)?;
        let checkpoint = self.save(meter)?;
        meter.close();
        self.communicator.barrier()?;
        Ok(Outcome { checkpoint, step: self.position.step, completed })
    }
}

/// What came of a step.
enum Stepped {
    Done {
        norm: f64,
        stopping: bool,
    },
    /// A rank was told to stop while it waited for its rows; nothing was changed.
    Abandoned,
    /// A rank cannot have its rows, this one for the reason given; nothing was changed.
    Failed(Option<Error>),
}

/// What came of a validation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Validated {
    /// It was done, or not due.
    AsDue,
    /// A rank was told to stop; it is to be made up for.
    Interrupted,
}
