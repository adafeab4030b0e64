//! From the program's arguments to a parsed command, with the settings of a run file put in.

use std::ffi::OsString;
use std::io::Write;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};

use crate::args::{Cli, Command};
use crate::error::Error;
use crate::origins::Origins;
use crate::run_file::Expanded;
use crate::{exit, run_file};

/// What the user asked for.
#[derive(Debug)]
pub struct CommandLine {
    /// Parsed.
    pub cli: Cli,
    /// Arguments that give `cli` without a run file, the program's name left out. Whoever else
    /// works on the command (the engine, its ranks) gets these, so that all have the same settings
    /// whatever becomes of the file.
    pub arguments: Vec<OsString>,
    /// Which of the settings a run file or `--set` gave.
    pub origins: Origins,
}

/// Why there is no command to run.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// Not a command line, or a request for help.
    Usage(clap::Error),
    /// A run file, or a `--set`, that cannot be used.
    Fault(Error),
}

/// Reads this program's arguments. Leaves the process where there is nothing to run: after help,
/// after `--dump-config`, and on mistakes.
pub fn read() -> CommandLine {
    match parse(std::env::args_os().collect()) {
        Ok(line) => dump_if_asked(line),
        Err(Refusal::Usage(error)) => error.exit(),
        Err(Refusal::Fault(error)) => exit::fault(error),
    }
}

fn dump_if_asked(line: CommandLine) -> CommandLine {
    if !line.cli.command.run_file().is_some_and(|run| run.dump_config) {
        return line;
    }
    let text = run_file::dump(&line.arguments).unwrap_or_else(|error| exit::fault(error));
    // A closed standard output is the reader's choice.
    let _ = std::io::stdout().write_all(text.as_bytes());
    exit::at_once(exit::DONE)
}

/// Parses `args`, the program's name first.
pub(crate) fn parse(args: Vec<OsString>) -> Result<CommandLine, Refusal> {
    let plain =
        |cli| CommandLine { cli, arguments: args[1..].to_vec(), origins: Origins::default() };
    match Cli::try_parse_from(&args) {
        Ok(cli) if !cli.command.run_file().is_some_and(|run| run.gives_settings()) => {
            Ok(plain(cli))
        }
        // What is missing on the command line may stand in the run file.
        Err(error) if error.kind() != ErrorKind::MissingRequiredArgument => {
            Err(Refusal::Usage(error))
        }
        strict => match (run_file::expand(&args)?, strict) {
            (Some(Expanded { arguments, origins }), _) => {
                let cli = Cli::try_parse_from(&arguments).map_err(Refusal::Usage)?;
                Ok(CommandLine { cli, arguments: arguments[1..].to_vec(), origins })
            }
            (None, strict) => strict.map(plain).map_err(Refusal::Usage),
        },
    }
}

/// The command line with nothing required: to look at what the user typed.
pub(crate) fn relaxed() -> clap::Command {
    Cli::command().mut_subcommands(|command| command.mut_args(|argument| argument.required(false)))
}

impl Command {
    /// The run file of a command that takes one.
    fn run_file(&self) -> Option<&crate::args::RunFileArgs> {
        match self {
            Self::Train(args) => Some(&args.run),
            Self::Plan(args) => Some(&args.run),
            _ => None,
        }
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::Fault(error)
    }
}
