//! Chooses between the values that several sources give a setting.

use clap::parser::ValueSource;
use clap::{Arg, Command};
use serde_json::Value;

use crate::error::Error;

/// A source of settings; later ones take precedence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    File,
    Environment,
    Set,
    CommandLine,
}

impl Level {
    /// `None` for a default.
    pub(super) fn of(source: ValueSource) -> Option<Self> {
        match source {
            ValueSource::CommandLine => Some(Self::CommandLine),
            ValueSource::EnvVariable => Some(Self::Environment),
            _ => None,
        }
    }
}

/// One setting's value from one source.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Setting {
    pub(super) level: Level,
    pub(super) key: String,
    pub(super) value: Value,
    /// Where it was found, unless on the command line or in the environment.
    pub(super) place: Option<String>,
}

impl Setting {
    /// Key and place, for errors about it.
    pub(super) fn place(self) -> Option<(String, String)> {
        Some((self.key, self.place?))
    }
}

/// Keeps one value per key: that of the highest source, and the last one within a source. A setting
/// that conflicts with one of a higher source is dropped too.
///
/// # Errors
/// Two settings of one source conflict.
pub(super) fn merge(command: &Command, mut settings: Vec<Setting>) -> Result<Vec<Setting>, Error> {
    settings.reverse();
    settings.sort_by_key(|setting| std::cmp::Reverse(setting.level));
    let mut kept: Vec<Setting> = Vec::new();
    for setting in settings {
        if kept.iter().any(|higher| higher.key == setting.key) {
            continue;
        }
        match kept.iter().find(|higher| conflict(command, &setting, higher)) {
            None => kept.push(setting),
            Some(higher) if higher.level > setting.level => {}
            Some(other) => return Err(refuse(command, &setting, other)),
        }
    }
    Ok(kept)
}

/// Whether two settings exclude each other. Absent values and flags that are off do not conflict.
fn conflict(command: &Command, one: &Setting, other: &Setting) -> bool {
    let names = |one: &str, other: &str| {
        argument(command, one).is_some_and(|arg| {
            command.get_arg_conflicts_with(arg).iter().any(|arg| arg.get_id() == other)
        })
    };
    let counts = |setting: &Setting| !matches!(setting.value, Value::Null | Value::Bool(false));
    counts(one) && counts(other) && (names(&one.key, &other.key) || names(&other.key, &one.key))
}

fn refuse(command: &Command, one: &Setting, other: &Setting) -> Error {
    let flag = |setting: &Setting| argument(command, &setting.key).map(ToString::to_string);
    let flags = [flag(one).unwrap_or_default(), flag(other).unwrap_or_default()];
    Error::Setting {
        place: one.place.clone().unwrap_or_default(),
        key: one.key.clone(),
        reason: format!("is refused: '{}' cannot be used with '{}'", flags[0], flags[1]),
    }
}

pub(super) fn argument<'a>(command: &'a Command, id: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|arg| arg.get_id() == id)
}
