//! The lock on a run's directory: one process writes, removes leftovers and prunes checkpoints.

use std::fs::{File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dflash_settings::CheckpointSettings;

use crate::checkpoints::{Best, Checkpoint, PREFIX};
use crate::directory::names;
use crate::{Error, Line, MetricLine, RunDir, ValidationLine, served};

/// Locked by rank 0 for the whole run; the kernel unlocks it when the process dies.
const LOCK: &str = ".lock";
/// How often, and how far apart, a lock that someone holds is tried again.
const LOOKS: u32 = 3;
const LOOK: Duration = Duration::from_millis(10);

/// Whether a run is alive in the directory `path`, if the file system has locks.
pub(crate) fn is_in_use(path: &Path) -> bool {
    RunDir::at(path).is_alive() == Some(true)
}

impl RunDir {
    /// Whether a run is alive here, on any machine that shares the file system's locks; `None` if
    /// that cannot be told.
    pub fn is_alive(&self) -> Option<bool> {
        let lock = File::open(self.path().join(LOCK)).ok()?;
        match lock.try_lock_shared() {
            Ok(()) => Some(false),
            Err(TryLockError::WouldBlock) => Some(true),
            Err(TryLockError::Error(_)) => None,
        }
    }

    /// Whether this directory is the one that was claimed with this [`SavePath::mark`], not another
    /// one with the same name on another machine.
    pub fn is_claimed_as(&self, mark: &[u8]) -> bool {
        std::fs::read(self.path().join(LOCK)).is_ok_and(|found| found == mark)
    }
}

/// Locks it, unless it stays locked: a reader that asks whether a run is alive holds it for an instant.
fn lock_out(lock: &File) -> Result<(), TryLockError> {
    for _ in 0..LOOKS {
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK),
            done => return done,
        }
    }
    lock.try_lock()
}

/// Writes a unique mark of this claim into the lock's file.
fn leave_mark(mut lock: &File) -> std::io::Result<Vec<u8>> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mark = format!("{} {}\n", std::process::id(), since.as_nanos()).into_bytes();
    lock.set_len(0)?;
    lock.write_all(&mark)?;
    Ok(mark)
}

/// A run's directory that this process alone may write to, until this is dropped.
#[derive(Debug)]
pub struct SavePath {
    run: RunDir,
    /// The contents of the lock's file, which identify the claim.
    mark: Vec<u8>,
    _lock: File,
}

impl SavePath {
    /// Creates the directory, locks it for this run, and removes what killed runs left behind.
    ///
    /// # Errors
    /// [`Error::InUse`] if another run is alive in it.
    pub fn claim(path: &Path) -> Result<Self, Error> {
        std::fs::create_dir_all(path).map_err(dflash_io::Error::io("create", path))?;
        let lock_path = path.join(LOCK);
        // Another run's mark must not be truncated.
        let options = File::options().create(true).truncate(false).write(true).open(&lock_path);
        let lock = options.map_err(dflash_io::Error::io("create", &lock_path))?;
        match lock_out(&lock) {
            Err(TryLockError::WouldBlock) => return Err(Error::InUse { path: path.into() }),
            // Some network file systems have no locks; there the user must take care.
            Ok(()) | Err(TryLockError::Error(_)) => (),
        }
        let mark = leave_mark(&lock).unwrap_or_default();
        let claimed = Self { run: RunDir::at(path), mark, _lock: lock };
        claimed.sweep()?;
        served::withdraw(&claimed.run)?;
        Ok(claimed)
    }

    /// The mark that [`RunDir::is_claimed_as`] looks for; empty if the disk was full.
    pub fn mark(&self) -> &[u8] {
        &self.mark
    }

    /// Removes files and directories with our temporary names.
    fn sweep(&self) -> Result<(), Error> {
        for name in names(self.run.path())?.iter().filter(|name| is_leftover(name)) {
            let path = self.run.path().join(name);
            let removed = match is_real_dir(&path) {
                true => std::fs::remove_dir_all(&path),
                false => std::fs::remove_file(&path),
            };
            removed.map_err(dflash_io::Error::io("remove", &path))?;
        }
        Ok(())
    }

    /// Removes the checkpoints that are neither kept by the settings nor by `spared`; returns their
    /// steps. Each is renamed first, so that a checkpoint's name always stands for a complete one.
    /// As many checkpoints of a diverged run are kept, in addition to the good ones.
    ///
    /// # Errors
    /// An unreadable record of the best step, a directory that cannot be removed.
    pub fn prune(
        &self,
        retention: &CheckpointSettings,
        spared: Option<u64>,
    ) -> Result<Vec<u64>, Error> {
        let Some(keep_last) = retention.kept() else { return Ok(Vec::new()) };
        let mut checkpoints = self.run.checkpoints()?;
        checkpoints.retain(|checkpoint| checkpoint.has_our_name() && is_real_dir(&checkpoint.dir));
        let (mut diverged, mut good): (Vec<_>, Vec<_>) =
            checkpoints.into_iter().partition(Checkpoint::is_diverged);
        for kind in [&mut diverged, &mut good] {
            kind.truncate(kind.len().saturating_sub(keep_last as usize));
        }
        let best = self.run.best()?.map(|best| best.step);
        let shown = served::shown(&self.run);
        let mut old = [diverged, good].concat();
        old.retain(|&Checkpoint { step, .. }| {
            let is_kept = retention.keep_every.is_some_and(|every| step.is_multiple_of(every));
            !is_kept && best != Some(step) && spared != Some(step) && !shown.contains(&step)
        });
        for checkpoint in &old {
            dflash_io::remove_dir(&checkpoint.dir)?;
        }
        Ok(old.into_iter().map(|checkpoint| checkpoint.step).collect())
    }

    /// Moves the checkpoints after `step` into a directory of their own, with copies of the lines,
    /// for a run that resumes from there and will repeat these steps. Returns their steps, and the
    /// directory; `None` if there are none. The newest are moved first, so that the run can be
    /// resumed at any moment.
    ///
    /// # Errors
    /// A file that cannot be copied or moved.
    pub fn set_aside_after(&self, step: u64) -> Result<Option<(Vec<u64>, PathBuf)>, Error> {
        let mut later = self.run.checkpoints()?;
        later.retain(|it| it.step > step && it.has_our_name() && is_real_dir(&it.dir));
        if later.is_empty() {
            return Ok(None);
        }
        let aside = self.unused(&format!("after-{step:06}"));
        std::fs::create_dir(&aside).map_err(dflash_io::Error::io("create", &aside))?;
        for name in [MetricLine::FILE, ValidationLine::FILE, RunDir::BEST] {
            let from = self.run.path().join(name);
            if from.is_file() {
                let copied = std::fs::copy(&from, aside.join(name));
                copied.map_err(dflash_io::Error::io("copy", from))?;
            }
        }
        self.forget_best_after(step)?;
        for checkpoint in later.iter().rev() {
            let to = aside.join(checkpoint.dir.file_name().expect("a checkpoint has a name"));
            let moved = std::fs::rename(&checkpoint.dir, &to);
            moved.map_err(dflash_io::Error::io("move", &checkpoint.dir))?;
        }
        Ok(Some((later.into_iter().map(|checkpoint| checkpoint.step).collect(), aside)))
    }

    /// An unused name that begins with `name`.
    fn unused(&self, name: &str) -> PathBuf {
        let numbered = (2u64..).map(|number| format!("{name}-{number}"));
        let mut names = std::iter::once(name.to_owned()).chain(numbered);
        let path = names.find_map(|name| {
            let path = self.run.path().join(name);
            (!path.exists()).then_some(path)
        });
        path.expect("there is a number that no name has")
    }

    /// Chooses a best step that is not after `step`.
    fn forget_best_after(&self, step: u64) -> Result<(), Error> {
        if self.run.best()?.is_none_or(|best| best.step <= step) {
            return Ok(());
        }
        let path = self.run.path().join(RunDir::BEST);
        std::fs::remove_file(&path).map_err(dflash_io::Error::io("remove", path))?;
        for (at, line) in self.run.lines::<ValidationLine>()?.by_step {
            if at <= step {
                self.note_validation(&line)?;
            }
        }
        Ok(())
    }

    /// Removes what [`Self::prune`] would remove after one more checkpoint; returns the steps. The
    /// newest is kept in any case.
    ///
    /// # Errors
    /// As [`Self::prune`].
    pub fn make_room(
        &self,
        retention: &CheckpointSettings,
        spared: Option<u64>,
    ) -> Result<Vec<u64>, Error> {
        let keep_last = retention.kept().map(|last| last.saturating_sub(1).max(1));
        self.prune(&CheckpointSettings { keep_last, ..retention.clone() }, spared)
    }

    /// Records a validation, if its step has a checkpoint; returns the metric in which that is the
    /// best so far.
    pub fn note_validation(&self, line: &ValidationLine) -> Result<Option<&'static str>, Error> {
        let Some(found) = Best::of(line) else { return Ok(None) };
        let beaten = self.run.best()?.is_none_or(|best| found.beats(&best));
        if !beaten || !Checkpoint::at(self.run.path(), line.step).is_complete() {
            return Ok(None);
        }
        let text = serde_json::to_vec(&found).expect("numbers print");
        dflash_io::write_bytes(&self.run.path().join(RunDir::BEST), &text)?;
        Ok(found.quantity().map(|(quantity, _)| quantity))
    }

    /// Updates the links to the newest and the best checkpoint.
    ///
    /// # Errors
    /// A file system without links, or something else under a link's name.
    pub fn publish(&self) -> Result<(), Error> {
        served::publish(&self.run)
    }
}

/// Whether `path` is a directory itself, and not a link to one.
fn is_real_dir(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir())
}

/// Files that a run which ended before its first record may leave.
pub(crate) fn is_negligible(name: &str) -> bool {
    name == LOCK || is_leftover(name)
}

/// `.NAME.PID.tmp`, the temporary name of files and directories being written or removed.
fn is_leftover(name: &str) -> bool {
    let Some(inner) = name.strip_prefix('.').and_then(|name| name.strip_suffix(".tmp")) else {
        return false;
    };
    let Some((kept, process)) = inner.rsplit_once('.') else { return false };
    let files = [RunDir::PROVENANCE, RunDir::BEST, MetricLine::FILE, ValidationLine::FILE];
    let is_link = served::LINKS.contains(&kept);
    let is_dir = kept.starts_with(PREFIX) || kept == RunDir::DRY_RUN;
    let is_ours = is_dir || files.contains(&kept) || is_link;
    is_ours
        && !process.is_empty()
        && process.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AcceptanceFigures, HeldOutPrompts, Position, State};

    fn with(names: &[&str]) -> (tempfile::TempDir, SavePath) {
        let dir = tempfile::tempdir().unwrap();
        for name in names {
            let path = dir.path().join(name);
            std::fs::create_dir(&path).unwrap();
            std::fs::write(path.join("config.json"), "{}").unwrap();
        }
        let claimed = SavePath::claim(dir.path()).unwrap();
        (dir, claimed)
    }

    fn left(dir: &tempfile::TempDir) -> Vec<String> {
        let mut names = names(dir.path()).unwrap();
        names.retain(|name| name != LOCK);
        names.sort();
        names
    }

    const FIVE: [&str; 5] =
        ["step-000010", "step-000020", "step-000030", "step-000040", "step-000050"];

    fn keep(keep_last: Option<u64>, keep_every: Option<u64>) -> CheckpointSettings {
        CheckpointSettings { keep_last, keep_every, ..CheckpointSettings::default() }
    }

    fn check(retention: CheckpointSettings, best: Option<&str>, expected: &[&str]) {
        let (dir, claimed) = with(&FIVE);
        if let Some(best) = best {
            std::fs::write(dir.path().join(RunDir::BEST), best).unwrap();
        }
        claimed.prune(&retention, None).unwrap();
        let mut names = left(&dir);
        names.retain(|name| name != RunDir::BEST);
        assert_eq!(names, expected, "{retention:?}");
    }

    #[test]
    fn only_what_need_not_stay_goes() {
        check(keep(None, None), None, &FIVE);
        check(keep(None, Some(7)), None, &FIVE);
        check(keep(Some(9), None), None, &FIVE);
        check(keep(Some(2), None), None, &FIVE[3..]);
        check(keep(Some(0), None), None, &FIVE);
        check(keep(Some(1), Some(20)), None, &[FIVE[1], FIVE[3], FIVE[4]]);
        let best = r#"{"step": 10, "acceptance_length": 3.5}"#;
        check(keep(Some(1), None), Some(best), &[FIVE[0], FIVE[4]]);
    }

    /// Gives a checkpoint a state, diverged or not.
    fn mark(dir: &tempfile::TempDir, name: &str, diverged: bool) {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.join(Checkpoint::TRAINER)).unwrap();
        let position = Position { diverged, ..Position::default() };
        State { position, tensors_crc32: None }.save(&path).unwrap();
    }

    #[test]
    fn the_last_good_checkpoint_outlives_those_of_a_diverged_run() {
        let (dir, claimed) = with(&FIVE);
        FIVE.iter().for_each(|name| mark(&dir, name, *name > FIVE[1]));
        let latest = || RunDir::at(dir.path()).latest().map(|latest| latest.unwrap().step);
        assert_eq!(latest().unwrap(), 20);
        assert_eq!(claimed.prune(&keep(Some(1), None), Some(10)).unwrap(), [30, 40]);
        assert_eq!(left(&dir), [FIVE[0], FIVE[1], FIVE[4]], "spared, good and diverged");
        assert_eq!(claimed.prune(&keep(Some(1), None), None).unwrap(), [10]);
        Checkpoint::at(dir.path(), 20).mark_diverged().unwrap();
        let refused = latest().unwrap_err().to_string();
        assert!(refused.contains("--resume=50 to use the last"), "{refused}");
    }

    #[test]
    fn what_comes_after_a_step_is_moved_aside_with_its_lines() {
        let (dir, claimed) = with(&FIVE);
        let line = |step: u64, length: f64| {
            let figures =
                AcceptanceFigures { acceptance_length: length, ..AcceptanceFigures::default() };
            let prompts = Some(HeldOutPrompts { figures, responses: 1 });
            let line = ValidationLine { step, prompts, ..ValidationLine::default() };
            RunDir::at(dir.path()).append(&line).unwrap();
            claimed.note_validation(&line).unwrap();
        };
        [(10, 2.0), (20, 3.0), (30, 2.5), (50, 4.0)]
            .into_iter()
            .for_each(|(step, length)| line(step, length));
        assert_eq!(claimed.set_aside_after(50).unwrap(), None);
        let (steps, aside) = claimed.set_aside_after(30).unwrap().unwrap();
        assert_eq!((steps, &aside), (vec![40, 50], &dir.path().join("after-000030")));
        let run = RunDir::at(&aside);
        assert_eq!(run.checkpoints().unwrap().len(), 2);
        assert_eq!(run.best().unwrap().unwrap().step, 50);
        assert_eq!(run.lines::<ValidationLine>().unwrap().by_step.len(), 4);
        assert_eq!(RunDir::at(dir.path()).best().unwrap().unwrap().step, 20);
        assert_eq!(RunDir::at(dir.path()).checkpoints().unwrap().len(), 3);
        std::fs::create_dir(dir.path().join(FIVE[3])).unwrap();
        std::fs::write(dir.path().join(FIVE[3]).join("config.json"), "{}").unwrap();
        let (_, aside) = claimed.set_aside_after(30).unwrap().unwrap();
        assert_eq!(aside, dir.path().join("after-000030-2"));
    }

    #[test]
    fn room_is_made_by_what_would_go_after_the_next_save() {
        let check = |keep_last, expected: &[&str]| {
            let (dir, claimed) = with(&FIVE);
            claimed.make_room(&keep(keep_last, None), None).unwrap();
            let mut names = left(&dir);
            names.retain(|name| name.starts_with(PREFIX));
            assert_eq!(names, expected, "{keep_last:?}");
        };
        check(None, &FIVE);
        check(Some(9), &FIVE);
        check(Some(3), &FIVE[3..]);
        check(Some(2), &FIVE[4..]);
        // the only good one stays
        check(Some(1), &FIVE[4..]);
    }

    #[test]
    fn a_best_file_that_cannot_be_read_costs_no_checkpoint() {
        let (dir, claimed) = with(&FIVE);
        std::fs::write(dir.path().join(RunDir::BEST), "{").unwrap();
        let refused = claimed.prune(&keep(Some(1), None), None);
        assert!(refused.unwrap_err().to_string().contains(RunDir::BEST));
        assert_eq!(left(&dir).len(), 6);
    }

    #[test]
    fn what_is_not_a_checkpoint_of_ours_stays() {
        let foreign = ["step-1", "step-+00004", "step-000002-copy", "notes", "step-000001"];
        let (dir, claimed) = with(&[&foreign[..4], &FIVE[4..]].concat());
        std::fs::create_dir(dir.path().join(foreign[4])).unwrap();
        std::os::unix::fs::symlink(dir.path().join("notes"), dir.path().join("step-000003"))
            .unwrap();
        assert!(claimed.prune(&keep(Some(1), None), None).unwrap().is_empty());
        assert_eq!(left(&dir).len(), 7);
    }

    #[test]
    fn leftovers_of_killed_runs_are_swept() {
        let dir = tempfile::tempdir().unwrap();
        let stale = [".step-000003.17.tmp", ".step-000004.1-12.tmp"];
        for name in stale {
            std::fs::create_dir_all(dir.path().join(name).join("trainer")).unwrap();
        }
        std::fs::write(dir.path().join(".metrics.jsonl.9.tmp"), "").unwrap();
        std::fs::write(dir.path().join(".run.json.9.tmp"), "").unwrap();
        for other in [".bashrc.tmp", ".thesis.9.tmp", ".step-000003.tmp", "step-000009.9.tmp"] {
            std::fs::write(dir.path().join(other), "").unwrap();
        }
        SavePath::claim(dir.path()).unwrap();
        let expected = [".bashrc.tmp", ".step-000003.tmp", ".thesis.9.tmp", "step-000009.9.tmp"];
        assert_eq!(left(&dir), expected);
    }

    #[test]
    fn a_path_belongs_to_one_run_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let first = SavePath::claim(dir.path()).unwrap();
        let refused = SavePath::claim(dir.path()).unwrap_err().to_string();
        assert!(refused.contains("another run"), "{refused}");
        let (run, mark) = (RunDir::at(dir.path()), first.mark().to_vec());
        assert!(run.is_claimed_as(&mark), "who is refused changes nothing");
        assert!(!RunDir::at(dir.path().join("elsewhere")).is_claimed_as(&mark));
        drop(first);
        SavePath::claim(dir.path()).unwrap();
        assert!(!run.is_claimed_as(&mark), "another claim has a mark of its own");
    }
}
