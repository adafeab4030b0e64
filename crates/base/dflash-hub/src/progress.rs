//! Progress of a download on stderr; silent if nothing has to be fetched.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use dflash_io::{Progress, Unit, say};
use hf_hub::progress::{DownloadEvent, FileStatus, ProgressEvent, ProgressHandler};
use indicatif::DecimalBytes;

use crate::error::Reason;

/// Follows one download through the client's events.
#[derive(Debug)]
pub(crate) struct Meter {
    label: String,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    files: usize,
    bytes: u64,
    /// For each streamed file: bytes so far, bytes announced, and whether it is complete.
    streamed: HashMap<String, (u64, u64, bool)>,
    /// Bytes so far of the files that come in deduplicated chunks, which are counted together.
    chunked: u64,
    waits: bool,
    progress: Option<Progress>,
}

impl State {
    fn fetched(&self) -> u64 {
        let streamed: u64 = self.streamed.values().map(|(done, ..)| done).sum();
        // A chunked file is counted again when it is complete.
        (self.chunked + streamed).min(self.bytes)
    }

    fn show(&mut self, label: &str) {
        if self.bytes == 0 {
            return;
        }
        let whole = self.streamed.values().filter(|(.., whole)| *whole).count();
        let message = format!("{whole} of {} files", self.files);
        let (fetched, bytes) = (self.fetched(), self.bytes);
        let start = || Progress::new(format!("fetching {label}"), Unit::Bytes, bytes);
        let progress = self.progress.get_or_insert_with(start);
        progress.set_total(bytes);
        progress.update(fetched, message);
    }
}

impl Meter {
    pub(crate) fn start(label: String) -> Self {
        Self { label, state: Mutex::default() }
    }

    /// Reports once that another process is fetching it.
    pub(crate) fn wait_for_another(&self) {
        self.with_state(|state| {
            if !std::mem::replace(&mut state.waits, true) {
                say(format!("waiting for another process that fetches {}", self.label));
            }
        });
    }

    pub(crate) fn finish(&self) {
        self.with_state(|state| {
            state.progress = None;
            if state.bytes > 0 {
                say(format!("fetched {}: {}", self.label, DecimalBytes(state.bytes)));
            }
        });
    }

    /// Compares the files streamed into `dir` with the announced sizes: the client keeps anything
    /// that the server sends, even an error page, and would use it from then on. Such a file is
    /// removed.
    pub(crate) fn verify(&self, dir: &Path) -> Result<(), Reason> {
        self.with_state(|state| {
            for (file, &(_, expected, _)) in &state.streamed {
                let path = dir.join(file);
                let Ok(found) = path.metadata().map(|facts| facts.len()) else { continue };
                if expected > 0 && found != expected {
                    for path in [path.canonicalize().unwrap_or_default(), path] {
                        // A file that cannot be removed is still reported.
                        let _ = std::fs::remove_file(path);
                    }
                    let file = file.clone();
                    return Err(Reason::WrongSize { file, expected, found });
                }
            }
            Ok(())
        })
    }

    fn with_state<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl ProgressHandler for Meter {
    fn on_progress(&self, event: &ProgressEvent) {
        let ProgressEvent::Download(event) = event else { return };
        self.with_state(|state| {
            match event {
                DownloadEvent::Start { total_files, total_bytes } => {
                    (state.files, state.bytes) = (*total_files, *total_bytes);
                }
                DownloadEvent::Progress { files } => {
                    for file in files {
                        let whole = file.status == FileStatus::Complete;
                        let entry = (file.bytes_completed, file.total_bytes, whole);
                        state.streamed.insert(file.filename.clone(), entry);
                    }
                }
                DownloadEvent::AggregateProgress { bytes_completed, .. } => {
                    state.chunked = *bytes_completed;
                }
                DownloadEvent::Complete => {}
            }
            state.show(&self.label);
        });
    }
}
