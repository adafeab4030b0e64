//! Settings that are not typed: run files, `--set`, the environment, and what the front program
//! hands over to the engine.
//!
//! Every source gives values by key. Precedence, highest first: typed flags, `--set`, the
//! environment, the run file, the defaults. Serde then turns the values into the command's
//! settings. An invalid value is reported with its file and line.

mod document;
mod dump;
mod earlier;
mod layers;
mod value;
mod vllm;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::{Arg, ArgMatches, FromArgMatches};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::cli::{Cli, Command, DUMP_CONFIG, RUN_FILE, SET, VLLM_FLAGS, definition, table_of};
use crate::command_line::{CommandLine, Refusal, refusal, usage_error};
use crate::error::Error;
use crate::places::Places;
pub(crate) use dump::dump;
pub(crate) use earlier::with_present_names;
use layers::{Level, Setting};
use value::Given;

/// Arguments that are not settings.
const NO_SETTINGS: [&str; 6] = [SET, DUMP_CONFIG, "verbose", "quiet", "help", "version"];

/// Variable with the settings that the front program resolved, for the engine and the ranks that it
/// starts: all have the same settings, even if the file changes.
const HANDOVER: &str = "DFLASH_SETTINGS";

/// The content of [`HANDOVER`].
#[derive(Serialize, Deserialize)]
struct Handover {
    command: Command,
    places: Places,
    notes: Vec<String>,
}

/// Where a setting was found, as an error names it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum SettingPlace {
    File { path: PathBuf, line: usize },
    Set,
}

impl std::fmt::Display for SettingPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Set => write!(f, "--set"),
        }
    }
}

/// A key with its value, not yet known to be a setting.
#[derive(Debug)]
struct Entry {
    place: SettingPlace,
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

/// Whether a parsed command line has settings from other sources.
pub(crate) fn has_settings_elsewhere(matches: &ArgMatches) -> bool {
    let Some((_, matches)) = matches.subcommand() else { return false };
    let given = |id| matches.try_contains_id(id).unwrap_or(false);
    [RUN_FILE, SET, VLLM_FLAGS].into_iter().any(given) || handed_over().is_some()
}

pub(crate) fn wants_dump(matches: &ArgMatches) -> bool {
    let matches = matches.subcommand().map(|(_, matches)| matches);
    matches
        .is_some_and(|matches| matches!(matches.try_get_one::<bool>(DUMP_CONFIG), Ok(Some(true))))
}

/// The variable and value that hand `line` to child programs; `None` if all of it was typed.
pub(crate) fn handover(line: &CommandLine) -> Option<(&'static str, String)> {
    if line.places == Places::default() && line.notes.is_empty() {
        return None;
    }
    let handover = Handover {
        command: line.cli.command.clone(),
        places: line.places.clone(),
        notes: line.notes.clone(),
    };
    Some((HANDOVER, serde_json::to_string(&handover).expect("settings came from text")))
}

/// Only the engine accepts a handover: a front program in a script has its own command line.
fn handed_over() -> Option<Handover> {
    if !crate::engine::is_this_program() {
        return None;
    }
    serde_json::from_str(&std::env::var(HANDOVER).ok()?).ok()
}

/// The command in `args` with the settings of all sources.
pub(crate) fn resolve(args: Vec<OsString>) -> Result<(CommandLine, bool), Refusal> {
    let typed = relaxed().try_get_matches_from(&args)?;
    let Some((name, matches)) = typed.subcommand() else { unreachable!("clap asks for a command") };
    if table_of(name).is_none() {
        // No other source could supply what is missing: let clap report it.
        return Err(definition().try_get_matches_from(&args).expect_err("it was refused").into());
    }
    let cli = complete(&args, name, matches)?;
    let sources = Sources::new(name, &cli.command)?;
    let mut settings = sources.typed(matches);
    let mut notes = Vec::new();
    match handed_over() {
        Some(handover) => {
            settings.extend(sources.handed_over(&handover)?);
            notes = handover.notes;
        }
        None => {
            if name == "hidden-server" {
                settings.extend(vllm::line(matches, &mut notes)?);
            }
            if name == "prepare" {
                settings.extend(data_word(matches));
            }
            for entry in earlier::present(sources.table, sets(matches, sources.table)?) {
                settings.extend(sources.setting(&entry, Level::Set)?);
            }
            if let Some(path) = run_file(name, matches) {
                settings.extend(sources.file(path)?);
            }
        }
    }
    let (command, places) = sources.resolve(settings)?;
    command.check().map_err(|invalid| refusal(name, places.of(invalid.key), invalid))?;
    let cli = Cli { command, global: cli.global };
    let line = CommandLine { cli, places, notes, arguments: args[1..].to_vec() };
    Ok((line, wants_dump(&typed)))
}

/// The run file; a hidden server's target, and the data of `prepare`, may take its place.
fn run_file<'a>(name: &str, matches: &'a ArgMatches) -> Option<&'a PathBuf> {
    let path = matches.get_one::<PathBuf>(RUN_FILE)?;
    let is_run_file = match name {
        "hidden-server" => vllm::is_run_file(path),
        "prepare" => !is_data(path),
        _ => true,
    };
    is_run_file.then_some(path)
}

/// Endings of files that people give `prepare` as data, whether it reads them or says what to do about them.
const DATA_ENDINGS: [&str; 12] =
    ["jsonl", "json", "ndjson", "parquet", "csv", "tsv", "arrow", "txt", "gz", "zst", "zip", "md"];

/// Whether the word after `prepare` is data and not a run file: a file with such an ending, a directory, or
/// what is no file at all, a preset or a name on the Hub.
fn is_data(path: &Path) -> bool {
    let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    ending != "toml" && (DATA_ENDINGS.contains(&ending) || path.is_dir() || !path.exists())
}

/// The data of `prepare` that was given without its flag; --data adds to it.
fn data_word(matches: &ArgMatches) -> Option<Setting> {
    let word = matches.get_one::<PathBuf>(RUN_FILE).filter(|path| is_data(path))?;
    let word = word.to_string_lossy().into_owned();
    let named = matches.get_many::<String>("data").unwrap_or_default().cloned();
    let all: Vec<String> = std::iter::once(word).chain(named).collect();
    Some(Setting { level: Level::CommandLine, key: "data".into(), value: all.into(), place: None })
}

/// The command line without required arguments, to parse what the user typed.
fn relaxed() -> clap::Command {
    definition().mut_subcommands(|command| command.mut_args(|argument| argument.required(false)))
}

/// Parses `args` with clap's defaults and types, and placeholders for missing arguments.
fn complete(args: &[OsString], name: &str, typed: &ArgMatches) -> Result<Cli, Refusal> {
    const MARK: &str = "?";
    let definition = definition();
    let command = definition.find_subcommand(name).expect("clap just chose it");
    let missing = command
        .get_arguments()
        .filter(|arg| arg.is_required_set() && !typed.contains_id(arg.get_id().as_str()))
        .filter_map(Arg::get_long)
        .map(|long| format!("--{long}={MARK}").into());
    let at = args.iter().position(|arg| arg == name).expect("clap found it") + 1;
    let line = args[..at].iter().cloned().chain(missing).chain(args[at..].iter().cloned());
    Ok(Cli::from_arg_matches(&definition.clone().try_get_matches_from(line)?)?)
}

/// The `--set KEY=VALUE` arguments; if a key is repeated, the last one counts.
fn sets(typed: &ArgMatches, table: &str) -> Result<Vec<Entry>, Error> {
    let texts = typed.get_many::<String>(SET).unwrap_or_default();
    let entry = |text: &String| {
        let (key, value) = text.split_once('=').ok_or_else(|| Error::Setting {
            place: SettingPlace::Set.to_string(),
            key: text.clone(),
            reason: format!("needs a value, as in --set {text}=VALUE"),
        })?;
        let key = key.trim();
        let key = key.strip_prefix(table).and_then(|key| key.strip_prefix('.')).unwrap_or(key);
        Ok(Entry { place: SettingPlace::Set, key: key.into(), value: Given::of_text(value.trim()) })
    };
    texts.map(entry).collect()
}

/// A command's settings as values by key.
fn values_of(command: &Command) -> Result<Map<String, Value>, Error> {
    let tagged = serde_json::to_value(command).map_err(|error| Error::Setting {
        place: "the command line".into(),
        key: "a path".into(),
        reason: format!("cannot be combined with a run file: {error}"),
    })?;
    let Value::Object(tagged) = tagged else { unreachable!("an enum with tags") };
    match tagged.into_iter().next() {
        Some((_, Value::Object(values))) => Ok(values),
        _ => unreachable!("settings are structs"),
    }
}

/// Turns entries into settings of a command, and those into the command.
struct Sources {
    /// Its name on the command line.
    name: String,
    table: &'static str,
    definition: clap::Command,
    /// The command whose flags are the table's keys.
    keys: clap::Command,
    /// The defaults, and placeholders for required settings.
    base: Map<String, Value>,
}

impl Sources {
    fn new(name: &str, complete: &Command) -> Result<Self, Error> {
        let table = table_of(name).expect("this command reads run files");
        let mut all = definition();
        // Only a built command knows the notation of its flags.
        all.build();
        let find = |name: &str| all.find_subcommand(name).expect("a command").clone();
        let base = values_of(complete)?;
        let keys = find(&table.replace('_', "-"));
        Ok(Self { name: name.into(), table, definition: find(name), keys, base })
    }

    /// The settings that the user typed and those of the environment.
    fn typed(&self, matches: &ArgMatches) -> Vec<Setting> {
        let setting = |(key, value): (&String, &Value)| {
            let level = Level::of(matches.value_source(key)?)?;
            Some(Setting { level, key: key.clone(), value: value.clone(), place: None })
        };
        self.base.iter().filter_map(setting).collect()
    }

    /// The handed-over settings that differ from the defaults, which may conflict with each other.
    fn handed_over(&self, handover: &Handover) -> Result<Vec<Setting>, Error> {
        let setting = |(key, value): (String, Value)| {
            let place = handover.places.of(&key).map(str::to_owned);
            Setting { level: Level::Set, key, value, place }
        };
        let mut values = values_of(&handover.command)?;
        values.retain(|key, value| self.base.get(key) != Some(value));
        Ok(values.into_iter().map(setting).collect())
    }

    /// The settings of a run file, without keys that belong to the table but not to this command.
    fn file(&self, path: &Path) -> Result<Vec<Setting>, Error> {
        let mut settings: Vec<Setting> = Vec::new();
        for entry in earlier::present(self.table, document::read(path, self.table)?) {
            let Some(setting) = self.setting(&entry, Level::File)? else { continue };
            if settings.iter().any(|earlier| earlier.key == setting.key) {
                return Err(entry.refuse("is given twice in this file"));
            }
            settings.push(setting);
        }
        Ok(settings)
    }

    fn setting(&self, entry: &Entry, level: Level) -> Result<Option<Setting>, Error> {
        self.find(&self.keys, entry).ok_or_else(|| self.unknown(entry))?;
        let Some(arg) = self.find(&self.definition, entry) else { return Ok(None) };
        let value = value::convert(arg, &entry.value).map_err(|reason| entry.refuse(reason))?;
        let key = arg.get_id().to_string();
        let mut values = self.base.clone();
        values.insert(key.clone(), value.clone());
        self.command(values)
            .map_err(|error| entry.refuse(value::refusal(arg, &entry.value, &error)))?;
        Ok(Some(Setting { level, key, value, place: Some(entry.place.to_string()) }))
    }

    /// The flag of a key, by name or alias; snake_case and kebab-case are equivalent.
    fn find<'c>(&self, command: &'c clap::Command, entry: &Entry) -> Option<&'c Arg> {
        let name = entry.key.replace('_', "-");
        command.get_arguments().find(|arg| {
            let named = arg.get_long() == Some(name.as_str())
                || arg.get_all_aliases().is_some_and(|all| all.contains(&name.as_str()));
            named && !NO_SETTINGS.contains(&arg.get_id().as_str())
        })
    }

    fn unknown(&self, entry: &Entry) -> Error {
        let command = self.keys.get_name();
        let flag = format!("--{}=0", entry.key.replace('_', "-"));
        let error = relaxed().try_get_matches_from(["dflash", command, &flag]).err();
        let suggestion = error.as_ref().and_then(|error| {
            match error.get(clap::error::ContextKind::SuggestedArg) {
                Some(clap::error::ContextValue::String(flag)) => Some(flag.as_str()),
                _ => None,
            }
        });
        let hint = suggestion.map_or_else(
            || format!("`dflash {command} --help` lists the flags"),
            |flag| format!("did you mean {}?", flag.trim_start_matches('-').replace('-', "_")),
        );
        entry.refuse(format!("is not a setting of `dflash {command}`; {hint}"))
    }

    /// Chooses one value per key and builds the command, with the places of the chosen values.
    fn resolve(&self, settings: Vec<Setting>) -> Result<(Command, Places), Refusal> {
        let given = layers::merge(&self.definition, settings)?;
        let is_given = |id: &str| given.iter().any(|setting| setting.key == id);
        let missing: Vec<String> = self
            .definition
            .get_arguments()
            .filter(|arg| arg.is_required_set() && !is_given(arg.get_id().as_str()))
            .map(|arg| format!("\n  {arg}"))
            .collect();
        if !missing.is_empty() {
            let message =
                format!("the following required arguments were not provided:{}", missing.concat());
            return Err(usage_error(&self.name, ErrorKind::MissingRequiredArgument, &message));
        }
        let mut values = self.base.clone();
        values.extend(given.iter().map(|setting| (setting.key.clone(), setting.value.clone())));
        let command = self.command(values).expect("every value was tried");
        Ok((command, given.into_iter().filter_map(Setting::place).collect()))
    }

    fn command(&self, values: Map<String, Value>) -> serde_json::Result<Command> {
        let tag = self.name.replace('-', "_");
        serde_json::from_value(Value::Object([(tag, Value::Object(values))].into_iter().collect()))
    }
}
