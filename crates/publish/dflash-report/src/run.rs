//! A run's files. The run may be in progress, and a line incomplete.

use std::path::{Path, PathBuf};

use dflash_run::{Checkpoint, Lines, MetricLine, Provenance, RunDir, ValidationLine};

use crate::Error;

#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) dir: PathBuf,
    pub(crate) metrics: Lines<MetricLine>,
    pub(crate) validation: Lines<ValidationLine>,
    /// run.json, if it is there and parses.
    pub(crate) provenance: Option<Provenance>,
    pub(crate) checkpoints: Vec<Checkpoint>,
}

impl Run {
    pub(crate) fn read(dir: &Path) -> Result<Self, Error> {
        let run = RunDir::at(dir);
        let metrics = run.lines::<MetricLine>()?;
        if !metrics.present && !run.has_provenance() {
            return Err(Error::NoRun { path: dir.into() });
        }
        Ok(Self {
            dir: dir.into(),
            metrics,
            validation: run.lines()?,
            provenance: run.provenance()?,
            checkpoints: run.checkpoints()?,
        })
    }
}
