//! A run's files. The run may be in progress, and a line incomplete.

use std::path::{Path, PathBuf};

use dflash_run::{
    Best, Checkpoint, Evaluation, Lines, MetricLine, Provenance, RunDir, ValidationLine,
};

use crate::Error;

#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) dir: PathBuf,
    pub(crate) metrics: Lines<MetricLine>,
    pub(crate) validation: Lines<ValidationLine>,
    /// run.json, if it is there and parses.
    pub(crate) provenance: Option<Provenance>,
    pub(crate) saved: Vec<Saved>,
    /// The best step, if there was a validation and its record can be read.
    pub(crate) best: Option<Best>,
    /// Whether its process is alive, if that can be told.
    pub(crate) is_alive: Option<bool>,
}

/// A checkpoint and what is recorded of it.
#[derive(Debug)]
pub(crate) struct Saved {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) bytes: u64,
    pub(crate) is_diverged: bool,
    pub(crate) evaluations: Vec<Evaluation>,
}

impl Run {
    /// # Errors
    /// A directory that is not a run's, or files that cannot be read.
    pub(crate) fn read(dir: &Path) -> Result<Self, Error> {
        let run = Self::read_so_far(dir)?;
        if !run.metrics.present && !RunDir::at(dir).has_provenance() {
            return Err(Error::NoRun { path: dir.into() });
        }
        Ok(run)
    }

    /// The same of a run that may not have begun.
    ///
    /// # Errors
    /// Files that cannot be read.
    pub(crate) fn read_so_far(dir: &Path) -> Result<Self, Error> {
        let run = RunDir::at(dir);
        let is_alive = run.is_alive();
        let mut read = Self {
            dir: dir.into(),
            metrics: run.lines()?,
            validation: run.lines()?,
            provenance: run.provenance()?,
            saved: run.checkpoints()?.into_iter().map(Saved::of).collect(),
            best: run.best().ok().flatten(),
            is_alive,
        };
        if is_alive == Some(true) {
            // The last line is on its way.
            read.metrics.broken -= usize::from(read.metrics.is_torn);
            read.validation.broken -= usize::from(read.validation.is_torn);
        }
        Ok(read)
    }

    /// The last line's number of steps, if it is recorded.
    pub(crate) fn total_steps(&self) -> Option<u64> {
        self.metrics.last()?.total_steps
    }

    /// Slots of a block, the anchor's included: the most tokens that a step can yield.
    pub(crate) fn block_size(&self) -> Option<u64> {
        let config = &self.provenance.as_ref()?.config;
        config["draft"]["block_size"].as_u64().or_else(|| config["block_size"].as_u64())
    }

    /// Seconds of training over all starts: `elapsed_s` begins at 0 with each.
    pub(crate) fn seconds(&self) -> Option<f64> {
        let mut sum = 0.0;
        let mut last: Option<f64> = None;
        for elapsed in self.metrics.by_step.values().filter_map(|line| line.elapsed_s) {
            if let Some(before) = last.filter(|before| *before > elapsed) {
                sum += before;
            }
            last = Some(elapsed);
        }
        last.map(|last| sum + last)
    }
}

impl Saved {
    fn of(checkpoint: Checkpoint) -> Self {
        Self {
            bytes: checkpoint.bytes(),
            is_diverged: checkpoint.is_diverged(),
            evaluations: checkpoint.evaluations().unwrap_or_default(),
            checkpoint,
        }
    }
}
