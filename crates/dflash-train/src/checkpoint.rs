//! Checkpoints: a draft that can be served as it stands, and beside it all that a resumed run
//! needs, whatever its world size.
//!
//! `step-000123/` holds config.json and model.safetensors in z-lab's layout, and `trainer/` the
//! float32 masters, the optimizer's moments and the position. It is written under another name,
//! fsynced and renamed, so a directory of that name is always complete.

use std::path::{Path, PathBuf};

use dflash_files::PendingDir;
use dflash_model::checkpoint::{TensorFile, write_safetensors};
use dflash_model::draft::DraftConfig;
use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use crate::Error;
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

/// Writes the checkpoint of `position`, unless it is there already.
pub(crate) fn save(
    trainer: &Trainer,
    position: &Position,
    save_path: &Path,
) -> Result<PathBuf, Error> {
    let destination = step_dir(save_path, position.step);
    if destination.join("config.json").is_file() {
        return Ok(destination);
    }
    let pending = PendingDir::create(&destination)?;
    let dir = pending.path();
    let served = dflash_model::draft::Draft::new(
        trainer.draft.config().clone(),
        trainer.masters.shallow_clone(),
    );
    served.save(dir)?;
    if let Some(vocabulary) = &trainer.batches.vocabulary {
        vocabulary.save(dir)?;
    }
    std::fs::create_dir(dir.join("trainer")).map_err(dflash_files::Error::io("create", dir))?;
    write_safetensors(&dir.join(TENSORS), &state_tensors(trainer))?;
    let state = serde_json::to_vec_pretty(position).expect("a position prints");
    dflash_files::write_bytes(&dir.join(STATE), &state)?;
    pending.commit()?;
    Ok(destination)
}

fn state_tensors(trainer: &Trainer) -> Vec<(String, Tensor)> {
    [
        (MASTERS, &trainer.masters),
        ("mean", &trainer.optimizer.mean),
        ("variance", &trainer.optimizer.variance),
    ]
    .into_iter()
    .map(|(name, tensor)| (name.to_string(), tensor.to_device(Device::Cpu).contiguous()))
    .collect()
}

/// Reads where the run of a checkpoint stood.
pub(crate) fn load_position(dir: &Path) -> Result<Position, Error> {
    let path = dir.join(STATE);
    let bytes = std::fs::read(&path).map_err(dflash_files::Error::io("read", &path))?;
    serde_json::from_slice(&bytes).map_err(|source| Error::State { path, source })
}

/// Puts a checkpoint's parameters and moments into `trainer`.
pub(crate) fn restore(trainer: &mut Trainer, dir: &Path, step: u64) -> Result<(), Error> {
    let file = TensorFile::open(&dir.join(TENSORS))?;
    let shape = trainer.masters.size();
    let read = |name: &str| file.tensor(name, &shape);
    trainer.masters.copy_(&read(MASTERS)?);
    trainer.optimizer.mean.copy_(&read("mean")?);
    trainer.optimizer.variance.copy_(&read("variance")?);
    trainer.optimizer.steps = step as i64;
    if trainer.draft.flat().kind() != trainer.masters.kind() {
        trainer.draft.flat().shallow_clone().copy_(&trainer.masters);
    }
    Ok(())
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
    let found = DraftConfig::load(dir)?;
    mismatch("a draft like", format!("{found:?}"), format!("{draft:?}"))
}
