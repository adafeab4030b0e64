//! How far a download is, on stderr: a bar on a terminal, a line now and then elsewhere.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use hf_hub::progress::{DownloadEvent, FileStatus, ProgressEvent, ProgressHandler};
use indicatif::{DecimalBytes, ProgressBar, ProgressStyle};

use crate::error::Reason;

/// Between two lines where there is no terminal.
const PLAIN_INTERVAL: Duration = Duration::from_secs(10);

/// Follows one download through the client's events; silent when nothing is left to fetch.
#[derive(Debug)]
pub(crate) struct Meter {
    label: String,
    bar: ProgressBar,
    is_plain: bool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    files: usize,
    bytes: u64,
    /// Of each file that is streamed: bytes so far, bytes announced, and whether it is whole.
    streamed: HashMap<String, (u64, u64, bool)>,
    /// Bytes so far of the files that come in deduplicated chunks, which are counted together.
    chunked: u64,
    last_line: Instant,
    waits: bool,
}

impl State {
    fn fetched(&self) -> u64 {
        let streamed: u64 = self.streamed.values().map(|(done, ..)| done).sum();
        // A file in chunks is counted once more when it is whole.
        (self.chunked + streamed).min(self.bytes)
    }
}

impl Meter {
    pub(crate) fn start(label: String) -> Self {
        let is_plain = !std::io::stderr().is_terminal();
        let bar = ProgressBar::new(0);
        let template =
            "fetching {msg} {bar:30} {bytes} of {total_bytes} ({bytes_per_sec}, {eta} left)";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        let state = State {
            files: 0,
            bytes: 0,
            streamed: HashMap::new(),
            chunked: 0,
            last_line: Instant::now(),
            waits: false,
        };
        Self { label, bar, is_plain, state: Mutex::new(state) }
    }

    /// Says once that another process is fetching it.
    pub(crate) fn wait_for_another(&self) {
        self.with_state(|state| {
            if !std::mem::replace(&mut state.waits, true) {
                eprintln!("waiting for another process that fetches {}", self.label);
            }
        });
    }

    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
        self.with_state(|state| {
            if state.bytes > 0 {
                eprintln!("fetched {}: {}", self.label, DecimalBytes(state.bytes));
            }
        });
    }

    /// Compares what was streamed into `dir` with the announced sizes: the client keeps anything that
    /// the server sends, even an error page, and would use it from then on. Such a file is removed.
    pub(crate) fn verify(&self, dir: &Path) -> Result<(), Reason> {
        self.with_state(|state| {
            for (file, &(_, expected, _)) in &state.streamed {
                let path = dir.join(file);
                let Ok(found) = path.metadata().map(|facts| facts.len()) else { continue };
                if expected > 0 && found != expected {
                    for path in [path.canonicalize().unwrap_or_default(), path] {
                        // What cannot be removed is still reported.
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

    fn show(&self, state: &mut State) {
        if state.bytes == 0 {
            return;
        }
        let done = state.streamed.values().filter(|(.., whole)| *whole).count();
        let (label, files) = (&self.label, state.files);
        self.bar.set_length(state.bytes);
        self.bar.set_position(state.fetched());
        self.bar.set_message(format!("{label} ({done} of {files} files)"));
        if self.is_plain && state.last_line.elapsed() >= PLAIN_INTERVAL {
            state.last_line = Instant::now();
            let (fetched, bytes) = (DecimalBytes(state.fetched()), DecimalBytes(state.bytes));
            eprintln!("fetching {label}: {done} of {files} files, {fetched} of {bytes}");
        }
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
            self.show(state);
        });
    }
}
