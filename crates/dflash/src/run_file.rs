//! Run files: a command's flags as keys of a TOML table.
//!
//! There is no second parser of flags. Every key becomes the flag of its name, and clap checks it
//! as if it had been typed; a key that clap refuses is reported with its file and line. What is
//! typed wins over `--set`, that over the environment, that over the run file, and all of them
//! over the defaults.

mod document;
mod dump;
mod merge;
mod value;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::{Arg, ArgMatches};

use crate::command_line::{Refusal, relaxed};
use crate::error::Error;
use crate::origins::Origins;
pub(crate) use dump::dump;
use merge::{Level, Setting};
use value::Given;

/// The table whose keys are the flags of `dflash train`.
const TABLE: &str = "train";

/// What the command line says about settings, not settings themselves.
const NO_SETTINGS: [&str; 7] =
    ["run_file", "set", "dump_config", "verbose", "quiet", "help", "version"];

/// Where a setting was found, as an error names it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    File { path: PathBuf, line: usize },
    Set,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Set => write!(f, "--set"),
        }
    }
}

/// A key with its value, before it is known to be a flag.
#[derive(Debug)]
struct Entry {
    place: Place,
    key: String,
    value: Given,
}

impl Entry {
    fn refuse(&self, reason: impl Into<String>) -> Error {
        Error::Setting {
            place: self.place.to_string(),
            key: self.key.clone(),
            reason: reason.into(),
        }
    }
}

/// A command line without run file and `--set`.
pub(crate) struct Expanded {
    /// The program's name first.
    pub(crate) arguments: Vec<OsString>,
    pub(crate) origins: Origins,
}

/// The arguments that stand for `args` with the run file, `--set` and the environment put in; `None`
/// when `args` have neither run file nor `--set`.
pub(crate) fn expand(args: &[OsString]) -> Result<Option<Expanded>, Refusal> {
    // What is typed was parsed before; all that it can lack is what the run file may give.
    let mut command = relaxed().ignore_errors(true);
    let matches = command.try_get_matches_from_mut(args).map_err(Refusal::Usage)?;
    let Some((name, typed)) = matches.subcommand() else { return Ok(None) };
    let given = |id: &str| typed.try_contains_id(id).unwrap_or(false);
    if !given("run_file") && !given("set") {
        return Ok(None);
    }
    let subcommand = command.find_subcommand(name).expect("clap just chose it").clone();
    let checker = Checker::new(&subcommand);
    let mut settings = merge::typed(&subcommand, typed);
    for entry in sets(typed)? {
        settings.extend(checker.setting(&entry, Level::Set)?);
    }
    if let Some(path) = typed.get_one::<PathBuf>("run_file") {
        settings.extend(checker.file(path)?);
    }
    let merged = merge::merge(&subcommand, settings);
    let mut arguments = vec![args[0].clone(), name.into()];
    arguments.extend(merge::globals(typed));
    if typed.get_flag("dump_config") {
        arguments.push("--dump-config".into());
    }
    arguments.extend(merged.iter().flat_map(|setting| setting.arguments(&subcommand)));
    let origins = merged.iter().filter_map(|setting| setting.origin(&subcommand)).collect();
    Ok(Some(Expanded { arguments, origins: Origins::new(origins) }))
}

/// The `--set KEY=VALUE` of a command line; of a key given twice the last.
fn sets(typed: &ArgMatches) -> Result<Vec<Entry>, Error> {
    let texts = typed.get_many::<String>("set").unwrap_or_default();
    let entry = |text: &String| {
        let (key, value) = text.split_once('=').ok_or_else(|| Error::Setting {
            place: Place::Set.to_string(),
            key: text.clone(),
            reason: format!("needs a value, as in --set {text}=VALUE"),
        })?;
        let key = key.trim();
        let key = key.strip_prefix(TABLE).and_then(|key| key.strip_prefix('.')).unwrap_or(key);
        Ok(Entry { place: Place::Set, key: key.into(), value: value::of_text(value.trim()) })
    };
    texts.rev().map(entry).collect()
}

/// Turns entries into settings, and asks clap about each of them alone.
struct Checker<'a> {
    command: &'a clap::Command,
    /// `dflash train`, whose flags are the keys whatever the command.
    keys: clap::Command,
}

impl<'a> Checker<'a> {
    fn new(command: &'a clap::Command) -> Self {
        let all = relaxed();
        let keys = all.find_subcommand(TABLE).expect("there is a command train").clone();
        Self { command, keys }
    }

    /// The settings of a run file; keys that `train` has and this command lacks are left out.
    fn file(&self, path: &Path) -> Result<Vec<Setting>, Error> {
        let mut settings: Vec<Setting> = Vec::new();
        for entry in document::read(path)? {
            let Some(setting) = self.setting(&entry, Level::File)? else { continue };
            if settings.iter().any(|earlier| earlier.id == setting.id) {
                return Err(entry.refuse("is given twice in this file"));
            }
            settings.push(setting);
        }
        Ok(settings)
    }

    fn setting(&self, entry: &Entry, level: Level) -> Result<Option<Setting>, Error> {
        let key = self.find(&self.keys, entry).ok_or_else(|| self.unknown(entry))?;
        let Some(arg) = self.find(self.command, entry) else { return Ok(None) };
        let values = value::convert(arg, &entry.value).map_err(|reason| entry.refuse(reason))?;
        let place = Some(entry.place.to_string());
        let setting = Setting { level, id: key.get_id().to_string(), values, place };
        let mut line = vec![OsString::from("dflash"), self.command.get_name().into()];
        line.extend(setting.arguments(self.command));
        match relaxed().try_get_matches_from(line) {
            Ok(_) => Ok(Some(setting)),
            // Flags that need another one are checked once all are there.
            Err(error) if error.kind() == ErrorKind::MissingRequiredArgument => Ok(Some(setting)),
            Err(error) => Err(entry.refuse(format!("is refused: {}", clap_reason(&error)))),
        }
    }

    /// The flag of a key, by its name or an alias; snake_case and kebab-case are the same.
    fn find<'c>(&self, command: &'c clap::Command, entry: &Entry) -> Option<&'c Arg> {
        let name = entry.key.replace('_', "-");
        command.get_arguments().find(|arg| {
            let named = arg.get_long() == Some(name.as_str())
                || arg.get_all_aliases().is_some_and(|all| all.contains(&name.as_str()));
            named && !NO_SETTINGS.contains(&arg.get_id().as_str())
        })
    }

    fn unknown(&self, entry: &Entry) -> Error {
        let flag = format!("--{}=0", entry.key.replace('_', "-"));
        let error = relaxed().try_get_matches_from(["dflash", TABLE, &flag]).err();
        let suggestion = error.as_ref().and_then(|error| {
            match error.get(clap::error::ContextKind::SuggestedArg) {
                Some(clap::error::ContextValue::String(flag)) => Some(flag.as_str()),
                _ => None,
            }
        });
        let hint = suggestion.map_or_else(
            || "`dflash train --help` lists the flags".to_owned(),
            |flag| format!("did you mean {}?", flag.trim_start_matches('-').replace('-', "_")),
        );
        entry.refuse(format!("is no setting of `dflash train`; {hint}"))
    }
}

/// clap's message without its frame.
fn clap_reason(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let end = ["\n\nUsage", "\n\nFor more"].iter().filter_map(|mark| text.find(mark)).min();
    let lines: Vec<&str> = text[..end.unwrap_or(text.len())]
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    lines.join(" ")
}
