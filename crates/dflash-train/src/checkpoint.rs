//! Checkpoints: a draft that can be served as it stands, and beside it all that a resumed run
//! needs, whatever its world size.
//!
//! `step-000123/` holds config.json and model.safetensors in z-lab's layout, and `trainer/` the
//! float32 masters, the optimizer's state, the averaged weights if there are any, and the position.
//! It is written under another name, fsynced and renamed, so a directory of that name is always
//! complete.

use std::path::{Path, PathBuf};
use std::time::Duration;

use dflash_dist::Communicator;
use dflash_files::PendingDir;
use dflash_model::checkpoint::{TensorFile, TensorWriter};
use dflash_model::draft::{Draft, DraftConfig, DraftLayout};
use dflash_model::objective::DraftVocabulary;
use dflash_run::{Checkpoint, Position, State};

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
        let bytes = bytes(&self.draft, &self.config.optimizer);
        Duration::from_secs_f64(bytes as f64 / SLOW_DISK)
    }
}

/// Bytes of a checkpoint: the state in float32, the model in bfloat16.
fn bytes(draft: &DraftConfig, optimizer: &OptimizerConfig) -> i64 {
    let moments = match optimizer.algorithm {
        Algorithm::AdamW => 2,
        Algorithm::Muon(_) => 1,
    };
    let state = 1 + moments + i64::from(optimizer.ema_decay.is_some());
    DraftLayout::new(draft).elements() * (4 * state + 2)
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

    /// Writes what is beside the state. The model comes from the state's file, where all of it lies
    /// together whatever ranks held it.
    fn finish(self, trainer: &Trainer, position: &Position) -> Result<(), Error> {
        let dir = self.dir.path();
        let tensors_crc32 = Some(self.state.finish()?);
        let stored = TensorFile::open(&dir.join(Checkpoint::TENSORS))?;
        Draft::save_stored(trainer.draft.config(), (&stored, trainer.masters.served_name()), dir)?;
        if let Some(vocabulary) = &trainer.batches.blocks.vocabulary {
            vocabulary.save(dir)?;
        }
        State { position: position.clone(), tensors_crc32 }.save(dir)?;
        Ok(self.dir.commit()?)
    }
}

/// Puts a checkpoint into `trainer`, whatever ranks wrote it. Returns where its run stood; `current`
/// is where this run would begin, with its settings.
///
/// # Errors
/// A checkpoint that other settings made, or that is damaged.
pub(crate) fn resume(
    trainer: &mut Trainer,
    checkpoint: &Checkpoint,
    current: &Position,
) -> Result<Position, Error> {
    restore(trainer, checkpoint, current).map_err(|error| match error {
        mismatch @ Error::ResumeMismatch { .. } => mismatch,
        error => checkpoint.clone().damaged(error).into(),
    })
}

fn restore(
    trainer: &mut Trainer,
    Checkpoint { step, dir }: &Checkpoint,
    current: &Position,
) -> Result<Position, Error> {
    let state = State::load(dir)?;
    let stored = &state.position;
    check_resumable(dir, stored, current)?;
    check_same_draft(dir, trainer.draft.config())?;
    check_same_vocabulary(dir, trainer.batches.blocks.vocabulary.as_ref())?;
    let path = dir.join(Checkpoint::TENSORS);
    let file = TensorFile::open(&path)?;
    let differs = |expected: u32| file.crc32().map(|found| found != expected);
    if stored.step != *step || state.tensors_crc32.map(differs).transpose()?.unwrap_or(false) {
        return Err(Error::Altered { path });
    }
    trainer.masters.restore(&trainer.draft, &file, stored.optimizer_steps())?;
    Ok(state.position)
}

/// Refuses where a setting differs: `found` in the checkpoint, `expected` in this run.
fn same(dir: &Path, key: &'static str, found: String, expected: String) -> Result<(), Error> {
    if found == expected {
        return Ok(());
    }
    Err(Error::ResumeMismatch { path: dir.into(), key, found, expected })
}

/// Refuses a checkpoint that other settings of the run made.
fn check_resumable(dir: &Path, stored: &Position, current: &Position) -> Result<(), Error> {
    let key = "a dataset (--data-path) of fingerprint";
    same(dir, key, stored.dataset.clone(), current.dataset.clone())?;
    same(dir, "--seed", stored.seed.to_string(), current.seed.to_string())?;
    let (found, expected) = (stored.total_seq_len, current.total_seq_len);
    same(dir, "--total-seq-len", found.to_string(), expected.to_string())?;
    if stored.trained_samples.is_some() {
        let text = |samples: Option<usize>| samples.unwrap_or_default().to_string();
        let key = "--validation-ratio leaving so many samples:";
        same(dir, key, text(stored.trained_samples), text(current.trained_samples))?;
    }
    same(dir, "--optimizer", stored.optimizer.clone(), current.optimizer.clone())?;
    let ema = |decay: Option<f64>| or_off(decay.as_ref());
    same(dir, "--ema-decay", ema(stored.ema_decay), ema(current.ema_decay))
}

fn check_same_draft(dir: &Path, draft: &DraftConfig) -> Result<(), Error> {
    let stored = DraftConfig::load(dir)?;
    for ((key, found), (_, expected)) in
        draft_settings(&stored).into_iter().zip(draft_settings(draft))
    {
        same(dir, key, found, expected)?;
    }
    // what the flags do not say is the target's
    same(dir, "a target whose draft is", format!("{stored:?}"), format!("{draft:?}"))
}

/// The flags that shape a draft.
fn draft_settings(draft: &DraftConfig) -> [(&'static str, String); 5] {
    [
        ("--num-layers", draft.layers.len().to_string()),
        ("--block-size", draft.block_size.to_string()),
        ("--target-layer-ids", format!("{:?}", draft.target_layer_ids)),
        ("--sliding-window", or_off(draft.sliding_window.as_ref())),
        ("--mask-token-id", draft.mask_token_id.to_string()),
    ]
}

fn check_same_vocabulary(dir: &Path, own: Option<&DraftVocabulary>) -> Result<(), Error> {
    let stored = DraftVocabulary::load(dir)?;
    let size = |vocabulary: Option<&DraftVocabulary>| {
        or_off(vocabulary.map(|vocabulary| vocabulary.selected().len()).as_ref())
    };
    same(dir, "--draft-vocab-size", size(stored.as_ref()), size(own))
}

fn or_off<T: ToString>(value: Option<&T>) -> String {
    value.map_or_else(|| "off".to_owned(), T::to_string)
}

#[cfg(test)]
mod tests;
