//! Which source's value of a setting counts, and the arguments that say it.

use std::ffi::{OsStr, OsString};

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};

use super::NO_SETTINGS;
use super::value::{is_flag, is_list};

/// A source of settings; a later one wins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    File,
    Environment,
    Set,
    CommandLine,
}

/// One flag's value from one source. A flag without a value holds `true` or `false`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) level: Level,
    /// clap's id of the flag.
    pub(super) id: String,
    pub(super) values: Vec<OsString>,
    /// Where it was found, if neither on the command line nor in the environment.
    pub(super) place: Option<String>,
}

impl Setting {
    /// Flag and place, for errors about it.
    pub(super) fn origin(&self, command: &Command) -> Option<(String, String)> {
        let long = argument(command, &self.id)?.get_long()?;
        Some((format!("--{long}"), self.place.clone()?))
    }

    /// The setting as arguments of `command`.
    pub(super) fn arguments(&self, command: &Command) -> Vec<OsString> {
        let arg = argument(command, &self.id).expect("a setting is a flag of its command");
        let flag = OsString::from(format!("--{}", arg.get_long().expect("settings have names")));
        if is_flag(arg) {
            return if self.values == ["true"] { vec![flag] } else { Vec::new() };
        }
        let with = |value: &OsStr| {
            let mut argument = flag.clone();
            argument.push("=");
            argument.push(value);
            argument
        };
        match arg.get_value_delimiter() {
            Some(delimiter) => {
                vec![with(&self.values.join(OsStr::new(&delimiter.to_string())))]
            }
            None => self.values.iter().map(|value| with(value)).collect(),
        }
    }
}

/// What the user typed and what the environment says.
pub(super) fn typed(command: &Command, matches: &ArgMatches) -> Vec<Setting> {
    let level = |id: &str| match matches.value_source(id) {
        Some(ValueSource::CommandLine) => Some(Level::CommandLine),
        Some(ValueSource::EnvVariable) => Some(Level::Environment),
        _ => None,
    };
    settings_of(command)
        .filter_map(|arg| {
            let id = arg.get_id().as_str();
            let values = values(arg, matches);
            Some(Setting { level: level(id)?, id: id.into(), values, place: None })
        })
        .collect()
}

/// The arguments of a command that are settings.
pub(super) fn settings_of(command: &Command) -> impl Iterator<Item = &Arg> {
    command
        .get_arguments()
        .filter(|arg| arg.get_long().is_some() && !NO_SETTINGS.contains(&arg.get_id().as_str()))
}

/// The texts of a matched argument.
pub(super) fn values(arg: &Arg, matches: &ArgMatches) -> Vec<OsString> {
    let id = arg.get_id().as_str();
    if is_flag(arg) {
        return vec![matches.get_flag(id).to_string().into()];
    }
    let mut raw = matches.get_raw(id).unwrap_or_default().map(OsStr::to_owned);
    // Of a flag that takes one value clap keeps the last.
    if is_list(arg) { raw.collect() } else { raw.next_back().into_iter().collect() }
}

/// Flags that every command takes, as arguments.
pub(super) fn globals(matches: &ArgMatches) -> Vec<OsString> {
    let mut arguments = vec![OsString::from("-v"); usize::from(matches.get_count("verbose"))];
    if matches.get_flag("quiet") {
        arguments.push("-q".into());
    }
    arguments
}

/// One setting a flag: the highest source's. What conflicts with a setting of a higher source goes
/// as well; conflicts within one source are left for clap to report.
pub(super) fn merge(command: &Command, mut settings: Vec<Setting>) -> Vec<Setting> {
    settings.sort_by_key(|setting| std::cmp::Reverse(setting.level));
    let mut kept: Vec<Setting> = Vec::new();
    for setting in settings {
        let hidden = kept.iter().any(|higher| {
            let beaten =
                setting.level < higher.level && conflict(command, (&setting.id, &higher.id));
            setting.id == higher.id || beaten
        });
        if !hidden {
            kept.push(setting);
        }
    }
    kept
}

/// Whether clap refuses the two flags together.
fn conflict(command: &Command, (one, other): (&str, &str)) -> bool {
    let names = |id: &str, other: &str| {
        argument(command, id).is_some_and(|arg| {
            command.get_arg_conflicts_with(arg).iter().any(|arg| arg.get_id() == other)
        })
    };
    names(one, other) || names(other, one)
}

fn argument<'a>(command: &'a Command, id: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|arg| arg.get_id() == id)
}
