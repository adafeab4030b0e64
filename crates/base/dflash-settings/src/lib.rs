//! The settings of every command, each stated once.
//!
//! A setting is a field here: its name is the flag (in kebab-case) and the key of the run file (in
//! snake_case), its comment is the help text, and its default and range are beside it. The programs
//! parse these structs from flags (feature `clap`) and run files (serde), check them, and pass them
//! unchanged to the libraries.

mod bench;
mod check;
mod choices;
mod class;
mod compute;
mod demo;
mod demo_target;
mod doctor;
mod draft;
mod earlier;
mod eval;
mod export;
mod generate;
mod hidden_server;
mod hidden_states;
mod launch;
mod loss;
mod markov;
mod nearest;
mod objective;
mod optimizer;
mod plan;
mod prepare;
mod processor;
mod push;
mod recipes;
mod regenerate;
mod report;
mod resume_mode;
mod rows;
mod secrets;
mod serve;
mod shell_support;
mod train;
mod validation;
mod warmup;

pub use bench::{
    BenchDecodeSettings, BenchSettings, BenchSubject, BenchTargetSettings, TrainStepSettings,
};
pub use check::Invalid;
pub use choices::{
    Backend, ColorChoice, Device, Dtype, MatmulPrecision, OnGenerate, OnMissing, OptimizerKind,
    SchedulerType, Shell, Speculate, SpeculatorType, Thinking, Tracker, WireDtype,
};
pub use class::{Classed, Resume, Setting};
pub use compute::ComputeSettings;
pub use demo::DemoSettings;
pub use demo_target::DemoTargetSettings;
pub use dflash_cpu::CpuLevel;
pub use doctor::DoctorSettings;
pub use draft::{DEFAULT_AUX_LAYERS, DEFAULT_BLOCK_SIZE, DEFAULT_LAYERS, DraftSettings};
pub use earlier::{EARLIER_NAMES, present_record, present_settings};
pub use eval::{EvalSettings, NGRAM_DRAFT, NGRAM_SIZE, NGRAM_TOKENS, NO_DRAFT};
pub use export::{ExportDtype, ExportFormat, ExportSettings};
pub use generate::GenerateSettings;
pub use hidden_server::{HiddenServerSettings, ParallelSettings};
pub use hidden_states::HiddenStatesSettings;
pub use launch::{CheckpointSettings, LaunchSettings};
pub use loss::{ElementLoss, LossTerm};
pub use markov::{DEFAULT_MARKOV_RANK, MarkovSettings};
pub use nearest::{did_you_mean, nearest};
pub use objective::{ObjectiveSettings, loss_chunk_bytes};
pub use optimizer::OptimizerSettings;
pub use plan::{PlanDevice, PlanSettings};
pub use prepare::{DATA_PRESETS, DEFAULT_TARGET, PrepareSettings};
pub use processor::ProcessorSettings;
pub use push::PushSettings;
pub use recipes::RecipesSettings;
pub use regenerate::RegenerateSettings;
pub use report::ReportSettings;
pub use resume_mode::ResumeMode;
pub use rows::RowSettings;
pub use secrets::{hide_passwords, shown_endpoint, shown_settings};
pub use serve::ServeSettings;
pub use shell_support::{CompletionsSettings, ManSettings};
pub use train::TrainSettings;
pub use validation::ValidationSettings;
pub use warmup::Warmup;
