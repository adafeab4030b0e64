//! Runs one worker, from a prepared run to its last checkpoint.

mod divergence;
mod health;
mod notes;
mod summary;
#[cfg(test)]
mod tests;
mod worker;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dflash_dist::{Communicator, ConnectOptions, WorkerEnv, connect};
use dflash_identity::TargetIdentity;
use dflash_run::{
    Checkpoint, Position, Provenance, RunDir, SavePath, ServedWeights, SourceCheck, State, recorded,
};
use dflash_settings::MatmulPrecision;
use dflash_tensor::{DeviceKind, place};
use tch::{Device, Kind};

use crate::checkpoint::{ORIGIN, ORIGIN_DIGESTS, Resuming};
use crate::colocated::ColocatedRows;
use crate::no_memory::Asking;
use crate::optimizer::OptimizerConfig;
use crate::order::{Length, RowOrder, Stride};
use crate::prepared::Prepared;
use crate::readback::Control;
use crate::ready::ReadyRows;
use crate::rows::RowSource;
use crate::shards::Rank;
use crate::split::{EACH_SOURCE, HELD_OUT};
use crate::trainer::Trainer;
use crate::validation::{AcceptanceProbe, Validation};
use crate::{Error, checkpoint, machine, schedule, setup};
use health::Health;
use worker::Worker;

/// How long to wait for a file of another node. NFS revalidates after three seconds or more, but
/// only names that it has looked up before.
const FILE_SYSTEM_PATIENCE: Duration = Duration::from_secs(4);

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The last checkpoint; `None` if the run was stopped before anything was trained.
    pub checkpoint: Option<PathBuf>,
    /// Optimizer steps taken.
    pub step: u64,
    /// Whether the schedule was completed; false if the run was told to stop.
    pub completed: bool,
}

impl Prepared<'_> {
    /// Trains as the rank that `env` describes; `probe` measures acceptance if the validation
    /// settings ask for it.
    ///
    /// # Errors
    /// A lost server or rank, a full disk, data that cannot be trained on.
    pub fn run(
        &self,
        env: &WorkerEnv,
        probe: Option<AcceptanceProbe<'_>>,
    ) -> Result<Outcome, Error> {
        let config = &self.config.settings;
        let place = place(config.device, config.compute.compute_dtype, env.local_rank)?;
        let control = Control::of(place.device);
        let options = ConnectOptions {
            join_timeout: Duration::from_secs(config.launch.join_timeout),
            collective_timeout: Duration::from_secs(config.launch.collective_timeout),
            device: place.device,
            backend: config.launch.backend,
            common: self.common(place)?,
        };
        let communicator = connect(env, &options)?;
        if config.compute.matmul_precision == MatmulPrecision::Bfloat16 {
            dflash_torch_sys::multiply_in_bf16()?;
        }
        let source = self.source(&*communicator, place, env.local_rank);
        let source = announced(&*communicator, source)?;
        self.train(&*communicator, place, control, &*source, probe)
    }

    /// The source of this rank's rows.
    fn source(
        &self,
        communicator: &dyn Communicator,
        place: DeviceKind,
        local_rank: usize,
    ) -> Result<Box<dyn RowSource>, Error> {
        if !self.config.settings.hidden_states.colocate {
            return Ok(Box::new(self.streamed_rows()));
        }
        let asking = Asking { config: self.config, rank: communicator.rank() };
        let doing = || "while loading the target".to_owned();
        let load = || ColocatedRows::load(self, place, asking, local_rank);
        Ok(Box::new(asking.contain(doing, load)?))
    }

    /// Trains on the rows of `source`, after joining the other ranks.
    pub(crate) fn train(
        &self,
        communicator: &dyn Communicator,
        place: DeviceKind,
        control: Control,
        source: &dyn RowSource,
        probe: Option<AcceptanceProbe<'_>>,
    ) -> Result<Outcome, Error> {
        announced(communicator, self.train_unannounced(communicator, place, control, source, probe))
    }

    fn train_unannounced(
        &self,
        communicator: &dyn Communicator,
        place: DeviceKind,
        control: Control,
        source: &dyn RowSource,
        probe: Option<AcceptanceProbe<'_>>,
    ) -> Result<Outcome, Error> {
        let config = &self.config.settings;
        let asking = Asking { config: self.config, rank: communicator.rank() };
        self.check_agreement(communicator)?;
        tch::no_grad(|| {
            let (rank, ranks) = (communicator.rank() as u64, communicator.world_size() as u64);

            let setting_up = || "while setting up the draft and its optimizer".to_owned();
            let head = || match source.head() {
                Some(head) => Ok(head),
                None => Ok(self.head(place)?),
            };
            let start = self.start(self.facts(communicator, place)?)?;
            let allowed = config.allow_changed.as_deref().unwrap_or_default();
            let resuming = Resuming { current: &start, allowed };
            if let Some(checkpoint) = &self.resume {
                let vocab_size = self.config.draft.vocab_size;
                checkpoint::check(checkpoint, resuming, &self.draft, vocab_size)?;
            }
            let head = asking.contain(setting_up, head)?;
            let checking = || "while checking the source of the hidden states".to_owned();
            let preflight =
                asking.contain(checking, || self.check_source(communicator, source, &head))?;
            let head = head.with_normed_states(preflight.states_are_normed());
            let set_up = || setup::trainer(self, head, place, Rank::of(communicator));
            let mut trainer = asking.contain(setting_up, set_up)?;
            trainer.control = control;
            let mut notes = preflight.notes;
            let mut position = self.begin(&mut trainer, resuming, &mut notes)?;
            let share = Stride { first: position.rows + rank, stride: ranks };
            let length = self.length(&position, ranks);
            let (order, mut planned) = RowOrder::plan(self.packing(), length, share)?;
            self.split.number(&mut planned);
            let total = self.total_steps(&order, &position, ranks);
            let before = position.schedule;
            position.schedule = Some(match before {
                Some(before) => schedule::stretched(before, position.step, total),
                None => schedule::planned(total),
            });
            let own = (total - position.step) as usize * config.rows.gradient_accumulation_steps;
            planned.truncate(own);
            let mut rows = ReadyRows::start(source, planned, &trainer.batches, &trainer.draft)?;
            let mut save_path = None;
            if rank == 0 {
                save_path = Some(self.claim(&position, &mut notes)?);
                self.record(&position, communicator.world_size(), preflight.checks)?;
            }
            notes.extend(self.directory_note(communicator, save_path.as_ref())?);
            let validation = Validation::new(self, source, probe, communicator, position.step)?;
            let worker = Worker {
                prepared: self,
                begun_at: position.step,
                had_slots: false,
                health: Health::begin(self, &position),
                ended_before: before.map(|before| before.total).filter(|&end| end != total),
                notes,
                unread: Vec::new(),
                gradient_norm: f64::NAN,
                order,
                communicator,
                trainer,
                position,
                total,
                save_path,
                saved: self.resume.as_ref().map(|checkpoint| checkpoint.step),
                validation,
            };
            // Out-of-memory failures inside a step are handled there.
            let doing = || "while summing gradients, moving weights or saving".to_owned();
            asking.contain(doing, || worker.train(&mut rows))
        })
    }

    /// Where the run begins: at the start, or where the resumed checkpoint ends, which is put into `trainer`.
    fn begin(
        &self,
        trainer: &mut Trainer,
        resuming: Resuming<'_>,
        notes: &mut Vec<String>,
    ) -> Result<Position, Error> {
        let start = resuming.current.clone();
        let Some(checkpoint) = &self.resume else { return Ok(start) };
        let (stored, changes) = checkpoint::resume(trainer, checkpoint, resuming)?;
        if stored.settings.is_empty() {
            let note = "an earlier release saved this run: its settings are not compared";
            notes.push(note.to_owned());
        }
        notes.extend(changes.iter().map(|change| format!("changed: {change}")));
        Ok(go_on(stored, start))
    }

    /// Claims the save path for rank 0. What a resumed run finds there of later steps is set aside.
    fn claim(&self, position: &Position, notes: &mut Vec<String>) -> Result<SavePath, Error> {
        let claimed = SavePath::claim(&self.config.settings.save_path)?;
        if self.resume.is_some()
            && let Some((steps, aside)) = claimed.set_aside_after(position.step)?
        {
            notes.push(aside_note(&steps, &aside));
            notes.extend(claimed.publish().err().map(|error| error.to_string()));
        }
        Ok(claimed)
    }

    /// Records in the run's directory what the run is, and what was checked of the source.
    fn record(
        &self,
        position: &Position,
        world_size: usize,
        source_checks: Vec<SourceCheck>,
    ) -> Result<(), Error> {
        let provenance = self.provenance(position, world_size)?;
        let provenance = Provenance { source_checks, ..provenance };
        Ok(RunDir::at(&self.config.settings.save_path).record(provenance)?)
    }

    /// Refuses ranks that would resume different checkpoints, as on nodes without a shared file
    /// system: they would train different drafts. Checkpoints of the same step of different runs
    /// differ in their checksums.
    fn check_agreement(&self, communicator: &dyn Communicator) -> Result<(), Error> {
        let own = self.resume.as_ref().map_or_else(|| "no checkpoint".to_owned(), described);
        let all = communicator.all_gather_bytes(own.as_bytes())?;
        let Some(rank) = all.iter().position(|found| *found != all[0]) else { return Ok(()) };
        let text = |rank: usize| String::from_utf8_lossy(&all[rank]).into_owned();
        let (path, found, expected) = (self.config.settings.save_path.clone(), text(rank), text(0));
        Err(Error::RanksDisagree { rank, path, found, expected })
    }

    /// A warning if ranks do not see what rank 0 writes, which otherwise shows only on resuming.
    fn directory_note(
        &self,
        communicator: &dyn Communicator,
        claimed: Option<&SavePath>,
    ) -> Result<Option<String>, Error> {
        if communicator.world_size() == 1 {
            return Ok(None);
        }
        let path = &self.config.settings.save_path;
        let marks = communicator.all_gather_bytes(claimed.map_or(&[], SavePath::mark))?;
        let sees = marks[0].is_empty() || sees_in_time(&RunDir::at(path), &marks[0]);
        let all = communicator.all_gather_bytes(&[u8::from(sees)])?;
        let blind = (0..all.len()).filter(|&rank| all[rank] != [1]);
        let blind: Vec<String> = blind.map(|rank| rank.to_string()).collect();
        let (ranks, do_not) = match blind.as_slice() {
            [] => return Ok(None),
            [_] => ("rank", "does not"),
            _ => ("ranks", "do not"),
        };
        Ok(Some(format!(
            "{ranks} {} {do_not} see what rank 0 writes to {}: where nodes have no directory in \
             common, --resume will find nothing on theirs; name a --save-path that all nodes share, or \
             copy the last checkpoint to each before you resume",
            blind.join(", "),
            path.display()
        )))
    }

    fn provenance(&self, position: &Position, world_size: usize) -> Result<Provenance, Error> {
        Ok(Provenance {
            dflash: Some(env!("CARGO_PKG_VERSION").to_owned()),
            libtorch: dflash_torch_sys::libtorch_version().ok(),
            world_size: Some(world_size),
            resumed_at_step: position.step,
            dataset: Some(position.dataset.clone()),
            data: self.dataset.preparation()?,
            target: Some(self.identity.clone()),
            settings: position.settings.clone(),
            config: self.config.shown(),
            ..Provenance::default()
        })
    }

    /// Everything that determines the run's results: the settings and what follows from them here.
    fn facts(
        &self,
        communicator: &dyn Communicator,
        DeviceKind { device, kind }: DeviceKind,
    ) -> Result<BTreeMap<String, String>, Error> {
        let settings = &self.config.settings;
        let ranks = communicator.world_size();
        let rows = ranks * settings.rows.gradient_accumulation_steps;
        let device_name = if let Device::Cuda(_) = device { "cuda" } else { "cpu" };
        let dtype = if kind == Kind::BFloat16 { "bfloat16" } else { "float32" };
        let by_source = self.split.is_by_source().then(|| EACH_SOURCE.to_owned());
        let known = [
            (HELD_OUT, by_source),
            ("target", Some(self.identity.digests())),
            ("described_target", self.described_target()),
            ("device", Some(device_name.to_owned())),
            ("compute_dtype", Some(dtype.to_owned())),
            ("ranks", Some(ranks.to_string())),
            ("rows_per_step", Some(rows.to_string())),
            ("threads", Some(tch::get_num_threads().to_string())),
            ("processor", machine::processor(device)),
            ("cpu_level", machine::cpu_level(device)),
            ("dflash", Some(env!("CARGO_PKG_VERSION").to_owned())),
            ("libtorch", dflash_torch_sys::libtorch_version().ok()),
            (ORIGIN, settings.draft.from_pretrained.clone()),
            (ORIGIN_DIGESTS, self.origin_digests()?),
        ];
        let known = known.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
        Ok(recorded(settings).into_iter().chain(known).collect())
    }

    /// Digests of the starting draft, regardless of its path.
    pub(crate) fn origin_digests(&self) -> Result<Option<String>, Error> {
        let dir = self.config.pretrained_dir.as_deref();
        Ok(dir.map(|dir| TargetIdentity::read(dir, "")).transpose()?.map(|draft| draft.digests()))
    }

    /// The user's description of the target, on one line.
    fn described_target(&self) -> Option<String> {
        let described = self.config.described_target.as_ref()?;
        Some(serde_json::to_string(described).expect("names and numbers print"))
    }

    /// The start position of a fresh run.
    fn start(&self, settings: BTreeMap<String, String>) -> Result<Position, Error> {
        let config = &self.config.settings;
        let optimizer = OptimizerConfig::from(&config.optimizer);
        Ok(Position {
            dataset: self.dataset.fingerprint(),
            dataset_content: Some(self.dataset.content()?.to_owned()),
            target: Some(self.identity.clone()),
            seed: config.rows.seed,
            total_seq_len: config.rows.total_seq_len(),
            trained_samples: Some(self.packing().lengths.len()),
            optimizer: optimizer.algorithm.name().to_owned(),
            ema_decay: optimizer.ema_decay,
            served_weights: ServedWeights::of(optimizer.ema_decay),
            settings,
            ..Position::default()
        })
    }

    /// All epochs, or if only steps are limited, as many as those need.
    fn length(&self, position: &Position, ranks: u64) -> Length {
        let rows = &self.config.settings.rows;
        if let Some(epochs) = rows.whole_epochs() {
            return Length::Epochs(epochs);
        }
        let steps = rows.max_steps.unwrap_or(1).saturating_sub(position.step);
        let remaining = steps.saturating_mul(ranks * rows.gradient_accumulation_steps as u64);
        Length::Rows(remaining.saturating_add(position.rows))
    }

    /// Steps of the whole schedule: those taken plus those that the remaining rows give.
    fn total_steps(&self, order: &RowOrder, position: &Position, ranks: u64) -> u64 {
        let remaining = order.rows().saturating_sub(position.rows);
        let rows = &self.config.settings.rows;
        let all =
            position.step + remaining.div_ceil(ranks * rows.gradient_accumulation_steps as u64);
        rows.max_steps.map_or(all, |bound| bound.min(all)).max(position.step)
    }
}

/// The start position of a resumed run: the `stored` position with the settings of the `current`
/// one, except the starting draft's.
fn go_on(mut stored: Position, current: Position) -> Position {
    let mut settings = current.settings;
    for key in [ORIGIN, ORIGIN_DIGESTS] {
        settings.remove(key);
        settings.extend(stored.settings.remove_entry(key));
    }
    // Reset the loss history if the loss changed or the state had diverged: resuming a diverged
    // state means giving it another chance.
    let is_diverged = std::mem::take(&mut stored.diverged);
    if is_diverged || stored.settings.get("loss") != settings.get("loss") {
        (stored.first_loss, stored.highest_loss) = (None, None);
        (stored.recent_losses, stored.lr_sum) = (Vec::new(), 0.0);
    }
    if is_diverged {
        stored.bad_in_a_row = 0;
    }
    Position { settings, ..stored }
}

/// Identifies a checkpoint for comparison between ranks: its step and the checksum of its tensors.
/// An unreadable state is refused later, when it is restored.
fn described(checkpoint: &Checkpoint) -> String {
    let checksum = State::load(&checkpoint.dir).ok().and_then(|state| state.tensors_crc32);
    let checksum = checksum.map_or_else(String::new, |sum| format!(" (checksum {sum:08x})"));
    format!("step {}{checksum}", checkpoint.step)
}

/// Whether rank 0's `mark` becomes visible in `run`; network file systems take a moment.
fn sees_in_time(run: &RunDir, mark: &[u8]) -> bool {
    let begun = Instant::now();
    while !run.is_claimed_as(mark) {
        if begun.elapsed() > FILE_SYSTEM_PATIENCE {
            return false;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    true
}

/// Tells the launcher if `outcome` is out of memory, since a restart would need as much.
fn announced<T>(communicator: &dyn Communicator, outcome: Result<T, Error>) -> Result<T, Error> {
    if let Err(Error::OutOfMemory { .. }) = &outcome {
        communicator.announce_permanent_failure();
    }
    outcome
}

/// Message about checkpoints that were moved aside.
fn aside_note(steps: &[u64], aside: &Path) -> String {
    let steps: Vec<String> = steps.iter().map(u64::to_string).collect();
    let noun = if steps.len() == 1 { "the checkpoint of step" } else { "the checkpoints of steps" };
    let (steps, aside) = (steps.join(", "), aside.display());
    format!(
        "{noun} {steps} and the lines are now in {aside}; remove it when it is no longer needed"
    )
}
