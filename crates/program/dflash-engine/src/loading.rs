//! Shows a target's loading progress on stderr.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use dflash_io::{Progress, Unit, say};
use dflash_tensor::Loading;

/// Loads longer than this are summarised in a line at the end.
const LONG: Duration = Duration::from_secs(5);

static SHOWN: Mutex<Option<Progress>> = Mutex::new(None);

/// Shows a load: a bar on a terminal, otherwise occasional lines; a long one's throughput at its
/// end.
pub(crate) fn show(loading: Loading<'_>) {
    let Loading { dir, total, done, read, elapsed, over } = loading;
    let mut shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let name = || dir.file_name().unwrap_or(dir.as_os_str()).to_string_lossy().into_owned();
    if !over {
        let begin = || Progress::new(format!("loading {}", name()), Unit::Bytes, total);
        shown.get_or_insert_with(begin).update(done, pace(read, elapsed));
        return;
    }
    *shown = None;
    if elapsed >= LONG {
        let read_gb = read as f64 / 1e9;
        say(format!(
            "read {read_gb:.1} GB of {} in {:.0} s, {}",
            dir.display(),
            elapsed.as_secs_f64(),
            pace(read, elapsed)
        ));
    }
}

fn pace(bytes: u64, elapsed: Duration) -> String {
    format!("{:.2} GB/s", bytes as f64 / 1e9 / elapsed.as_secs_f64().max(1e-3))
}
