//! Checkpoints: a draft that can be served as it is, and beside it everything that a resumed run
//! needs, whatever its world size. docs/formats.md describes the files.
//!
//! Tensors are streamed to their files through one buffer of a few MiB, and the checksum is taken
//! on the way. Split state comes to rank 0 share by share, a piece at a time, by broadcasts in file
//! order; rank 0 takes part to the end even if its disk is full. The served model is then read from
//! the state's file, the only place that has all of it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use dflash_dist::Communicator;
use dflash_draft::objective::DraftVocabulary;
use dflash_draft::{Draft, DraftConfig, DraftLayout};
use dflash_io::PendingDir;
use dflash_run::{Change, Checkpoint, Position, State, changes};
use dflash_settings::{Invalid, TrainSettings};
use dflash_tensor::checkpoint::{TensorFile, TensorWriter};

use crate::Error;
use crate::optimizer::{Algorithm, OptimizerConfig};
use crate::prepared::Prepared;
use crate::trainer::Trainer;

/// The flat parameters in a checkpoint's float32 state.
pub(crate) const MASTER_WEIGHTS: &str = "masters";

/// The draft that a run began from, as it was named.
pub(crate) const ORIGIN: &str = "from_pretrained";
/// What that draft is, whatever its path.
pub(crate) const ORIGIN_DIGESTS: &str = "from_pretrained_digests";

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
pub(crate) fn bytes(draft: &DraftConfig, optimizer: &OptimizerConfig) -> i64 {
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
    let alone = settings.launch.nproc.unwrap_or(1) * settings.launch.nnodes == 1;
    let own = if settings.compute.splits_state() && !alone {
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
    trainer.master_weights.stream(communicator, &mut |piece| {
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

/// What a run that resumes a checkpoint brings itself.
#[derive(Clone, Copy)]
pub(crate) struct Resuming<'a> {
    /// Where it would begin afresh, with its own settings.
    pub(crate) current: &'a Position,
    /// The settings that may differ from the checkpoint's.
    pub(crate) allowed: &'a [String],
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
        std::fs::create_dir(&inner).map_err(dflash_io::Error::io("create", inner))?;
        let tensors = dir.path().join(Checkpoint::TENSORS);
        let state = TensorWriter::create(&tensors, &trainer.master_weights.entries())?;
        Ok(Self { state, dir })
    }

    /// Writes all but the state. The model comes from the state's file, which has the whole of it
    /// whatever ranks held it.
    fn finish(self, trainer: &Trainer, position: &Position) -> Result<(), Error> {
        let dir = self.dir.path();
        let tensors_crc32 = Some(self.state.finish()?);
        let stored = TensorFile::open(&dir.join(Checkpoint::TENSORS))?;
        Draft::save_stored(
            trainer.draft.config(),
            &stored,
            trainer.master_weights.served_name(),
            dir,
        )?;
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
/// changes of its settings.
pub(crate) fn resume(
    trainer: &mut Trainer,
    checkpoint: &Checkpoint,
    resuming: Resuming<'_>,
) -> Result<(Position, Vec<Change>), Error> {
    restore(trainer, checkpoint, resuming).map_err(|error| judged(checkpoint, error))
}

/// An error of going on from `checkpoint`: it is refused, or else damaged.
fn judged(checkpoint: &Checkpoint, error: Error) -> Error {
    match error {
        refused @ (Error::ResumeMismatch { .. }
        | Error::SettingsChanged { .. }
        | Error::Setting(_)) => refused,
        error => checkpoint.clone().damaged(error).into(),
    }
}

/// Refuses to go on from `checkpoint` with other settings than it was trained with, except those that may
/// differ: before a server is asked for what this run would need. Of the vocabulary the size that is
/// `asked` for is compared, where one is.
pub(crate) fn check(
    checkpoint: &Checkpoint,
    resuming: Resuming<'_>,
    draft: &DraftConfig,
    asked: Option<usize>,
) -> Result<(), Error> {
    let compared = || {
        let state = State::load(&checkpoint.dir)?;
        let vocabulary = DraftVocabulary::load(&checkpoint.dir)?;
        let size = vocabulary.map(|vocabulary| vocabulary.selected().len());
        compare(&checkpoint.dir, &state.position, size, resuming, draft, asked.or(size))?;
        check_origin(&state.position, resuming.current)
    };
    compared().map_err(|error| judged(checkpoint, error))
}

/// Refuses another draft to start from than the run that goes on began with. It is the same by the digests of
/// its files, however its path is spelt.
fn check_origin(stored: &Position, current: &Position) -> Result<(), Error> {
    let of = |position: &Position, key: &str| position.settings.get(key).cloned();
    let Some(asked) = of(current, ORIGIN) else { return Ok(()) };
    if stored.settings.is_empty() {
        return Ok(());
    }
    let began = of(stored, ORIGIN);
    let same = match (of(stored, ORIGIN_DIGESTS), of(current, ORIGIN_DIGESTS)) {
        (Some(theirs), Some(own)) => theirs == own,
        // A run of an earlier release recorded the path alone.
        _ => began.as_ref().is_some_and(|began| is_same_path(began, &asked)),
    };
    if same {
        return Ok(());
    }
    let began = began.map_or_else(|| "fresh".to_owned(), |draft| format!("from {draft}"));
    let expected = format!("the resumed run began {began}; do not pass the flag");
    Err(Invalid::new("from_pretrained", asked, expected).into())
}

fn is_same_path(a: &str, b: &str) -> bool {
    let real = |path: &str| std::fs::canonicalize(path).ok();
    a == b || real(a).is_some_and(|real_a| real(b) == Some(real_a))
}

/// What this run changes of the settings that `stored` records, if it may. The sizes are those of the stored
/// vocabulary and of this run's.
fn compare(
    dir: &Path,
    stored: &Position,
    stored_size: Option<usize>,
    Resuming { current, allowed }: Resuming<'_>,
    draft: &DraftConfig,
    size: Option<usize>,
) -> Result<Vec<Change>, Error> {
    let found =
        lasting(stored, &DraftConfig::load(dir).map_err(dflash_tensor::Error::from)?, stored_size);
    // runs from before there was validation do not say how many samples they train on
    let trained_samples = stored.trained_samples.and(current.trained_samples);
    // and those from before there was a digest of the tokens do not say which
    let content = stored.dataset_content.as_ref().and(current.dataset_content.clone());
    // what the run began from is compared by what it is
    let mut current = Position { trained_samples, dataset_content: content, ..current.clone() };
    current.settings.retain(|key, _| ![ORIGIN, ORIGIN_DIGESTS].contains(&key.as_str()));
    let expected = lasting(&current, draft, size);
    for (key, expected) in expected {
        let found = found.iter().find(|(name, _)| *name == key);
        let found = found.map_or_else(|| "off".to_owned(), |(_, found)| found.clone());
        if found != expected {
            return Err(Error::ResumeMismatch { path: dir.into(), key, found, expected });
        }
    }
    let changes = changes(&stored.settings, &current.settings);
    check_allowed(dir, &changes, allowed, &current)?;
    Ok(changes)
}

fn restore(
    trainer: &mut Trainer,
    Checkpoint { step, dir }: &Checkpoint,
    resuming: Resuming<'_>,
) -> Result<(Position, Vec<Change>), Error> {
    let state = State::load(dir)?;
    let stored = &state.position;
    let size = |vocabulary: Option<&DraftVocabulary>| vocabulary.map(|it| it.selected().len());
    let stored_size = size(DraftVocabulary::load(dir)?.as_ref());
    let own_size = size(trainer.batches.blocks.vocabulary.as_ref());
    let draft = trainer.draft.config();
    let changes = compare(dir, stored, stored_size, resuming, draft, own_size)?;
    let path = dir.join(Checkpoint::TENSORS);
    let file = TensorFile::open(&path)?;
    let differs = |expected: u32| file.crc32().map(|found| found != expected);
    if stored.step != *step || state.tensors_crc32.map(differs).transpose()?.unwrap_or(false) {
        return Err(Error::Altered { path });
    }
    trainer.master_weights.restore(&trainer.draft, &file, stored.optimizer_steps())?;
    // A run of an earlier release does not say which target it is for.
    let Position { target, dataset_content, .. } = resuming.current.clone();
    Ok((Position { target, dataset_content, ..state.position }, changes))
}

/// Refuses changes that nobody asked for by name, and names that no setting has.
fn check_allowed(
    dir: &Path,
    changes: &[Change],
    allowed: &[String],
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

/// The settings that no resumed run may change, by their flags. What neither the flags nor the keys of a head
/// say of a draft is the target's, which is compared last.
fn lasting(
    position: &Position,
    draft: &DraftConfig,
    vocabulary_size: Option<usize>,
) -> Vec<(String, String)> {
    let trained_samples = position.trained_samples.unwrap_or_default();
    let content = position.dataset_content.clone().unwrap_or_default();
    let named = [
        ("a dataset (--data-path) of fingerprint", position.dataset.clone()),
        ("a dataset (--data-path) whose tokens have the digest", content),
        ("--seed", position.seed.to_string()),
        ("--total-seq-len", position.total_seq_len.to_string()),
        ("--validation-ratio leaving so many samples:", trained_samples.to_string()),
        ("--optimizer", position.optimizer.clone()),
        ("--ema-decay", or_off(position.ema_decay)),
        ("--speculator-type", draft.head.kind.clone()),
        ("--num-layers", draft.layers.len().to_string()),
        ("--block-size", draft.block_size.to_string()),
        ("--target-layer-ids", format!("{:?}", draft.target_layer_ids)),
        ("--sliding-window", or_off(draft.sliding_window)),
        ("--mask-token-id", draft.mask_token_id.to_string()),
        ("--draft-vocab-size", or_off(vocabulary_size)),
    ];
    let named = named.map(|(key, value)| (key.to_owned(), value));
    let of_head = draft.head.keys.iter().map(|(key, value)| (flag(key), value.to_string()));
    // The size of the draft's vocabulary, which a head may need to know, is named already.
    let of_head = of_head.filter(|(key, _)| named.iter().all(|(other, _)| other != key));
    let whole = ("a target whose draft is".to_owned(), format!("{draft:?}"));
    named.iter().cloned().chain(of_head).chain([whole]).collect()
}

/// The flag of a setting's key. The keys of a head are those of its settings.
fn flag(key: &str) -> String {
    format!("--{}", key.replace('_', "-"))
}

fn or_off(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "off".to_owned(), |value| value.to_string())
}

#[cfg(test)]
mod tests;
