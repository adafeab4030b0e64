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
    /// Steps that moved the parameters: one whose gradient was not finite did not, and the
    /// optimizer did not count it.
    fn optimizer_steps(&self) -> i64 {
        self.step.saturating_sub(self.bad_steps) as i64
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
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let step = name.strip_prefix("step-").and_then(|digits| digits.parse().ok());
        if let Some(step) = step.filter(|_| path.join("config.json").is_file()) {
            steps.push((step, path));
        }
    }
    steps.sort();
    Ok(steps)
}

/// The last complete checkpoint of a save path.
///
/// # Errors
/// An unreadable directory.
pub fn latest_checkpoint(save_path: &Path) -> Result<Option<(u64, PathBuf)>, Error> {
    Ok(steps_in(save_path)?.pop())
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
    if let Some(vocabulary) = &trainer.batches.vocabulary {
        vocabulary.save(dir)?;
    }
    std::fs::create_dir(dir.join("trainer")).map_err(dflash_files::Error::io("create", dir))?;
    write_safetensors(&dir.join(TENSORS), &collected.tensors)?;
    let state = serde_json::to_vec_pretty(position).expect("a position prints");
    dflash_files::write_bytes(&dir.join(STATE), &state)?;
    pending.commit()?;
    Ok(destination)
}

/// Reads where the run of a checkpoint stood.
pub(crate) fn load_position(dir: &Path) -> Result<Position, Error> {
    let path = dir.join(STATE);
    let bytes = std::fs::read(&path).map_err(dflash_files::Error::io("read", &path))?;
    serde_json::from_slice(&bytes).map_err(|source| Error::State { path, source })
}

/// Puts a checkpoint's parameters and moments into `trainer`, whatever ranks wrote it.
pub(crate) fn restore(trainer: &mut Trainer, dir: &Path, position: &Position) -> Result<(), Error> {
    let file = TensorFile::open(&dir.join(TENSORS))?;
    trainer.masters.restore(&trainer.draft, &file, position.optimizer_steps())
}

/// Refuses to resume a checkpoint that other settings made.
pub(crate) fn check_resumable(
    dir: &Path,
    stored: &Position,
    current: &Position,
    draft: &DraftConfig,
) -> Result<(), Error> {
    let mismatch = |key: &'static str, found: String, expected: String| {
        if found == expected {
            return Ok(());
        }
        Err(Error::ResumeMismatch { path: dir.into(), key, found, expected })
    };
    mismatch("dataset", stored.dataset.clone(), current.dataset.clone())?;
    mismatch("--seed", stored.seed.to_string(), current.seed.to_string())?;
    let (found, expected) = (stored.total_seq_len, current.total_seq_len);
    mismatch("--total-seq-len", found.to_string(), expected.to_string())?;
    if stored.trained_samples.is_some() {
        let text = |samples: Option<usize>| samples.unwrap_or_default().to_string();
        let key = "--validation-ratio leaving so many samples:";
        mismatch(key, text(stored.trained_samples), text(current.trained_samples))?;
    }
    mismatch("--optimizer", stored.optimizer.clone(), current.optimizer.clone())?;
    let ema = |decay: Option<f64>| decay.map_or("off".to_string(), |decay| decay.to_string());
    mismatch("--ema-decay", ema(stored.ema_decay), ema(current.ema_decay))?;
    let found = DraftConfig::load(dir)?;
    mismatch("a draft like", format!("{found:?}"), format!("{draft:?}"))
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
