//! The checkpoints of a run: `step-000123/`, complete as soon as it has that name.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::directory::names;
use crate::{Error, State, ValidationLine};

/// The prefix of every checkpoint's name.
pub(crate) const PREFIX: &str = "step-";
/// The file that engines read first; a checkpoint without it is incomplete.
const CONFIG: &str = "config.json";

/// A directory named as a step's checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Checkpoint {
    /// Optimizer steps taken.
    pub step: u64,
    /// Its directory.
    pub dir: PathBuf,
}

/// Content of `best.json`: the step whose validation was best.
#[expect(missing_docs, reason = "docs/formats.md describes every key")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Best {
    pub step: u64,
    #[serde(default, alias = "tau_per_step")]
    pub acceptance_length: Option<f64>,
    #[serde(default)]
    pub expected_acceptance_length: Option<f64>,
}

impl Best {
    /// The result of a validation: of real decoding if there was any, else on held-out rows.
    pub(crate) fn of(line: &ValidationLine) -> Option<Self> {
        let measured = line.prompts.as_ref().map(|prompts| prompts.figures.acceptance_length);
        let rows = line.rows.as_ref().and_then(|rows| rows.figures.expected_acceptance_length);
        let expected = if measured.is_some() { None } else { rows };
        let best = Self {
            step: line.step,
            acceptance_length: measured.filter(|length| length.is_finite()),
            expected_acceptance_length: expected.filter(|length| length.is_finite()),
        };
        best.quantity().map(|_| best)
    }

    /// The metric that makes it the best, and its value.
    pub fn quantity(&self) -> Option<(&'static str, f64)> {
        let measured = self.acceptance_length.map(|length| ("acceptance length", length));
        let expected = self.expected_acceptance_length;
        measured.or(expected.map(|length| ("expected acceptance length", length)))
    }

    /// Whether it is better than `other`. Measured acceptance takes precedence over expected.
    pub(crate) fn beats(&self, other: &Self) -> bool {
        match (self.acceptance_length, other.acceptance_length) {
            (Some(own), Some(others)) => own > others,
            (Some(_), None) => true,
            (None, Some(_)) => false,
            (None, None) => self.expected_acceptance_length > other.expected_acceptance_length,
        }
    }
}

impl Checkpoint {
    /// The folder with the state for `--resume`.
    pub const TRAINER: &str = "trainer";
    /// The run's position.
    pub const STATE: &str = "trainer/state.json";
    /// The float32 state.
    pub const TENSORS: &str = "trainer/state.safetensors";

    /// The checkpoint of `step` in a run's directory, whether or not it exists.
    pub fn at(run: &Path, step: u64) -> Self {
        Self { step, dir: run.join(format!("{PREFIX}{step:06}")) }
    }

    /// Whether it has the file that engines load first, which every checkpoint has.
    pub fn is_complete(&self) -> bool {
        self.dir.join(CONFIG).is_file()
    }

    /// Whether it is marked as that of a diverged run; false if its state cannot be read.
    pub fn is_diverged(&self) -> bool {
        State::load(&self.dir).is_ok_and(|state| state.position.diverged)
    }

    /// Marks it as a state of a run that had diverged.
    pub fn mark_diverged(&self) -> Result<(), Error> {
        let mut state = State::load(&self.dir)?;
        state.position.diverged = true;
        state.save(&self.dir)
    }

    /// Bytes of its files, including the trainer's state, as far as they can be read.
    pub fn bytes(&self) -> u64 {
        bytes_below(&self.dir)
    }

    /// The error for this checkpoint, which does not load because of `source`, with the remedy.
    pub fn damaged(self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
        let others = self.dir.parent().and_then(|run| named(run).ok()).unwrap_or_default();
        let before = others.iter().rfind(|other| other.is_complete() && other.step < self.step);
        let before = before.map(|checkpoint| checkpoint.step);
        Error::DamagedCheckpoint { path: self.dir, before, source: source.into() }
    }

    /// Whether a run gave it this name: `step-7` has a different origin.
    pub(crate) fn has_our_name(&self) -> bool {
        self.dir.parent().is_some_and(|run| Self::at(run, self.step) == *self)
    }
}

/// The checkpoint to resume from: the newest that is not of a run that had diverged.
///
/// # Errors
/// An unreadable directory, only checkpoints of a diverged run, or a newer checkpoint that is not
/// complete: it got its name when it was complete, so someone removed a file, and should know how
/// far back the run would go.
pub(crate) fn to_resume(run: &Path) -> Result<Option<Checkpoint>, Error> {
    let mut complete = named(run)?;
    complete.retain(Checkpoint::is_complete);
    let latest = complete.iter().rfind(|checkpoint| !checkpoint.is_diverged()).cloned();
    if let (None, Some(last)) = (&latest, complete.last()) {
        return Err(Error::OnlyDiverged { path: run.into(), step: last.step });
    }
    // Another run may be writing: report a checkpoint as damaged only if it still lacks a file now.
    let torn = named(run)?.into_iter().rfind(|other| other.has_our_name() && !other.is_complete());
    match torn {
        Some(torn) if latest.as_ref().is_none_or(|latest| latest.step < torn.step) => {
            let missing = Error::Missing { path: torn.dir.join(CONFIG) };
            Err(torn.damaged(missing))
        }
        _ => Ok(latest),
    }
}

/// The entries of `run` that are named as checkpoints, ascending.
pub(crate) fn named(run: &Path) -> Result<Vec<Checkpoint>, Error> {
    let checkpoint = |name: String| {
        let step = name.strip_prefix(PREFIX)?.parse().ok()?;
        Some(Checkpoint { step, dir: run.join(name) })
    };
    let mut found: Vec<Checkpoint> = names(run)?.into_iter().filter_map(checkpoint).collect();
    found.sort();
    Ok(found)
}

fn bytes_below(dir: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else { return 0 };
    entries
        .filter_map(Result::ok)
        .map(|entry| match entry.metadata() {
            Ok(facts) if facts.is_dir() => bytes_below(&entry.path()),
            Ok(facts) => facts.len(),
            Err(_) => 0,
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RunDir;

    fn with(names: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for name in names {
            std::fs::create_dir_all(dir.path().join(name).join("trainer")).unwrap();
            std::fs::write(dir.path().join(name).join(CONFIG), "{}").unwrap();
        }
        dir
    }

    #[test]
    fn a_run_goes_on_from_its_newest_checkpoint() {
        let dir = with(&["step-000002", "step-000010", "step-000009.tmp", "steps"]);
        let steps = |found: Vec<Checkpoint>| found.iter().map(|it| it.step).collect::<Vec<_>>();
        assert_eq!(steps(RunDir::at(dir.path()).checkpoints().unwrap()), [2, 10]);
        assert_eq!(to_resume(dir.path()).unwrap().unwrap().step, 10);
        assert!(to_resume(&dir.path().join("absent")).unwrap().is_none());
        assert_eq!(Checkpoint::at(dir.path(), 10).bytes(), 2);
    }

    #[test]
    fn a_newer_one_without_its_config_is_named_with_the_one_before() {
        let dir = with(&["step-000002", "step-000010"]);
        std::fs::create_dir(dir.path().join("step-12")).unwrap();
        assert_eq!(to_resume(dir.path()).unwrap().unwrap().step, 10, "a name that is not ours");
        std::fs::remove_file(dir.path().join("step-000010").join(CONFIG)).unwrap();
        let error = to_resume(dir.path()).unwrap_err().to_string();
        assert!(error.contains("step-000010, which is damaged"), "{error}");
        assert!(error.ends_with("to continue from step 2"), "{error}");
        std::fs::remove_dir_all(dir.path().join("step-000002")).unwrap();
        let error = to_resume(dir.path()).unwrap_err().to_string();
        assert!(error.ends_with("to continue from the start"), "{error}");
    }
}
