//! The directory of a training run: its lock, the names of its files and their contents. `train`
//! writes through this crate, and every reader of a run uses it.
//!
//! - [`RunDir`] names the files and reads them, also while the run is in progress; [`SavePath`] is
//!   the lock of the one process that writes, which removes leftovers, prunes checkpoints and
//!   records the best step;
//! - [`MetricLine`] and [`ValidationLine`] are the lines of the two JSONL files, [`Provenance`] is
//!   `run.json`;
//! - [`Checkpoint`] is a step's directory, [`State`] and [`Position`] the state for `--resume`
//!   other than tensors;
//! - [`recorded`] and [`changes()`] determine which settings affect the result of a run, and which
//!   of them a resumed run changes;
//! - [`Acceptance`] counts accepted proposals, in training and in `dflash eval`;
//! - [`Evaluation`] is a result of `dflash eval`, stored with the checkpoint that it measured;
//! - [`draft_dir`] finds the checkpoint that a run's directory, its `latest` or its `best` stands
//!   for;
//! - [`Trackers`] writes the lines for TensorBoard, MLflow and Weights & Biases.
//!
//! docs/formats.md and FILES.md describe all of it; a test compares their keys with the types here.

mod acceptance;
mod changes;
mod checkpoints;
mod directory;
mod error;
mod evaluations;
mod events;
mod lines;
mod mlflow;
mod provenance;
mod save_path;
mod served;
mod state;
mod trackers;
mod wandb;

pub use acceptance::{Acceptance, AcceptanceFigures, SlotCounts};
pub use changes::{Change, changes, recorded};
pub use checkpoints::{Best, Checkpoint};
pub use directory::RunDir;
pub use error::Error;
pub use evaluations::{EvalMode, Evaluation, Identical, Rates};
pub use lines::{
    HeldOutPrompts, HeldOutRows, Line, Lines, MetricLine, StreamCounters, TeacherForced,
    ValidationLine,
};
pub use provenance::{Agreement, Provenance, SourceCheck, Start};
pub use save_path::SavePath;
pub use served::draft_dir;
pub use state::{Position, SchedulePosition, ServedWeights, State};
pub use trackers::{End, Entry, RunAbout, Trackers};
