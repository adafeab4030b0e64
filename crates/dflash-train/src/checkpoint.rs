//! Checkpoints: a draft that can be served as it stands, and beside it all that a resumed run
//! needs, whatever its world size.
//!
//! `step-000123/` holds config.json and model.safetensors in z-lab's layout, and `trainer/` the
//! float32 masters, the optimizer's state, the averaged weights if there are any, and the position.
//! It is written under another name, fsynced and renamed, so a directory of that name is always
//! complete.

use std::path::{Path, PathBuf};

use dflash_dist::Communicator;
use dflash_files::PendingDir;
use dflash_model::checkpoint::{TensorFile, write_safetensors};
use dflash_model::draft::{Draft, DraftConfig};
use dflash_model::objective::DraftVocabulary;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::optimizer::Algorithm;
use crate::trainer::Trainer;

const STATE: &str = "trainer/state.json";
/// The float32 state, below a checkpoint.
pub(crate) const TENSORS: &str = "trainer/state.safetensors";
/// The flat parameters in it.
pub(crate) const MASTERS: &str = "masters";

/// Where a run stands.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Position {
    /// Optimizer steps taken.
    pub(crate) step: u64,
    /// Packed rows of the sequence that are done.
    pub(crate) rows: u64,
    /// Steps whose gradient was not finite.
    pub(crate) bad_steps: u64,
    /// The last of them, as many as came in a row.
    #[serde(default)]
    pub(crate) bad_in_a_row: u64,
    /// Steps that had nothing to learn from; runs before this was counted took them.
    #[serde(default)]
    pub(crate) empty_steps: u64,
    /// Samples left out.
    pub(crate) skipped: u64,
    /// Tokens trained on.
    pub(crate) tokens: u64,
    /// Content of the dataset.
    pub(crate) dataset: String,
    /// Seed of order and anchors.
    pub(crate) seed: u64,
    /// Tokens of a packed row.
    pub(crate) total_seq_len: usize,
    /// Samples that are trained on, from the dataset's start; `None` in runs before there was
    /// validation: all.
    #[serde(default)]
    pub(crate) trained_samples: Option<usize>,
    /// Name of the optimizer; what an older checkpoint does not say was AdamW.
    #[serde(default = "adamw")]
    pub(crate) optimizer: String,
    /// Share that the averaged weights keep at a step, where there are such.
    #[serde(default)]
    pub(crate) ema_decay: Option<f64>,
    /// What model.safetensors beside this file holds.
    #[serde(default)]
    pub(crate) served_weights: ServedWeights,
}

/// Content of [`STATE`].
#[derive(Deserialize, Serialize)]
struct State {
    #[serde(flatten)]
    position: Position,
    /// CRC-32 of [`TENSORS`]; older checkpoints have none.
    #[serde(default)]
    tensors_crc32: Option<u32>,
}

/// Weights of a checkpoint that engines load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ServedWeights {
    /// Those of the last step.
    #[default]
    Last,
    /// Their moving average.
    Averaged,
}

impl Position {
    /// Steps that moved the parameters, which are those that the optimizer counted.
    fn optimizer_steps(&self) -> i64 {
        self.step.saturating_sub(self.bad_steps + self.empty_steps) as i64
    }
}

impl ServedWeights {
    pub(crate) fn of(ema_decay: Option<f64>) -> Self {
        if ema_decay.is_some() { Self::Averaged } else { Self::Last }
    }
}

fn adamw() -> String {
    Algorithm::AdamW.name().to_string()
}

/// Complete checkpoints of a save path: (step, directory), ascending.
///
/// # Errors
/// An unreadable directory.
pub fn steps_in(save_path: &Path) -> Result<Vec<(u64, PathBuf)>, Error> {
    let entries = match std::fs::read_dir(save_path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(dflash_files::Error::io("read", save_path))?,
    };
    let mut steps = Vec::new();
    for entry in entries {
        let path = entry.map_err(dflash_files::Error::io("read", save_path))?.path();
        let step = step_of(&path).filter(|_| path.join("config.json").is_file());
        if let Some(step) = step {
            steps.push((step, path));
        }
    }
    steps.sort();
    Ok(steps)
}

/// The checkpoint that a run in `save_path` would go on from.
///
/// # Errors
/// An unreadable directory, or a newer one that is not complete: since a checkpoint gets its name
/// when it is whole, someone took something away, and should know what the run goes back to.
pub(crate) fn to_resume(save_path: &Path) -> Result<Option<(u64, PathBuf)>, Error> {
    let latest = steps_in(save_path)?.pop();
    let complete = latest.as_ref().map(|(step, _)| *step);
    let newest = match std::fs::read_dir(save_path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(latest),
        entries => entries
            .map_err(dflash_files::Error::io("read", save_path))?
            .filter_map(|entry| {
                let path = entry.ok()?.path();
                Some((step_of(&path)?, path))
            })
            .filter(|(step, path)| *path == step_dir(save_path, *step))
            // another run may be writing: only what lacks something now is damaged
            .filter(|(_, path)| !path.join("config.json").is_file())
            .max(),
    };
    match newest {
        Some((step, path)) if Some(step) > complete => {
            let missing =
                dflash_model::Error::MissingFile { dir: path.clone(), file: "config.json".into() };
            Err(damaged(&path, step, missing.into()))
        }
        _ => Ok(latest),
    }
}

/// The step of a path named as a checkpoint.
fn step_of(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()
}

/// Directory of a step's checkpoint.
pub(crate) fn step_dir(save_path: &Path, step: u64) -> PathBuf {
    save_path.join(format!("step-{step:06}"))
}

/// Writes the checkpoint of `position`, unless it is there already. All ranks bring their share of
/// the state; rank 0 writes.
pub(crate) fn save(
    trainer: &Trainer,
    position: &Position,
    save_path: &Path,
    communicator: &dyn Communicator,
) -> Result<PathBuf, Error> {
    let destination = step_dir(save_path, position.step);
    let Some(collected) = trainer.masters.collect(communicator)? else { return Ok(destination) };
    if destination.join("config.json").is_file() {
        return Ok(destination);
    }
    let pending = PendingDir::create(&destination)?;
    let dir = pending.path();
    let served = Draft::new(trainer.draft.config().clone(), collected.served().shallow_clone());
    served.save(dir)?;
    if let Some(vocabulary) = &trainer.batches.blocks.vocabulary {
        vocabulary.save(dir)?;
    }
    std::fs::create_dir(dir.join("trainer")).map_err(dflash_files::Error::io("create", dir))?;
    let tensors = dir.join(TENSORS);
    write_safetensors(&tensors, &collected.tensors)?;
    let tensors_crc32 = Some(TensorFile::open(&tensors)?.crc32()?);
    let state = State { position: position.clone(), tensors_crc32 };
    let state = serde_json::to_vec_pretty(&state).expect("a position prints");
    dflash_files::write_bytes(&dir.join(STATE), &state)?;
    pending.commit()?;
    Ok(destination)
}

/// Puts the checkpoint of `step` in `dir` into `trainer`, whatever ranks wrote it. Returns where its
/// run stood; `current` is where this run would begin, with its settings.
///
/// # Errors
/// A checkpoint that other settings made, or that is damaged.
pub(crate) fn resume(
    trainer: &mut Trainer,
    (step, dir): (u64, &Path),
    current: &Position,
) -> Result<Position, Error> {
    restore(trainer, (step, dir), current).map_err(|error| match error {
        mismatch @ Error::ResumeMismatch { .. } => mismatch,
        error => damaged(dir, step, error),
    })
}

fn restore(
    trainer: &mut Trainer,
    (step, dir): (u64, &Path),
    current: &Position,
) -> Result<Position, Error> {
    let state = load_state(dir)?;
    let stored = &state.position;
    check_resumable(dir, stored, current)?;
    check_same_draft(dir, trainer.draft.config())?;
    check_same_vocabulary(dir, trainer.batches.blocks.vocabulary.as_ref())?;
    let path = dir.join(TENSORS);
    let file = TensorFile::open(&path)?;
    let differs = |expected: u32| file.crc32().map(|found| found != expected);
    if stored.step != step || state.tensors_crc32.map(differs).transpose()?.unwrap_or(false) {
        return Err(Error::Altered { path });
    }
    trainer.masters.restore(&trainer.draft, &file, stored.optimizer_steps())?;
    Ok(state.position)
}

fn load_state(dir: &Path) -> Result<State, Error> {
    let path = dir.join(STATE);
    let bytes = std::fs::read(&path).map_err(dflash_files::Error::io("read", &path))?;
    serde_json::from_slice(&bytes).map_err(|source| Error::State { path, source })
}

/// Says what to do about a checkpoint that does not load.
fn damaged(dir: &Path, step: u64, error: Error) -> Error {
    let steps = dir.parent().and_then(|save_path| steps_in(save_path).ok()).unwrap_or_default();
    let before = steps.iter().map(|(other, _)| *other).rfind(|&other| other < step);
    Error::DamagedCheckpoint { path: dir.into(), before, source: Box::new(error) }
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
mod tests {
    use super::*;

    #[test]
    fn an_older_checkpoint_was_adamw_s_and_serves_its_last_weights() {
        let older = r#"{"step": 7, "rows": 14, "bad_steps": 2, "skipped": 0, "tokens": 9,
                        "dataset": "d", "seed": 1, "total_seq_len": 64}"#;
        let position: Position = serde_json::from_str(older).unwrap();
        assert_eq!((position.optimizer.as_str(), position.ema_decay), ("adamw", None));
        assert_eq!(position.served_weights, ServedWeights::Last);
        assert_eq!(position.optimizer_steps(), 5, "two steps moved nothing");
    }
}
