//! Checkpoints: a draft that can be served as is, together with everything needed to resume the run
//! at any world size. docs/formats.md describes the files.
//!
//! Tensors are streamed to their files through one buffer of a few MiB, and the checksum is
//! computed along the way. Split state reaches rank 0 share by share, in pieces, by broadcasts in
//! file order; rank 0 takes part to the end even if its disk is full. The served model is then read
//! back from the state's file, the only place that holds all of it.

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
use crate::error::{Mismatch, Mismatches};
use crate::optimizer::{Algorithm, OptimizerConfig};
use crate::prepared::Prepared;
use crate::trainer::Trainer;

/// Name of the flat parameters in a checkpoint's float32 state.
pub(crate) const MASTER_WEIGHTS: &str = "masters";

/// Key of the draft that a run started from, as the user named it.
pub(crate) const ORIGIN: &str = "from_pretrained";
/// Key of that draft's digests, which do not depend on its path.
pub(crate) const ORIGIN_DIGESTS: &str = "from_pretrained_digests";

/// Write rate of a slow disk, bytes/s. A network file system over gigabit Ethernet reaches 118
/// million, Amazon's gp3 volumes 125 and the inner tracks of a spinning disk about 100.
const SLOW_DISK: f64 = 100e6;

impl Prepared<'_> {
    /// Time to write a checkpoint of this run to a slow disk.
    pub fn time_to_save(&self) -> Duration {
        let optimizer = OptimizerConfig::from(&self.config.settings.optimizer);
        let bytes = bytes(&self.draft, &optimizer);
        Duration::from_secs_f64(bytes as f64 / SLOW_DISK)
    }
}

/// Bytes of a checkpoint: float32 state and bfloat16 model.
pub(crate) fn bytes(draft: &DraftConfig, optimizer: &OptimizerConfig) -> i64 {
    DraftLayout::new(draft).elements() * (4 * state(optimizer) + 2)
}

/// Numbers of state per parameter.
fn state(optimizer: &OptimizerConfig) -> i64 {
    let moments = match optimizer.algorithm {
        Algorithm::AdamW => 2,
        Algorithm::Muon(_) => 1,
    };
    1 + moments + i64::from(optimizer.ema_decay.is_some())
}

/// Minimum memory of a rank on a CPU, in bytes, whatever its rows are: its state, without what
/// other ranks may hold, and the gradients.
pub(crate) fn least_memory(draft: &DraftConfig, settings: &TrainSettings) -> f64 {
    let alone = settings.launch.nproc.unwrap_or(1) * settings.launch.nnodes == 1;
    let own = if settings.compute.splits_state() && !alone {
        1
    } else {
        state(&OptimizerConfig::from(&settings.optimizer))
    };
    DraftLayout::new(draft).elements() as f64 * 4.0 * (own + 1) as f64
}

/// Writes the checkpoint of `position` unless it exists. All ranks contribute their share of the
/// state; rank 0 writes.
pub(crate) fn save(
    trainer: &Trainer,
    position: &Position,
    save_path: &Path,
    communicator: &dyn Communicator,
) -> Result<PathBuf, Error> {
    let checkpoint = Checkpoint::at(save_path, position.step);
    let writes = communicator.rank() == 0 && !checkpoint.is_complete();
    let mut pending = writes.then(|| PendingCheckpoint::create(trainer, &checkpoint.dir));
    // Continue the exchange to its end even if writing fails: the other ranks take part in it.
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

/// A checkpoint being written; it appears only when finished.
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

    /// Writes everything but the state. The model is read from the state's file, which is complete
    /// regardless of how ranks shared the state.
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

/// Loads a checkpoint into `trainer`, regardless of the ranks that wrote it. Returns its position
/// and the settings that this run changes.
pub(crate) fn resume(
    trainer: &mut Trainer,
    checkpoint: &Checkpoint,
    resuming: Resuming<'_>,
) -> Result<(Position, Vec<Change>), Error> {
    restore(trainer, checkpoint, resuming).map_err(|error| judged(checkpoint, error))
}

/// An error when resuming from `checkpoint`: refused settings, otherwise a damaged checkpoint.
fn judged(checkpoint: &Checkpoint, error: Error) -> Error {
    match error {
        refused @ (Error::ResumeMismatch { .. }
        | Error::SettingsChanged { .. }
        | Error::Setting(_)) => refused,
        error => checkpoint.clone().damaged(error).into(),
    }
}

/// Refuses to resume from `checkpoint` with settings other than those it was trained with, except
/// those that may differ. Runs before any server is contacted. The vocabulary's size is compared
/// with `asked`, if given.
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

/// Refuses to resume with a starting draft other than the run's own. Drafts are compared by the
/// digests of their files, regardless of the path.
fn check_origin(stored: &Position, current: &Position) -> Result<(), Error> {
    let of = |position: &Position, key: &str| position.settings.get(key).cloned();
    let Some(asked) = of(current, ORIGIN) else { return Ok(()) };
    if stored.settings.is_empty() {
        return Ok(());
    }
    let began = of(stored, ORIGIN);
    let same = match (of(stored, ORIGIN_DIGESTS), of(current, ORIGIN_DIGESTS)) {
        (Some(theirs), Some(own)) => theirs == own,
        // Runs of earlier releases recorded only the path.
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

/// The name of the last of [`lasting`]'s facts.
const WHOLE_DRAFT: &str = "a target whose draft is";

/// The settings recorded in `stored` that this run changes; an error if one may not change.
/// The sizes are those of the stored vocabulary and of this run's.
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
    // runs from before validation existed do not record how many samples they train on
    let trained_samples = stored.trained_samples.and(current.trained_samples);
    // and runs from before tokens were digested do not record which
    let content = stored.dataset_content.as_ref().and(current.dataset_content.clone());
    // the starting draft is compared by its digests instead
    let mut current = Position { trained_samples, dataset_content: content, ..current.clone() };
    current.settings.retain(|key, _| ![ORIGIN, ORIGIN_DIGESTS].contains(&key.as_str()));
    let expected = lasting(&current, draft, size);
    let differ = expected.into_iter().filter_map(|(key, expected)| {
        let found = found.iter().find(|(name, _)| *name == key);
        let found = found.map_or_else(|| "off".to_owned(), |(_, found)| found.clone());
        (found != expected).then_some(Mismatch { key, found, expected })
    });
    let mut mismatches: Vec<Mismatch> = differ.collect();
    // The whole draft differs wherever a part of it does.
    if mismatches.len() > 1 {
        mismatches.retain(|mismatch| mismatch.key != WHOLE_DRAFT);
    }
    let changes = changes(&stored.settings, &current.settings);
    let refusal = check_allowed(dir, &changes, allowed, &current);
    if mismatches.is_empty() {
        return refusal.map(|()| changes);
    }
    let also = match refusal {
        Err(Error::SettingsChanged { changes, .. }) => {
            format!("; changed too, which --allow-changed permits: {changes}")
        }
        _ => String::new(),
    };
    Err(Error::ResumeMismatch { path: dir.into(), mismatches: Mismatches(mismatches), also })
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
    // Runs of earlier releases do not record their target.
    let Position { target, dataset_content, .. } = resuming.current.clone();
    Ok((Position { target, dataset_content, ..state.position }, changes))
}

/// Refuses changes that `allowed` does not name, and names in it that are not settings.
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

/// The settings that no resumed run may change, by flag. Draft properties that come neither from
/// flags nor from a head's keys come from the target and are compared last, as a whole.
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
    // The vocabulary's size, which a head may record too, is already listed.
    let of_head = of_head.filter(|(key, _)| named.iter().all(|(other, _)| other != key));
    let whole = (WHOLE_DRAFT.to_owned(), format!("{draft:?}"));
    named.iter().cloned().chain(of_head).chain([whole]).collect()
}

/// The flag of a setting's key. A head's keys are also settings.
fn flag(key: &str) -> String {
    format!("--{}", key.replace('_', "-"))
}

fn or_off(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "off".to_owned(), |value| value.to_string())
}

#[cfg(test)]
mod tests;
