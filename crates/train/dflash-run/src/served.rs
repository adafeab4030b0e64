//! Which checkpoint of a run is used: the newest, the best, and the one that the run's directory
//! itself stands for, which is the best if a validation named one, else the newest.
//!
//! Our own programs call [`draft_dir`], which reads the directory and best.json. Engines know only
//! paths, so there are links beside the checkpoints:
//!
//! ```text
//! latest -> step-000120
//! best -> step-000080
//! config.json -> best/config.json
//! model.safetensors -> best/model.safetensors
//! ```
//!
//! Each is replaced by a rename once its target is complete, and its target is not pruned, so it
//! leads to a complete checkpoint at any moment. All drafts of a run have the same shape, so files
//! of two of them fit together while the links change.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::checkpoints::named;
use crate::{Checkpoint, Error, RunDir};

const LATEST: &str = "latest";
const BEST: &str = "best";

/// The files of a checkpoint that engines read.
const FILES: [&str; 3] = ["config.json", "model.safetensors", "draft_vocabulary.safetensors"];

/// All names of links.
pub(crate) const LINKS: [&str; 5] = [LATEST, BEST, FILES[0], FILES[1], FILES[2]];

/// The draft that `path` stands for: for a run's directory its best checkpoint, or the newest if
/// nothing was validated, for `RUN/latest` and `RUN/best` the one of that name; any other path
/// stands for itself.
///
/// # Errors
/// A run without such a checkpoint, an unreadable directory.
pub fn draft_dir(path: &Path) -> Result<PathBuf, Error> {
    let found = |checkpoint: Option<Checkpoint>| checkpoint.map(|checkpoint| checkpoint.dir);
    if let Some(run) = parent_run(path)? {
        let owner = || run.path().to_path_buf();
        if path.ends_with(LATEST) {
            return found(newest(&run)?).ok_or_else(|| Error::NoCheckpoint { path: owner() });
        }
        if path.ends_with(BEST) {
            return found(run.best_checkpoint()?).ok_or_else(|| Error::NoBest { path: owner() });
        }
    }
    let run = RunDir::at(path);
    if !is_run(&run)? {
        return Ok(path.into());
    }
    match found(run.best_checkpoint()?).or(found(newest(&run)?)) {
        Some(dir) => Ok(dir),
        // A copy with its links followed, and without its checkpoints.
        None if path.join(FILES[0]).is_file() => Ok(path.into()),
        None => Err(Error::NoCheckpoint { path: path.into() }),
    }
}

/// The newest complete checkpoint that is not of a run that had diverged.
fn newest(run: &RunDir) -> Result<Option<Checkpoint>, Error> {
    Ok(run.checkpoints()?.into_iter().rfind(|checkpoint| !checkpoint.is_diverged()))
}

/// Updates the links of `run`.
pub(crate) fn publish(run: &RunDir) -> Result<(), Error> {
    let (latest, best) = (newest(run)?, run.best_checkpoint()?);
    let name = |checkpoint: &Checkpoint| checkpoint.dir.file_name().map(PathBuf::from);
    link(run, LATEST, latest.as_ref().and_then(name))?;
    link(run, BEST, best.as_ref().and_then(name))?;
    let (shown, served) = if best.is_some() { (BEST, best) } else { (LATEST, latest) };
    for file in FILES {
        let has = served.as_ref().is_some_and(|served| served.dir.join(file).is_file());
        link(run, file, has.then(|| Path::new(shown).join(file)))?;
    }
    Ok(())
}

/// Removes dangling links, for example after someone removed checkpoints.
pub(crate) fn withdraw(run: &RunDir) -> Result<(), Error> {
    for name in LINKS {
        let path = run.path().join(name);
        if path.is_symlink() && !path.exists() {
            std::fs::remove_file(&path).map_err(dflash_io::Error::io("remove", &path))?;
        }
    }
    Ok(())
}

/// The steps that `latest` and `best` currently lead to.
pub(crate) fn shown(run: &RunDir) -> Vec<u64> {
    let target = |name| std::fs::read_link(run.path().join(name)).ok();
    let targets: Vec<PathBuf> = [LATEST, BEST].into_iter().filter_map(target).collect();
    let checkpoints = named(run.path()).unwrap_or_default();
    let is_shown = |it: &Checkpoint| targets.iter().any(|target| it.dir.ends_with(target));
    checkpoints.into_iter().filter(is_shown).map(|it| it.step).collect()
}

/// Makes `name` a link to `target`, or removes it.
fn link(run: &RunDir, name: &str, target: Option<PathBuf>) -> Result<(), Error> {
    let path = run.path().join(name);
    let found = match path.symlink_metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(dflash_io::Error::io("read", &path)(error).into()),
        Ok(facts) if !facts.is_symlink() && target.is_none() => return Ok(()),
        Ok(facts) if !facts.is_symlink() => return Err(Error::NotALink { path }),
        Ok(_) => std::fs::read_link(&path).ok(),
    };
    match target {
        target if target == found => Ok(()),
        Some(target) => Ok(dflash_io::replace_link(&path, &target)?),
        None => Ok(std::fs::remove_file(&path).map_err(dflash_io::Error::io("remove", &path))?),
    }
}

/// The run's directory that contains `path`.
pub(crate) fn parent_run(path: &Path) -> Result<Option<RunDir>, Error> {
    let Some(parent) = path.parent() else { return Ok(None) };
    let run = RunDir::at(if parent.as_os_str().is_empty() { Path::new(".") } else { parent });
    Ok(is_run(&run)?.then_some(run))
}

fn is_run(run: &RunDir) -> Result<bool, Error> {
    Ok(run.path().is_dir() && (run.has_provenance() || !named(run.path())?.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HeldOutRows, SavePath, TeacherForced, ValidationLine};
    use dflash_settings::CheckpointSettings;

    fn save(run: &Path, step: u64) {
        let dir = Checkpoint::at(run, step).dir;
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("config.json"), "{}").unwrap();
        std::fs::write(dir.join("model.safetensors"), step.to_string()).unwrap();
    }

    fn served(run: &Path) -> Option<u64> {
        std::fs::read_to_string(run.join("model.safetensors")).ok()?.parse().ok()
    }

    fn of(path: &Path) -> Result<u64, String> {
        let dir = draft_dir(path).map_err(|error| error.to_string())?;
        Ok(std::fs::read_to_string(dir.join("model.safetensors")).unwrap().parse().unwrap())
    }

    fn validation(step: u64, expected: f64) -> ValidationLine {
        let expected_acceptance_length = Some(expected);
        let figures = TeacherForced { expected_acceptance_length, ..TeacherForced::default() };
        let rows = Some(HeldOutRows { figures, ..HeldOutRows::default() });
        ValidationLine { step, rows, ..ValidationLine::default() }
    }

    #[test]
    fn a_run_stands_for_its_best_checkpoint_else_for_its_newest() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path();
        assert_eq!(draft_dir(run).unwrap(), run, "not a run");
        let claimed = SavePath::claim(run).unwrap();
        std::fs::write(run.join("run.json"), "{}").unwrap();
        assert!(of(run).unwrap_err().contains("holds no complete checkpoint"));
        for step in [3, 5] {
            save(run, step);
            claimed.publish().unwrap();
            assert_eq!((of(run), of(&run.join("latest"))), (Ok(step), Ok(step)));
            assert_eq!(served(run), Some(step));
        }
        assert!(of(&run.join("best")).unwrap_err().ends_with("latest"));
        assert_eq!(claimed.note_validation(&validation(4, 9.0)).unwrap(), None, "not saved");
        let noted = claimed.note_validation(&validation(3, 2.5)).unwrap();
        assert_eq!(noted, Some("expected acceptance length"));
        assert_eq!(claimed.note_validation(&validation(5, 2.0)).unwrap(), None);
        claimed.publish().unwrap();
        assert_eq!((of(run), of(&run.join("best"))), (Ok(3), Ok(3)));
        assert_eq!((of(&run.join("latest")), served(run)), (Ok(5), Some(3)));
        assert_eq!(served(&run.join("latest")), Some(5));
        // A copy without links is as good.
        LINKS.iter().for_each(|name| _ = std::fs::remove_file(run.join(name)));
        assert_eq!((of(run), of(&run.join("latest"))), (Ok(3), Ok(5)));
        assert_eq!(of(&run.join("step-000005")), Ok(5));
    }

    #[test]
    fn a_kill_between_any_two_operations_leaves_links_that_lead_somewhere() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path();
        let claimed = SavePath::claim(run).unwrap();
        let keep = CheckpointSettings { keep_last: Some(1), ..CheckpointSettings::default() };
        for step in 1..=3 {
            save(run, step);
            // killed before the links were updated, and started again
            claimed.prune(&keep, None).unwrap();
            assert!(served(run).is_none_or(|served| served + 1 == step));
            assert!(step == 1 || run.join("latest").exists());
            claimed.publish().unwrap();
            assert_eq!(served(run), Some(step));
            assert_eq!(claimed.prune(&keep, None).unwrap().len(), usize::from(step > 1));
            assert_eq!(served(run), Some(step));
        }
        drop(claimed);
        std::os::unix::fs::symlink("x", run.join(".latest.17.tmp")).unwrap();
        std::fs::remove_dir_all(run.join("step-000003")).unwrap();
        let claimed = SavePath::claim(run).unwrap();
        let left = crate::directory::names(run).unwrap();
        assert_eq!(left, [".lock"], "links to what somebody removed go");
        std::fs::write(run.join("config.json"), "mine").unwrap();
        save(run, 4);
        let refused = claimed.publish().unwrap_err().to_string();
        assert!(refused.contains("config.json is not a link"), "{refused}");
        assert_eq!(std::fs::read_to_string(run.join("config.json")).unwrap(), "mine");
    }
}
