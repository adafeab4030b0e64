//! A training run as one HTML page: curves, settings, provenance, checkpoints.
//!
//! [`write_report`] reads the files of `dflash train` in its save path, finished or in progress,
//! and writes HTML with SVG charts inside; [`follow()`] serves the same page and keeps it current.

pub mod chart;
mod error;
mod follow;
mod page;
mod run;
mod standing;
pub mod text;

pub use dflash_http::Page;
pub use error::Error;
pub use follow::{Follow, follow};
pub use page::tile;

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Default name of the page in the run's directory.
const PAGE: &str = "report.html";

/// Writes the page of the run in `run_dir` to `output`, by default into the run's directory.
/// Returns its path.
///
/// # Errors
/// A directory that is not a run's, or files that cannot be read or written.
pub fn write_report(run_dir: &Path, output: Option<&Path>) -> Result<PathBuf, Error> {
    let run = run::Run::read(run_dir)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let output = output.map_or_else(|| run_dir.join(PAGE), Path::to_owned);
    dflash_io::write_bytes(&output, page::html(&run, now).as_bytes())?;
    Ok(output)
}
