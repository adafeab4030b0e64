//! `--dump-config`: the resolved settings as a run file.

use std::ffi::OsString;

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, CommandFactory, Parser};
use toml::Value;

use super::TABLE;
use super::merge::{Level, Setting, settings_of, values};
use super::value::{is_flag, is_list, is_number};
use crate::args::Cli;
use crate::error::Error;

/// The run file that stands for `arguments` (complete, without a run file of their own).
///
/// Every setting with a value is in it, defaults included. A default that clap refuses beside the
/// settings, because it conflicts with one or needs another, is left out, since it does not count;
/// what has no value is listed in a comment.
pub(crate) fn dump(arguments: &[OsString]) -> Result<String, Error> {
    let mut command = Cli::command();
    let program = OsString::from("dflash");
    let line: Vec<OsString> = std::iter::once(&program).chain(arguments).cloned().collect();
    let matches = command.try_get_matches_from_mut(&line).expect("these arguments were parsed");
    let (name, matches) = matches.subcommand().expect("a command was parsed");
    let command = command.find_subcommand(name).expect("clap just chose it");
    let mut text = format!("# Settings of `dflash {name}`, defaults included.\n[{TABLE}]\n");
    let mut absent = Vec::new();
    let mut heading = None;
    for arg in settings_of(command) {
        let (id, values) = (arg.get_id().to_string(), values(arg, matches));
        let setting = Setting { level: Level::File, id, values, place: None };
        let with = || line.iter().cloned().chain(setting.arguments(command));
        let idle = is_default(arg, matches) && Cli::try_parse_from(with()).is_err();
        if setting.values.is_empty() || idle {
            absent.push(key(arg));
            continue;
        }
        if arg.get_help_heading() != heading {
            heading = arg.get_help_heading();
            text.push_str(&format!("\n# {}\n", heading.unwrap_or("Run")));
        }
        text.push_str(&format!("{} = {}\n", key(arg), value(arg, &setting.values)?));
    }
    text.push_str(&format!("\n# Without a value: {}\n", absent.join(", ")));
    Ok(text)
}

fn is_default(arg: &Arg, matches: &ArgMatches) -> bool {
    let source = matches.value_source(arg.get_id().as_str());
    !matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable))
}

fn key(arg: &Arg) -> String {
    arg.get_long().unwrap_or_default().replace('-', "_")
}

fn value(arg: &Arg, texts: &[OsString]) -> Result<String, Error> {
    let one = |text: &OsString| match text.to_str() {
        Some(text) if is_number(arg) => Ok(number(text)),
        Some(text) if is_flag(arg) => Ok(text.to_owned()),
        Some(text) => Ok(Value::from(text).to_string()),
        None => Err(Error::Setting {
            place: "--dump-config".into(),
            key: key(arg),
            reason: "is no UTF-8, which TOML cannot hold".into(),
        }),
    };
    if is_list(arg) {
        let values = texts.iter().map(one).collect::<Result<Vec<_>, _>>()?;
        return Ok(format!("[{}]", values.join(", ")));
    }
    one(&texts[0])
}

/// A number as TOML has it: `.5`, `1.` and `+1` are Rust's. Whole ones stay as they are, since
/// seeds may exceed the range of TOML's own integers; the reader takes their digits.
fn number(text: &str) -> String {
    let whole = text.parse::<u64>().is_ok() || text.parse::<i64>().is_ok();
    match text.parse::<f64>() {
        Ok(number) if !whole => Value::Float(number).to_string(),
        _ => text.to_owned(),
    }
}
