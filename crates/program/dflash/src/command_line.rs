//! From the program's arguments to a command with its settings, wherever they come from.

mod advice;
mod numbers;
mod one_device;

use std::ffi::OsString;

use clap::FromArgMatches;
use clap::error::ErrorKind;
use dflash_settings::Invalid;

use crate::cli::{Cli, definition};
use crate::error::Error;
use crate::places::Places;
use crate::{exit, name, run_file};

/// What the user asked for.
#[derive(Debug)]
pub struct CommandLine {
    /// The command, its settings checked.
    pub cli: Cli,
    /// Where the settings that were not typed come from.
    pub places: Places,
    /// What the user should be told of the line.
    pub notes: Vec<String>,
    /// The arguments as they were typed, the program's name left out.
    pub arguments: Vec<OsString>,
}

/// Why no command is run.
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
            print!("{text}");
            exit::at_once(exit::DONE)
        }
        Err(Refusal::Usage(error)) => error.exit(),
        Err(Refusal::Fault(error)) => exit::fault(error),
    }
}

/// Parses `args`, the program's name first; also tells whether the settings are only to be shown.
pub(crate) fn parse(args: Vec<OsString>) -> Result<(CommandLine, bool), Refusal> {
    let args = run_file::with_present_names(with_hyphens(args));
    let explained = parse_typed(&args)
        .map_err(|refusal| one_device::explain(&args, numbers::explain(&args, refusal)));
    explained.map_err(|refusal| advice::correct(&args, refusal))
}

/// As [`parse`], with clap's own words about numbers that the flag's type cannot hold.
fn parse_typed(args: &[OsString]) -> Result<(CommandLine, bool), Refusal> {
    let strict = definition().try_get_matches_from(args);
    match strict {
        Ok(matches) if !run_file::has_settings_elsewhere(&matches) => {
            let cli = Cli::from_arg_matches(&matches)?;
            let dump = run_file::wants_dump(&matches);
            let name = matches.subcommand_name().unwrap_or_default();
            cli.command.check().map_err(|invalid| refusal(name, None, invalid))?;
            let arguments = args[1..].to_vec();
            Ok((CommandLine { cli, places: Places::default(), notes: Vec::new(), arguments }, dump))
        }
        // What is missing on the command line may come from elsewhere.
        Err(error) if error.kind() != ErrorKind::MissingRequiredArgument => Err(error.into()),
        _ => run_file::resolve(args.to_vec()),
    }
}

/// Flags as they are defined: `--max_steps`, as it is written in run files and by other trainers, is
/// `--max-steps`. What follows `--` is somebody else's.
fn with_hyphens(args: Vec<OsString>) -> Vec<OsString> {
    let ours = args.iter().position(|arg| arg == "--").unwrap_or(args.len());
    let flag = |(at, arg): (usize, OsString)| match arg.to_str() {
        Some(text) if at < ours && text.starts_with("--") => {
            let name = text.split('=').next().unwrap_or(text);
            format!("{}{}", name.replace('_', "-"), &text[name.len()..]).into()
        }
        _ => arg,
    };
    args.into_iter().enumerate().map(flag).collect()
}

/// The refusal of a setting, which is at `place` if it was not typed. What a typed flag lacks is
/// asked for in clap's own words.
pub(crate) fn refusal(command: &str, place: Option<&str>, invalid: Invalid) -> Refusal {
    match (place, invalid.missing) {
        (None, Some(missing)) => {
            // What the flag is for, and what does instead.
            let about = invalid.reason.strip_prefix("is needed: ");
            let about = about.map_or_else(String::new, |about| format!(": {about}"));
            let message = format!(
                "the following required arguments were not provided:\n  {}{about}",
                flag(command, missing)
            );
            usage_error(command, ErrorKind::MissingRequiredArgument, &message)
        }
        (place, _) => {
            let place = place.map_or_else(String::new, |place| format!("{place}: "));
            Refusal::Fault(Error::Invalid { place, invalid })
        }
    }
}

/// A flag as clap writes it, such as `--epochs <N>`.
fn flag(command: &str, key: &str) -> String {
    let mut definition = definition();
    // Only a built command knows how its flags are written.
    definition.build();
    let command = definition.find_subcommand(command);
    let arg = command.and_then(|command| command.get_arguments().find(|arg| arg.get_id() == key));
    arg.map_or_else(|| format!("--{}", key.replace('_', "-")), ToString::to_string)
}

pub(crate) fn usage_error(command: &str, kind: ErrorKind, message: &str) -> Refusal {
    let mut definition = definition().bin_name(name::invoked());
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
