//! The position of a run: `trainer/state.json` in each checkpoint.

use std::collections::BTreeMap;
use std::path::Path;

use dflash_identity::TargetIdentity;
use serde::{Deserialize, Serialize};

use crate::{Checkpoint, Error};

/// How far a run has come. Fields that earlier releases did not write have defaults.
#[expect(missing_docs, reason = "FILES.md describes every key")]
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Position {
    pub step: u64,
    pub rows: u64,
    pub bad_steps: u64,
    #[serde(default)]
    pub bad_in_a_row: u64,
    #[serde(default)]
    pub empty_steps: u64,
    #[serde(alias = "skipped")]
    pub skipped_samples: u64,
    pub tokens: u64,
    #[serde(default)]
    pub samples: u64,
    #[serde(default)]
    pub anchors: u64,
    pub dataset: String,
    /// `None` in runs of releases that did not digest the tokens.
    #[serde(default)]
    pub dataset_content: Option<String>,
    /// `None` in runs of releases that did not compare targets.
    #[serde(default)]
    pub target: Option<TargetIdentity>,
    pub seed: u64,
    pub total_seq_len: usize,
    /// `None` in runs from before validation existed, which train on all samples.
    #[serde(default)]
    pub trained_samples: Option<usize>,
    #[serde(default = "adamw")]
    pub optimizer: String,
    #[serde(default)]
    pub ema_decay: Option<f64>,
    #[serde(default)]
    pub served_weights: ServedWeights,
    #[serde(default)]
    pub schedule: Option<SchedulePosition>,
    #[serde(default)]
    pub first_loss: Option<f64>,
    /// `None` in runs of releases that did not record it.
    #[serde(default)]
    pub highest_loss: Option<f64>,
    /// Empty in runs of releases that did not record them.
    #[serde(default)]
    pub recent_losses: Vec<f64>,
    /// Sum of the learning rates of the steps since this was first recorded.
    #[serde(default)]
    pub lr_sum: f64,
    /// Such a state is only resumed if its step is requested explicitly.
    #[serde(default)]
    pub diverged: bool,
    /// The settings that affect the result ([`crate::recorded`]); empty in earlier releases' runs.
    #[serde(default)]
    pub settings: BTreeMap<String, String>,
}

/// The position of a learning-rate schedule, which is laid out over `planned` steps and stretched
/// if the run's length changes: step `since` was at `at`, and the last one, `total`, will be at the
/// end.
#[expect(missing_docs, reason = "FILES.md describes every key")]
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SchedulePosition {
    pub planned: u64,
    pub total: u64,
    pub since: u64,
    pub at: f64,
}

/// Which weights engines load from a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ServedWeights {
    /// Those of the last step.
    #[default]
    Last,
    /// Their moving average.
    Averaged,
}

/// Contents of `trainer/state.json`: how far the run had come.
#[expect(missing_docs, reason = "FILES.md describes every key")]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    #[serde(flatten)]
    pub position: Position,
    /// Older checkpoints have none.
    #[serde(default)]
    pub tensors_crc32: Option<u32>,
}

impl Position {
    /// Steps that updated the parameters, which are those that the optimizer counted.
    pub fn optimizer_steps(&self) -> i64 {
        self.step.saturating_sub(self.bad_steps + self.empty_steps) as i64
    }
}

impl ServedWeights {
    /// The weights that a run with or without averaging serves.
    pub fn of(ema_decay: Option<f64>) -> Self {
        if ema_decay.is_some() { Self::Averaged } else { Self::Last }
    }
}

impl State {
    /// Reads the state of the checkpoint in `dir`.
    pub fn load(dir: &Path) -> Result<Self, Error> {
        let path = dir.join(Checkpoint::STATE);
        let bytes = std::fs::read(&path).map_err(dflash_io::Error::io("read", &path))?;
        serde_json::from_slice(&bytes).map_err(|source| Error::Json { path, source })
    }

    /// Writes the state into the checkpoint in `dir`, whose folder exists already.
    pub fn save(&self, dir: &Path) -> Result<(), Error> {
        let state = serde_json::to_vec_pretty(self).expect("a position prints");
        Ok(dflash_io::write_bytes(&dir.join(Checkpoint::STATE), &state)?)
    }
}

fn adamw() -> String {
    "adamw".to_owned()
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
