//! Exiting at once. Runs in its own process, because it removes whatever the process is writing.

use std::fs;

use dflash_io::{PendingDir, remove_pending, write_atomic};

#[test]
fn leaving_at_once_takes_half_written_files_along() {
    let dir = tempfile::tempdir().unwrap();
    let done = PendingDir::create(&dir.path().join("done")).unwrap();
    fs::write(done.path().join("whole"), "x").unwrap();
    done.commit().unwrap();
    let made = PendingDir::create(&dir.path().join("made")).unwrap();
    fs::write(made.path().join("part"), "x").unwrap();
    let file = dir.path().join("file");
    let interrupted = write_atomic(&file, |_| {
        remove_pending();
        Ok(())
    });
    assert!(interrupted.is_err());
    let left = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["done"]);
}
