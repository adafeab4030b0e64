//! Writes a run's lines for experiment trackers.
//!
//! All of them are files in the run's directory, written during the run; nothing is sent.

use std::time::{SystemTime, UNIX_EPOCH};

use dflash_settings::Tracker;
use serde_json::Value;

use crate::events::Events;
use crate::mlflow::MlflowRun;
use crate::wandb::WandbRun;
use crate::{Error, Line, RunDir};

/// A line in the form for trackers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Entry {
    /// Optimizer steps taken.
    pub step: u64,
    /// Seconds since 1970.
    pub time: f64,
    /// Finite numbers by their tags.
    pub scalars: Vec<(String, f64)>,
}

/// Information about a run besides its lines.
#[derive(Clone, Debug, Default)]
pub struct RunAbout {
    /// Its name.
    pub name: String,
    /// Its settings.
    pub config: Value,
    /// The step from which this start continues.
    pub step: u64,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// All steps are done.
    Finished,
    /// It was told to stop.
    Stopped,
    /// It failed.
    Failed,
}

/// One tracker's files.
pub(crate) trait Track: std::fmt::Debug {
    fn add(&mut self, entry: &Entry) -> Result<(), Error>;

    fn close(&mut self, end: End) -> Result<(), Error>;
}

/// The files of all trackers of a run.
#[derive(Debug)]
pub struct Trackers(Vec<Box<dyn Track>>);

impl Entry {
    /// The numbers of a line written at `time`.
    pub fn of<T: Line>(line: &T, time: f64) -> Self {
        Self { step: line.step(), time, scalars: line.scalars() }
    }
}

impl Trackers {
    /// Begins or continues the files of `trackers` in the run's directory, whose path must be
    /// absolute for MLflow.
    ///
    /// # Errors
    /// I/O.
    pub fn open(run: &RunDir, trackers: &[Tracker], about: &RunAbout) -> Result<Self, Error> {
        let mut open: Vec<Box<dyn Track>> = Vec::new();
        for (index, tracker) in trackers.iter().enumerate() {
            match tracker {
                again if trackers[..index].contains(again) => {}
                Tracker::Tensorboard => open.push(Box::new(Events::create(run, about.step)?)),
                Tracker::Mlflow => open.push(Box::new(MlflowRun::open(run, about)?)),
                Tracker::Wandb => open.push(Box::new(WandbRun::create(run, about)?)),
                Tracker::None => {}
            }
        }
        Ok(Self(open))
    }

    /// Writes a line's numbers for all trackers.
    ///
    /// # Errors
    /// I/O.
    pub fn add(&mut self, entry: &Entry) -> Result<(), Error> {
        self.0.iter_mut().try_for_each(|tracker| tracker.add(entry))
    }

    /// Records how the run ended.
    ///
    /// # Errors
    /// I/O.
    pub fn close(&mut self, end: End) -> Result<(), Error> {
        self.0.iter_mut().try_for_each(|tracker| tracker.close(end))
    }
}

/// The settings flattened to one level of keys, without nulls: `objective.loss` for a nested
/// member.
pub(crate) fn flat(config: &Value) -> Vec<(String, String)> {
    let mut found = Vec::new();
    flatten(String::new(), config, &mut found);
    found
}

fn flatten(path: String, value: &Value, found: &mut Vec<(String, String)>) {
    let dot = if path.is_empty() { "" } else { "." };
    match value {
        Value::Object(members) => members
            .iter()
            .for_each(|(key, value)| flatten(format!("{path}{dot}{key}"), value, found)),
        Value::Null => {}
        Value::String(text) => found.push((path, text.clone())),
        other => found.push((path, other.to_string())),
    }
}

pub(crate) fn seconds_since_1970() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn settings_become_one_level() {
        let config = json!({"lr": 0.1, "loss": ["ce"], "draft": {"layers": 5}, "gamma": null});
        let expected = [("lr", "0.1"), ("loss", "[\"ce\"]"), ("draft.layers", "5")];
        let expected = expected.map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(flat(&config), expected);
    }
}
