//! Turns the program's arguments into a command and its settings, whatever their source.

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

/// The parsed command line.
#[derive(Debug)]
pub struct CommandLine {
    /// The command, with its settings checked.
    pub cli: Cli,
    /// Sources of the settings that were not typed.
    pub places: Places,
    /// Notes to show the user about the command line.
    pub notes: Vec<String>,
    /// The arguments as typed, without the program's name.
    pub arguments: Vec<OsString>,
}

/// Why no command runs.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// A usage error or a request for help.
    Usage(Box<clap::Error>),
    /// A run file or `--set` that cannot be used.
    Fault(Error),
}

/// Reads this program's arguments. Exits if there is nothing to run: after help, after
/// `--dump-config`, and on errors.
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

/// Parses `args`, including the program's name; also tells whether to only print the settings.
pub(crate) fn parse(args: Vec<OsString>) -> Result<(CommandLine, bool), Refusal> {
    let args = run_file::with_present_names(with_hyphens(args));
    let explained = parse_typed(&args)
        .map_err(|refusal| one_device::explain(&args, numbers::explain(&args, refusal)));
    explained.map_err(|refusal| advice::correct(&args, refusal))
}

/// As [`parse`], but with clap's own errors about numbers that do not fit the flag's type.
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
        // A missing required argument may come from another source.
        Err(error) if error.kind() != ErrorKind::MissingRequiredArgument => Err(error.into()),
        _ => run_file::resolve(args.to_vec()),
    }
}

/// Replaces underscores in flags: `--max_steps`, the spelling of run files and of other trainers,
/// becomes `--max-steps`. Arguments after `--` are left alone.
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

/// The error for an invalid setting, which was given at `place` if it was not typed. If a typed
/// flag requires another one, clap's own wording asks for it.
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
    // Only a built command knows the notation of its flags.
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
