//! The settings of every command, each stated once.
//!
//! A setting is a field here: its name is the flag (in kebab-case) and the key of the run file (in
//! snake_case), its comment the help text, and its default and range are beside it. The programs
//! parse these structs from flags (feature `clap`) and run files (serde), check them, and hand them
//! to the libraries, which take them as they are.

mod bench;
mod check;
mod choices;
mod compute;
mod demo_target;
mod draft;
mod eval;
mod hidden_server;
mod hidden_states;
mod launch;
mod loss;
mod objective;
mod optimizer;
mod plan;
mod prepare;
mod regenerate;
mod report;
mod rows;
mod secrets;
mod train;
mod validation;

pub use bench::{BenchSettings, BenchSubject, TrainStepSettings};
pub use check::Invalid;
pub use choices::{
    Backend, Device, Dtype, MatmulPrecision, OnGenerate, OnMissing, OptimizerKind, SchedulerType,
    SpeculatorType, Thinking, Tracker, WireDtype,
};
pub use compute::ComputeSettings;
pub use demo_target::DemoTargetSettings;
pub use draft::{DEFAULT_BLOCK_SIZE, DEFAULT_CAPTURES, DEFAULT_LAYERS, DraftSettings};
pub use eval::{EvalSettings, NGRAM_DRAFT, NO_DRAFT};
pub use hidden_server::HiddenServerSettings;
pub use hidden_states::HiddenStatesSettings;
pub use launch::{CheckpointSettings, LaunchSettings};
pub use loss::{ElementLoss, LossTerm};
pub use objective::{DEFAULT_LOSS_CHUNK_MIB, ObjectiveSettings};
pub use optimizer::OptimizerSettings;
pub use plan::PlanSettings;
pub use prepare::{DEFAULT_TARGET, PrepareSettings};
pub use regenerate::RegenerateSettings;
pub use report::ReportSettings;
pub use rows::RowSettings;
pub use secrets::{hide_passwords, hide_passwords_in, shown_endpoint};
pub use train::{Begin, TrainSettings};
pub use validation::ValidationSettings;
