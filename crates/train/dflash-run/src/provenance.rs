//! `run.json`: the program, settings and starts of a run.

use std::collections::BTreeMap;

use dflash_identity::TargetIdentity;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Contents of `run.json`: the last start, and what is recorded of earlier ones.
#[expect(missing_docs, reason = "FILES.md describes every key")]
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Provenance {
    pub dflash: Option<String>,
    pub libtorch: Option<String>,
    pub world_size: Option<usize>,
    pub resumed_at_step: u64,
    pub earlier_starts: Vec<Start>,
    pub dataset: Option<String>,
    pub data: Option<Value>,
    pub target: Option<TargetIdentity>,
    pub source_checks: Vec<SourceCheck>,
    pub settings: BTreeMap<String, String>,
    pub config: Value,
}

/// The result of checking a source of hidden states before the first step.
#[expect(missing_docs, reason = "FILES.md describes every key")]
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SourceCheck {
    pub origin: String,
    pub requests: u32,
    pub tokens: usize,
    pub states_are_normed: bool,
    pub log_probabilities: Option<Agreement>,
    pub loss: Option<f64>,
    pub says_layers: bool,
    pub proved_layer_ids: Vec<u32>,
    pub trusted_layer_ids: Vec<u32>,
}

/// How close the log-probabilities that a source reports are to those computed from its last
/// states, nats.
#[expect(missing_docs, reason = "FILES.md describes every key")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Agreement {
    pub compared: usize,
    pub root_mean_square: f64,
    pub largest: f64,
    pub bound: f64,
}

/// An earlier start of the run.
#[expect(missing_docs, reason = "FILES.md describes every key")]
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Start {
    pub dflash: Option<String>,
    pub world_size: Option<usize>,
    pub resumed_at_step: u64,
    pub command: Option<Vec<String>>,
}

impl Provenance {
    /// The command line of the last start.
    pub fn command(&self) -> Option<Vec<String>> {
        Vec::deserialize(&self.config["command"]).ok()
    }

    /// Steps at which the run was resumed, ascending.
    pub fn resumes(&self) -> Vec<u64> {
        let earlier = self.earlier_starts.iter().map(|start| start.resumed_at_step);
        earlier.chain([self.resumed_at_step]).filter(|&step| step > 0).collect()
    }

    /// All starts, oldest first.
    pub(crate) fn into_starts(self) -> Vec<Start> {
        let command = self.command();
        let Self { dflash, world_size, resumed_at_step, earlier_starts, .. } = self;
        let last = Start { dflash, world_size, resumed_at_step, command };
        earlier_starts.into_iter().chain([last]).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::RunDir;

    #[test]
    fn starts_are_kept_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let run = RunDir::at(dir.path());
        let start = |step: u64, word: &str| Provenance {
            resumed_at_step: step,
            config: json!({"command": [word], "lr": 0.1}),
            ..Provenance::default()
        };
        let commands = || {
            let starts = run.provenance().unwrap().unwrap().earlier_starts;
            starts.into_iter().filter_map(|start| start.command).flatten().collect::<Vec<_>>()
        };
        run.record(start(0, "a")).unwrap();
        assert!(commands().is_empty());
        run.record(start(7, "b")).unwrap();
        run.record(start(9, "c")).unwrap();
        assert_eq!(commands(), ["a", "b"]);
        let last = run.provenance().unwrap().unwrap();
        assert_eq!((last.command(), last.resumes()), (Some(vec!["c".to_owned()]), vec![7, 9]));
        std::fs::write(dir.path().join(RunDir::PROVENANCE), "{broken").unwrap();
        assert_eq!(run.provenance().unwrap(), None);
        run.record(start(12, "d")).unwrap();
        assert!(commands().is_empty(), "broken records say nothing");
        run.record(start(0, "e")).unwrap();
        assert!(commands().is_empty(), "a new run has no past");
    }
}
