//! The directory itself: the names of its files, and reading them while a run may be writing.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use dflash_settings::ResumeMode;
use serde_json::Value;

use crate::checkpoints::{self, Best, Checkpoint};
use crate::lines::{Line, Lines};
use crate::provenance::Provenance;
use crate::save_path::{is_in_use, is_negligible};
use crate::{Error, served};

/// A run's directory, which may be absent, foreign, or in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunDir(PathBuf);

impl RunDir {
    /// Name of the settings and versions.
    pub const PROVENANCE: &str = "run.json";
    /// Name of the record of the best step.
    pub const BEST: &str = "best.json";
    /// Name of the directory of TensorBoard's files.
    pub const EVENTS: &str = "tensorboard";
    /// The untrained draft of a dry run: not a checkpoint of the run.
    pub const DRY_RUN: &str = "dry-run";

    /// The directory at `path`.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The lines of one kind; none if the file does not exist.
    pub fn lines<T: Line>(&self) -> Result<Lines<T>, Error> {
        Ok(Lines::parse(self.text(T::FILE)?.as_deref()))
    }

    /// Adds a line to its file.
    pub fn append<T: Line>(&self, line: &T) -> Result<(), Error> {
        let path = self.0.join(T::FILE);
        let text = serde_json::to_string(line).expect("a line prints") + "\n";
        let file = File::options().create(true).append(true).open(&path);
        let mut file = file.map_err(dflash_io::Error::io("open", &path))?;
        let written = file.write_all(text.as_bytes());
        let written = written.and_then(|()| if T::DURABLE { file.sync_all() } else { Ok(()) });
        Ok(written.map_err(dflash_io::Error::io("write", path))?)
    }

    /// Drops the lines of steps after `step`, which a resumed run will write again, and invalid
    /// lines.
    pub fn keep_until<T: Line>(&self, step: u64) -> Result<(), Error> {
        let Some(bytes) = self.read(T::FILE)? else { return Ok(()) };
        let lines = bytes.split(|&byte| byte == b'\n');
        let kept = lines.filter(|line| step_of(line).is_some_and(|stored| stored <= step));
        let kept: Vec<u8> = kept.flat_map(|line| [line, b"\n"].concat()).collect();
        Ok(dflash_io::write_bytes(&self.0.join(T::FILE), &kept)?)
    }

    /// How the run was made; `None` if run.json is missing or broken.
    pub fn provenance(&self) -> Result<Option<Provenance>, Error> {
        Ok(self.text(Self::PROVENANCE)?.and_then(|text| serde_json::from_str(&text).ok()))
    }

    /// Whether a run has left its records here.
    pub fn has_provenance(&self) -> bool {
        self.0.join(Self::PROVENANCE).is_file()
    }

    /// Records how the run was started. A resumed run keeps a list of earlier starts.
    pub fn record(&self, mut provenance: Provenance) -> Result<(), Error> {
        if provenance.resumed_at_step > 0 {
            // A run must not fail because of its own records: broken ones are ignored.
            let last = self.provenance().ok().flatten();
            provenance.earlier_starts = last.map_or_else(Vec::new, Provenance::into_starts);
        }
        let text = serde_json::to_vec_pretty(&provenance).expect("settings print");
        Ok(dflash_io::write_bytes(&self.0.join(Self::PROVENANCE), &text)?)
    }

    /// Complete checkpoints, ascending.
    pub fn checkpoints(&self) -> Result<Vec<Checkpoint>, Error> {
        let mut checkpoints = checkpoints::named(&self.0)?;
        checkpoints.retain(Checkpoint::is_complete);
        Ok(checkpoints)
    }

    /// The checkpoint that best.json names, if it is there.
    pub fn best_checkpoint(&self) -> Result<Option<Checkpoint>, Error> {
        let named = self.best()?.map(|best| Checkpoint::at(&self.0, best.step));
        Ok(named.filter(Checkpoint::is_complete))
    }

    /// The step whose validation was best, if there was one.
    pub fn best(&self) -> Result<Option<Best>, Error> {
        let Some(text) = self.text(Self::BEST)? else { return Ok(None) };
        let path = self.0.join(Self::BEST);
        serde_json::from_str(&text).map(Some).map_err(|source| Error::Json { path, source })
    }

    /// The checkpoint that a run starts from, if any: `None` requests a new run.
    ///
    /// # Errors
    /// A state that does not match `resume`: checkpoints of an earlier run, or none; files that no
    /// run wrote; a newest checkpoint that is damaged.
    pub fn start(&self, resume: Option<ResumeMode>) -> Result<Option<Checkpoint>, Error> {
        let path = || self.0.clone();
        match resume {
            Some(ResumeMode::Step(step)) => return self.checkpoint(step).map(Some),
            None => {
                if let Some(Checkpoint { step, .. }) = self.checkpoints()?.pop() {
                    return Err(Error::EarlierRun { path: path(), step });
                }
                // A new run must not write into the remains of a damaged checkpoint.
                checkpoints::to_resume(&self.0)?;
            }
            Some(ResumeMode::Latest | ResumeMode::Auto) => {
                if let Some(latest) = checkpoints::to_resume(&self.0)? {
                    return Ok(Some(latest));
                }
            }
        }
        // A run that ended before its first checkpoint leaves its provenance, and may start again.
        if !self.has_provenance() {
            let is_link = |name: &String| {
                served::LINKS.contains(&name.as_str()) && self.0.join(name).is_symlink()
            };
            let names = names(&self.0)?.into_iter();
            let is_ours =
                |name: &String| is_negligible(name) || is_link(name) || name == Self::DRY_RUN;
            let foreign = names.filter(|name| !is_ours(name)).min();
            if let Some(found) = foreign {
                return Err(Error::Foreign { path: path(), found });
            }
        }
        match resume {
            // It may be about to save its first checkpoint.
            Some(ResumeMode::Latest) if is_in_use(&self.0) => Err(Error::InUse { path: path() }),
            Some(ResumeMode::Latest) => Err(Error::NothingToResume { path: path() }),
            _ => Ok(None),
        }
    }

    /// The newest checkpoint that is not of a run that had diverged.
    ///
    /// # Errors
    /// A newer one that is damaged, or only diverged ones.
    pub fn latest(&self) -> Result<Option<Checkpoint>, Error> {
        checkpoints::to_resume(&self.0)
    }

    /// The complete checkpoint of `step`.
    fn checkpoint(&self, step: u64) -> Result<Checkpoint, Error> {
        let there = self.checkpoints()?;
        if let Some(found) = there.iter().find(|checkpoint| checkpoint.step == step) {
            return Ok(found.clone());
        }
        let there = there.into_iter().map(|checkpoint| checkpoint.step).collect();
        Err(Error::NoSuchStep { path: self.0.clone(), step, there })
    }

    /// A file's text with invalid UTF-8 replaced; `None` if there is no such file.
    fn text(&self, name: &str) -> Result<Option<String>, Error> {
        Ok(self.read(name)?.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
    }

    fn read(&self, name: &str) -> Result<Option<Vec<u8>>, Error> {
        let path = self.0.join(name);
        match std::fs::read(&path) {
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
            {
                Ok(None)
            }
            bytes => Ok(Some(bytes.map_err(dflash_io::Error::io("read", path))?)),
        }
    }
}

/// The step of a line whatever else it contains; `None` if a full disk truncated it.
fn step_of(line: &[u8]) -> Option<u64> {
    serde_json::from_slice::<Value>(line).ok()?["step"].as_u64()
}

/// The names in the directory `path`, if it exists.
pub(crate) fn names(path: &Path) -> Result<Vec<String>, Error> {
    let entries = match std::fs::read_dir(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(dflash_io::Error::io("read", path))?,
    };
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let names: std::io::Result<_> = names.collect();
    Ok(names.map_err(dflash_io::Error::io("read", path))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(names: &[&str], resume: Option<ResumeMode>) -> Result<Option<u64>, String> {
        let dir = tempfile::tempdir().unwrap();
        for name in names {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "{}").unwrap();
        }
        let found = RunDir::at(dir.path()).start(resume).map_err(|error| error.to_string())?;
        Ok(found.map(|checkpoint| checkpoint.step))
    }

    #[test]
    fn a_run_begins_where_nothing_of_value_lies() {
        for begin in [None, Some(ResumeMode::Auto)] {
            assert_eq!(start(&[], begin), Ok(None));
            assert_eq!(start(&[".lock", ".run.json.17.tmp"], begin), Ok(None));
            assert_eq!(start(&["run.json", "notes.txt"], begin), Ok(None));
            assert_eq!(start(&["dry-run/config.json"], begin), Ok(None));
            let refused = start(&["thesis.tex", ".lock"], begin).unwrap_err();
            assert!(refused.contains("holds thesis.tex, which no training run wrote"), "{refused}");
        }
        let refused = start(&["step-000004/config.json"], None).unwrap_err();
        assert!(refused.contains("(last: step 4); pass --resume"), "{refused}");
    }

    #[test]
    fn a_run_is_resumed_where_there_is_one() {
        let two = ["step-000004/config.json", "step-000006/config.json", "run.json"];
        for mode in [ResumeMode::Latest, ResumeMode::Auto, ResumeMode::Step(6)] {
            assert_eq!(start(&two, Some(mode)), Ok(Some(6)));
        }
        assert_eq!(start(&two, Some(ResumeMode::Step(4))), Ok(Some(4)));
        let refused = start(&two, Some(ResumeMode::Step(5))).unwrap_err();
        assert!(refused.ends_with("for --resume; there are 4, 6"), "{refused}");
        let refused = start(&[], Some(ResumeMode::Step(5))).unwrap_err();
        assert!(refused.ends_with("it has none"), "{refused}");
        for nothing in [&[][..], &["run.json"], &[".lock"]] {
            let refused = start(nothing, Some(ResumeMode::Latest)).unwrap_err();
            assert!(refused.contains("there is no checkpoint in "), "{refused}");
            assert!(refused.contains("pass --resume=auto"), "{refused}");
        }
    }
}
