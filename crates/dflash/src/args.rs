//! The command line of both programs, one file per command.
//!
//! Only clap types and their help texts live here. A command's `run` takes its struct apart
//! exhaustively, so that a flag nobody resolves does not compile.

use clap::{ArgAction, Args, Parser, Subcommand};

use crate::signals::OrdinaryEnd;

mod bench;
mod demo_target;
mod eval;
mod hidden_server;
mod launch;
mod plan;
mod prepare;
mod regenerate;
mod report;
mod train;

pub use bench::{BenchArgs, BenchCommand, TrainStepArgs};
pub use demo_target::DemoTargetArgs;
pub use eval::EvalArgs;
pub use hidden_server::{ComputeDtype, HiddenServerArgs, HiddenServerSettings, WireDtype};
pub use launch::{BackendArg, CheckpointArgs, LaunchArgs};
pub use plan::PlanArgs;
pub use prepare::PrepareArgs;
pub use regenerate::RegenerateArgs;
pub use report::ReportArgs;
pub use train::{
    DeviceArg, DraftArgs, HiddenArgs, MatmulPrecision, ObjectiveArgs, OnGenerateArg, OnMissingArg,
    OptimizerArg, OptimizerArgs, RowArgs, RunFileArgs, SchedulerType, SpeculatorType, TrainArgs,
    ValidationArgs,
};

/// Train DFlash drafters: from conversations to a measured draft model.
#[derive(Debug, Parser)]
#[command(
    name = "dflash",
    version,
    propagate_version = true,
    disable_help_subcommand = true,
    after_help = "The usual order: prepare, hidden-server (left running), train, eval.\n\
                  `dflash COMMAND --help` explains each flag."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// What every command takes.
    #[command(flatten)]
    pub global: GlobalArgs,
}

/// Flags that every command takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Args)]
pub struct GlobalArgs {
    /// Say more on stderr (twice: everything). DFLASH_LOG takes tracing's filter syntax instead.
    #[arg(short, long, action = ArgAction::Count, global = true, conflicts_with = "quiet")]
    pub verbose: u8,
    /// Say only what went wrong.
    #[arg(short, long, global = true)]
    pub quiet: bool,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Turn conversations into a tokenized, masked dataset.
    Prepare(PrepareArgs),
    /// Run the target and serve hidden states of chosen layers.
    HiddenServer(HiddenServerArgs),
    /// Train a drafter against a running hidden-state server.
    #[command(allow_negative_numbers = true)]
    Train(Box<TrainArgs>),
    /// Say what a training run will take: memory, arithmetic, time, hidden states.
    #[command(allow_negative_numbers = true)]
    Plan(Box<PlanArgs>),
    /// Measure a drafter: real speculative decoding against plain greedy decoding.
    #[command(allow_negative_numbers = true)]
    Eval(EvalArgs),
    /// Show a training run as one page: curves, settings, checkpoints.
    Report(ReportArgs),
    /// Replace the answers of a data set by the target's own.
    Regenerate(RegenerateArgs),
    /// Time parts of the work on random data.
    Bench(BenchArgs),
    /// Make the demo's corpus and train its tiny target.
    #[command(hide = true)]
    DemoTarget(DemoTargetArgs),
}

impl Command {
    /// Which signals are an ordinary way for the command to end.
    pub fn ordinary_end(&self) -> OrdinaryEnd {
        match self {
            Self::HiddenServer(_) => OrdinaryEnd::AnySignal,
            Self::Train(_) => OrdinaryEnd::Termination,
            _ => OrdinaryEnd::Never,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split_whitespace())
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_has_a_help_text() {
        for command in Cli::command().get_subcommands() {
            for arg in command.get_arguments() {
                assert!(arg.get_help().is_some(), "{} {}", command.get_name(), arg.get_id());
            }
        }
    }

    #[test]
    fn a_server_ends_by_signals_and_a_training_by_termination() {
        let check = |line, expected| {
            assert_eq!(parse(line).unwrap().command.ordinary_end(), expected, "{line}");
        };
        check("dflash prepare --model m --data d --output o", OrdinaryEnd::Never);
        check("dflash hidden-server m --target-layer-ids 1 2", OrdinaryEnd::AnySignal);
        check("dflash train --target t --data-path d --save-path s", OrdinaryEnd::Termination);
    }

    #[test]
    fn global_flags_may_follow_the_command() {
        let cli = parse("dflash prepare --model m --data d --output o -vv").unwrap();
        assert_eq!(cli.global, GlobalArgs { verbose: 2, quiet: false });
        assert!(parse("dflash prepare --model m --data d --output o -v -q").is_err());
    }
}
