//! A run's files, read with patience: the run may be in progress, and a line may be half written.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::Error;

/// Lines of one kind by their step; of several with one step the last.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    /// Whether the file is there.
    pub(crate) present: bool,
    pub(crate) by_step: BTreeMap<u64, Value>,
    /// Lines that are no JSON object with a step.
    pub(crate) broken: usize,
    /// Lines that a later one with the same step replaced.
    pub(crate) replaced: usize,
}

/// A finished checkpoint.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Checkpoint {
    pub(crate) name: String,
    /// Bytes of its files, the trainer's state included.
    pub(crate) bytes: u64,
}

/// Everything that a run left.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) dir: PathBuf,
    pub(crate) metrics: Lines,
    pub(crate) validation: Lines,
    /// run.json, if it is there and parses.
    pub(crate) provenance: Option<Value>,
    pub(crate) checkpoints: Vec<Checkpoint>,
}

impl Run {
    pub(crate) fn read(dir: &Path) -> Result<Self, Error> {
        let metrics = Lines::read(&dir.join("metrics.jsonl"))?;
        let provenance = text(&dir.join("run.json"))?;
        if !metrics.present && provenance.is_none() {
            return Err(Error::NoRun { path: dir.into() });
        }
        Ok(Self {
            dir: dir.into(),
            metrics,
            validation: Lines::read(&dir.join("validation.jsonl"))?,
            provenance: provenance.and_then(|text| serde_json::from_str(&text).ok()),
            checkpoints: checkpoints(dir)?,
        })
    }
}

impl Lines {
    fn read(path: &Path) -> Result<Self, Error> {
        let Some(text) = text(path)? else { return Ok(Self::default()) };
        let mut lines = Self { present: true, ..Self::default() };
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            let value: Option<Value> = serde_json::from_str(line).ok();
            match value.and_then(|value| Some((value["step"].as_u64()?, value))) {
                None => lines.broken += 1,
                Some((step, value)) => {
                    let earlier = lines.by_step.insert(step, value);
                    lines.replaced += usize::from(earlier.is_some());
                }
            }
        }
        Ok(lines)
    }

    /// (step, value) of every line that has a number under `key`.
    pub(crate) fn series(&self, key: &str) -> Vec<(f64, f64)> {
        self.points(|line| line[key].as_f64())
    }

    /// (step, what `of` finds in the line).
    pub(crate) fn points(&self, of: impl Fn(&Value) -> Option<f64>) -> Vec<(f64, f64)> {
        let point = |(&step, line): (&u64, &Value)| Some((step as f64, of(line)?));
        self.by_step.iter().filter_map(point).filter(|(_, value)| value.is_finite()).collect()
    }

    pub(crate) fn last(&self) -> Option<&Value> {
        self.by_step.values().next_back()
    }
}

/// A file's text with what is no UTF-8 replaced; `None` when there is no such file.
fn text(path: &Path) -> Result<Option<String>, Error> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(dflash_files::Error::io("read", path)(error).into()),
    }
}

fn checkpoints(dir: &Path) -> Result<Vec<Checkpoint>, Error> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(dflash_files::Error::io("read", dir))? {
        let path = entry.map_err(dflash_files::Error::io("read", dir))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_step =
            name.strip_prefix("step-").is_some_and(|digits| digits.parse::<u64>().is_ok());
        if is_step && path.join("config.json").is_file() {
            found.push(Checkpoint { name, bytes: bytes_below(&path) });
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// A checkpoint that is being removed meanwhile counts what is left of it.
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
