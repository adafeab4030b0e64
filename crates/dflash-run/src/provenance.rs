//! `run.json`: what made a run, and what went on with it.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Content of `run.json`: the last start, and what is known of those before.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Provenance {
    /// Our version.
    pub dflash: Option<String>,
    /// libtorch's version.
    pub libtorch: Option<String>,
    /// Ranks.
    pub world_size: Option<usize>,
    /// Step of the checkpoint that the run went on from; 0 at its beginning.
    pub resumed_at_step: u64,
    /// The starts before this one, oldest first.
    pub earlier_starts: Vec<Start>,
    /// Content of the dataset.
    pub dataset: Option<String>,
    /// All settings, with the command line under `command`.
    pub config: Value,
}

/// A start of the run before the last.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Start {
    /// Our version.
    pub dflash: Option<String>,
    /// Ranks.
    pub world_size: Option<usize>,
    /// Step of the checkpoint that it went on from.
    pub resumed_at_step: u64,
    /// Its command line.
    pub command: Option<Vec<String>>,
}

impl Provenance {
    /// The command line of the last start.
    pub fn command(&self) -> Option<Vec<String>> {
        Vec::deserialize(&self.config["command"]).ok()
    }

    /// Steps at which the run went on, ascending.
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
        assert!(commands().is_empty(), "a run that begins anew has no past");
    }
}
