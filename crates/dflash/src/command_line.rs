//! From the program's arguments to a command with its settings, wherever these stand.

use std::ffi::OsString;
use std::io::Write;

use clap::FromArgMatches;
use clap::error::ErrorKind;
use dflash_settings::Invalid;

use crate::cli::{Cli, definition};
use crate::error::Error;
use crate::places::Places;
use crate::{exit, run_file};

/// What the user asked for.
#[derive(Debug)]
pub struct CommandLine {
    /// The command, its settings checked.
    pub cli: Cli,
    /// Where those settings stand that were not typed.
    pub places: Places,
    /// What the user should be told of the line.
    pub notes: Vec<String>,
    /// The arguments as they were typed, the program's name left out.
    pub arguments: Vec<OsString>,
}

/// Why there is no command to run.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// Not a command line, or a request for help.
    Usage(Box<clap::Error>),
    /// A run file, or a `--set`, that cannot be used.
    Fault(Error),
}

/// Reads this program's arguments. Leaves the process where there is nothing to run: after help,
/// after `--dump-config`, and on mistakes.
pub fn read() -> CommandLine {
    let args: Vec<OsString> = std::env::args_os().collect();
    match parse(args) {
        Ok((line, false)) => line,
        Ok((line, true)) => {
            let text = run_file::dump(&line.cli).unwrap_or_else(|error| exit::fault(error));
            // A closed standard output is the reader's choice.
            let _ = std::io::stdout().write_all(text.as_bytes());
            exit::at_once(exit::DONE)
        }
        Err(Refusal::Usage(error)) => error.exit(),
        Err(Refusal::Fault(error)) => exit::fault(error),
    }
}

/// Parses `args`, the program's name first; also tells whether the settings are only to be shown.
pub(crate) fn parse(args: Vec<OsString>) -> Result<(CommandLine, bool), Refusal> {
    let strict = definition().try_get_matches_from(&args);
    match strict {
        Ok(matches) if !run_file::has_settings_elsewhere(&matches) => {
            let cli = Cli::from_arg_matches(&matches)?;
            let dump = run_file::wants_dump(&matches);
            let name = matches.subcommand_name().unwrap_or_default();
            cli.command.check().map_err(|invalid| usage(name, &invalid))?;
            let arguments = args[1..].to_vec();
            Ok((CommandLine { cli, places: Places::default(), notes: Vec::new(), arguments }, dump))
        }
        // What is missing on the command line may stand elsewhere.
        Err(error) if error.kind() != ErrorKind::MissingRequiredArgument => Err(error.into()),
        _ => run_file::resolve(args),
    }
}

/// The error about a flag's value, in clap's own words.
pub(crate) fn usage(command: &str, invalid: &Invalid) -> Refusal {
    let message = invalid_value(command, invalid);
    usage_error(command, ErrorKind::ValueValidation, &message)
}

/// `invalid value '0' for '--epochs <N>': it must be at least 1`.
pub(crate) fn invalid_value(command: &str, invalid: &Invalid) -> String {
    let Invalid { key, value, expected } = invalid;
    let mut definition = definition();
    // Only a built command knows how its flags are written.
    definition.build();
    let flag = definition
        .find_subcommand(command)
        .and_then(|command| command.get_arguments().find(|arg| arg.get_id() == key))
        .map_or_else(|| format!("--{}", key.replace('_', "-")), ToString::to_string);
    format!("invalid value '{value}' for '{flag}': {expected}")
}

pub(crate) fn usage_error(command: &str, kind: ErrorKind, message: &str) -> Refusal {
    let mut definition = definition();
    definition.build();
    let error = match definition.find_subcommand_mut(command) {
        Some(command) => command.error(kind, message),
        None => definition.error(kind, message),
    };
    error.into()
}

impl From<clap::Error> for Refusal {
    fn from(error: clap::Error) -> Self {
        Self::Usage(Box::new(error))
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::Fault(error)
    }
}
