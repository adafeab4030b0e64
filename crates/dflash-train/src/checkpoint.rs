//! Checkpoints: a draft that can be served as it is, and beside it all that a resumed run needs,
//! whatever its world size. docs/formats.md describes the files.

use std::path::{Path, PathBuf};
use std::time::Duration;

use dflash_dist::Communicator;
use dflash_files::PendingDir;
use dflash_model::checkpoint::{TensorFile, TensorWriter};
use dflash_model::draft::{Draft, DraftConfig, DraftLayout};
use dflash_model::objective::DraftVocabulary;
use dflash_run::{Change, Checkpoint, Position, State, changes};
use dflash_settings::{Invalid, TrainSettings};

use crate::Error;
use crate::optimizer::{Algorithm, OptimizerConfig};
use crate::prepared::Prepared;
use crate::trainer::Trainer;

/// The flat parameters in a checkpoint's float32 state.
pub(crate) const MASTERS: &str = "masters";

/// Bytes a second that a slow disk takes. A network file system over gigabit Ethernet brings 118
/// million, Amazon's gp3 volumes 125 and the inner tracks of a spinning disk some 100.
const SLOW_DISK: f64 = 100e6;

impl Prepared<'_> {
    /// How long a checkpoint of this run takes to write on a slow disk.
    pub fn time_to_save(&self) -> Duration {
        let optimizer = OptimizerConfig::from(&self.config.settings.optimizer);
        let bytes = bytes(&self.draft, &optimizer);
        Duration::from_secs_f64(bytes as f64 / SLOW_DISK)
    }
}

/// Bytes of a checkpoint: the state in float32, the model in bfloat16.
fn bytes(draft: &DraftConfig, optimizer: &OptimizerConfig) -> i64 {
    DraftLayout::new(draft).elements() * (4 * state(optimizer) + 2)
}

/// Numbers of state for each parameter.
fn state(optimizer: &OptimizerConfig) -> i64 {
    let moments = match optimizer.algorithm {
        Algorithm::AdamW => 2,
        Algorithm::Muon(_) => 1,
    };
    1 + moments + i64::from(optimizer.ema_decay.is_some())
}

/// Bytes that a rank on a CPU holds whatever its rows are: the state, of which other ranks may hold a
/// share, and the gradients.
pub(crate) fn least_memory(draft: &DraftConfig, settings: &TrainSettings) -> f64 {
    let own = if settings.compute.splits_state() {
        1
    } else {
        state(&OptimizerConfig::from(&settings.optimizer))
    };
    DraftLayout::new(draft).elements() as f64 * 4.0 * (own + 1) as f64
}

/// Writes the checkpoint of `position`, unless it is there already. All ranks bring their share of
/// the state; rank 0 writes.
pub(crate) fn save(
    trainer: &Trainer,
    position: &Position,
    save_path: &Path,
    communicator: &dyn Communicator,
) -> Result<PathBuf, Error> {
    let checkpoint = Checkpoint::at(save_path, position.step);
    let writes = communicator.rank() == 0 && !checkpoint.is_complete();
    let mut pending = writes.then(|| PendingCheckpoint::create(trainer, &checkpoint.dir));
    // Whatever becomes of the file, the exchange goes on to its end: the other ranks are in it.
    trainer.masters.stream(communicator, &mut |piece| {
        let written = match &mut pending {
            Some(Ok(pending)) => pending.state.append(piece),
            _ => Ok(()),
        };
        if let Err(error) = written {
            pending = Some(Err(error.into()));
        }
    })?;
    communicator.check()?;
    if let Some(pending) = pending {
        pending?.finish(trainer, position)?;
    }
    Ok(checkpoint.dir)
}

/// A checkpoint that is being written; absent unless it is finished.
struct PendingCheckpoint {
    state: TensorWriter,
    dir: PendingDir,
}

impl PendingCheckpoint {
    fn create(trainer: &Trainer, destination: &Path) -> Result<Self, Error> {
        let dir = PendingDir::create(destination)?;
        let inner = dir.path().join(Checkpoint::TRAINER);
        std::fs::create_dir(&inner).map_err(dflash_files::Error::io("create", inner))?;
        let tensors = dir.path().join(Checkpoint::TENSORS);
        let state = TensorWriter::create(&tensors, &trainer.masters.entries())?;
        Ok(Self { state, dir })
    }

    /// Writes all but the state. The model comes from the state's file, which has the whole of it
    /// whatever ranks held it.
    fn finish(self, trainer: &Trainer, position: &Position) -> Result<(), Error> {
        let dir = self.dir.path();
        let tensors_crc32 = Some(self.state.finish()?);
        let stored = TensorFile::open(&dir.join(Checkpoint::TENSORS))?;
        Draft::save_stored(trainer.draft.config(), (&stored, trainer.masters.served_name()), dir)?;
        if let Some(vocabulary) = &trainer.batches.blocks.vocabulary {
            vocabulary.save(dir)?;
        }
        if let Some(target) = &position.target {
            target.write_into_draft(dir)?;
        }
        State { position: position.clone(), tensors_crc32 }.save(dir)?;
        Ok(self.dir.commit()?)
    }
}

/// Puts a checkpoint into `trainer`, whatever ranks wrote it. Returns its position, and what this run
/// changes of its settings; `current` is where this run would begin, with its own, and `allowed`
/// names those that may differ.
pub(crate) fn resume(
    trainer: &mut Trainer,
    checkpoint: &Checkpoint,
    (current, allowed): (&Position, &[String]),
) -> Result<(Position, Vec<Change>), Error> {
    restore(trainer, checkpoint, (current, allowed)).map_err(|error| match error {
        refused @ (Error::ResumeMismatch { .. }
        | Error::SettingsChanged { .. }
        | Error::Setting(_)) => refused,
        error => checkpoint.clone().damaged(error).into(),
    })
}

fn restore(
    trainer: &mut Trainer,
    Checkpoint { step, dir }: &Checkpoint,
    (current, allowed): (&Position, &[String]),
) -> Result<(Position, Vec<Change>), Error> {
    let state = State::load(dir)?;
    let stored = &state.position;
    let vocabulary = DraftVocabulary::load(dir)?;
    let found = lasting(stored, &DraftConfig::load(dir)?, vocabulary.as_ref());
    // runs from before there was validation do not say how many samples they train on
    let trained_samples = stored.trained_samples.and(current.trained_samples);
    // and those from before there was a digest of the tokens do not say which
    let dataset_content = current.dataset_content.clone();
    let content = stored.dataset_content.as_ref().and(dataset_content.clone());
    let current = Position { trained_samples, dataset_content: content, ..current.clone() };
    let vocabulary = trainer.batches.blocks.vocabulary.as_ref();
    let expected = lasting(&current, trainer.draft.config(), vocabulary);
    for ((key, found), (_, expected)) in found.into_iter().zip(expected) {
        if found != expected {
            return Err(Error::ResumeMismatch { path: dir.clone(), key, found, expected });
        }
    }
    let changes = changes(&stored.settings, &current.settings);
    check_allowed(dir, (&changes, allowed), &current)?;
    let path = dir.join(Checkpoint::TENSORS);
    let file = TensorFile::open(&path)?;
    let differs = |expected: u32| file.crc32().map(|found| found != expected);
    if stored.step != *step || state.tensors_crc32.map(differs).transpose()?.unwrap_or(false) {
        return Err(Error::Altered { path });
    }
    trainer.masters.restore(&trainer.draft, &file, stored.optimizer_steps())?;
    // A run of an earlier release does not say which target it is for.
    Ok((Position { target: current.target, dataset_content, ..state.position }, changes))
}

/// Refuses changes that nobody asked for by name, and names that no setting has.
fn check_allowed(
    dir: &Path,
    (changes, allowed): (&[Change], &[String]),
    current: &Position,
) -> Result<(), Error> {
    let same = |name: &str, other: &str| {
        name.trim_start_matches('-').replace('_', "-") == other.replace('_', "-")
    };
    let is_known = |name: &String| current.settings.keys().any(|key| same(name, key));
    if let Some(unknown) = allowed.iter().find(|name| !is_known(name)) {
        let known: Vec<String> = current.settings.keys().map(|key| key.replace('_', "-")).collect();
        let expected = format!("a resumed run can change {}", known.join(", "));
        return Err(Invalid::new("allow_changed", unknown, expected).into());
    }
    let needs_leave: Vec<&Change> = changes.iter().filter(|change| change.needs_leave).collect();
    let is_allowed = |change: &&&Change| allowed.iter().any(|name| same(name, &change.name));
    if needs_leave.iter().all(|change| is_allowed(&change)) {
        return Ok(());
    }
    let names: Vec<&str> = needs_leave.iter().map(|change| change.name.as_str()).collect();
    let (path, names) = (dir.into(), names.join(","));
    let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
    Err(Error::SettingsChanged { path, changes: changes.join(", "), names })
}

/// The settings that no resumed run may change. What the flags do not say of a draft is the target's.
fn lasting(
    position: &Position,
    draft: &DraftConfig,
    vocabulary: Option<&DraftVocabulary>,
) -> [(&'static str, String); 14] {
    let trained_samples = position.trained_samples.unwrap_or_default();
    let content = position.dataset_content.clone().unwrap_or_default();
    let vocabulary_size = vocabulary.map(|vocabulary| vocabulary.selected().len());
    [
        ("a dataset (--data-path) of fingerprint", position.dataset.clone()),
        ("a dataset (--data-path) whose tokens have the digest", content),
        ("--seed", position.seed.to_string()),
        ("--total-seq-len", position.total_seq_len.to_string()),
        ("--validation-ratio leaving so many samples:", trained_samples.to_string()),
        ("--optimizer", position.optimizer.clone()),
        ("--ema-decay", or_off(position.ema_decay)),
        ("--num-layers", draft.layers.len().to_string()),
        ("--block-size", draft.block_size.to_string()),
        ("--target-layer-ids", format!("{:?}", draft.target_layer_ids)),
        ("--sliding-window", or_off(draft.sliding_window)),
        ("--mask-token-id", draft.mask_token_id.to_string()),
        ("a target whose draft is", format!("{draft:?}")),
        ("--draft-vocab-size", or_off(vocabulary_size)),
    ]
}

fn or_off(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "off".to_owned(), |value| value.to_string())
}

#[cfg(test)]
mod tests;
